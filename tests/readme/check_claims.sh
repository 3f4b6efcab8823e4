#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# What documents claim can be looked up: each test that they name, as `AREA/NAME_test.cpp`: "its name", is in that file of tests/, and
# each figure, as `area.name`, in docs/figures.md, bench/README.md or a kept result. A claim may be broken over lines.
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
    text=$(tr -s ' \n' '  ' <"$document")
    while IFS='`' read -r _ file name; do
        name=${name#: }
        grep -qsF -- "$name" "$root/tests/$file" || complain "$document: there is no test $name in tests/$file"
    done < <(grep -oE '`[a-z_0-9/]+_test\.cpp`: "[^"]+"' <<<"$text" || true)
    while read -r figure; do
        [[ $figure != *.json* ]] || continue
        grep -qF -- "$figure" "$root/docs/figures.md" "$root/bench/README.md" ||
            grep -qF -- "\"${figure//\`/}\"" "$root"/bench/results/*/*.json || complain "$document: there is no figure $figure"
    done < <(grep -oE '`(adoption|collective|compute|core|cuda|device|engines|gpu|gradient|memory|partition|serving|tenant)\.[a-z0-9_]+`' <<<"$text" || true)
done
exit "$missing"
