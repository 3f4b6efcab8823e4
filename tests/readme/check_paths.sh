#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Files that documents name must exist: targets of links, `area/header.hpp` in code quotes, and headers in figures. They are
# looked up beside the document, in the repository, in the areas of include/gpushare and of tests. What is in build/ comes
# later.
#
#   check_paths.sh DOCUMENT...
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)

missing=0
for document in "$@"; do
    folder=$(dirname "$document")
    while read -r path; do
        [[ $path != build/* ]] || continue
        for place in "$folder" "$root" "$root"/include/gpushare/{,*/,*/*/} "$root"/tests/{,*/}; do
            [[ ! -e $place/$path ]] || continue 2
        done
        echo "$document: there is no $path" >&2
        missing=1
    done < <(grep -oE '\]\([^):#& ]+\)' "$document" | tr -d '()]' || true
        [[ $document != *.svg ]] || grep -oE '[a-z_/]+\.[hc](pp|uh)\b' "$document"
        grep -oE '`[a-z_0-9/]+\.(hpp|cuh|cpp|cmake|sh|md|txt|awk|dox)`' "$document" | tr -d '`' || true)
done
exit "$missing"
