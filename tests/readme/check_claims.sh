#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# What documents claim can be looked up: each test that they name, as `AREA/NAME_test.cpp`: "its name", is in that file of tests/, and
# each figure, as `area.name`, in docs/figures.md or bench/README.md.
#
#   check_claims.sh DOCUMENT...
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)

missing=0
complain() {
    echo "$1" >&2
    missing=1
}
for document in "$@"; do
    while IFS='`' read -r _ file name; do
        name=${name#: }
        grep -qsF -- "$name" "$root/tests/$file" || complain "$document: there is no test $name in tests/$file"
    done < <(grep -oE '`[a-z_0-9/]+_test\.cpp`: "[^"]+"' "$document" || true)
    while read -r figure; do
        grep -qF -- "$figure" "$root/docs/figures.md" "$root/bench/README.md" || complain "$document: there is no figure $figure"
    done < <(grep -oE '`(adoption|collective|compute|core|cuda|gradient|memory|partition|serving|tenant)\.[a-z0-9_]+`' "$document" || true)
done
exit "$missing"
