#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Which public names have no documentation: a line "HEADER:LINE: NAME" each, HEADER as in include/gpushare. Doxygen tells
# of all but concepts, enumerators and namespaces: these are looked up in its XML.
#
#   undocumented.sh [ROOT]        of ROOT/include/gpushare, by default of this repository
#   undocumented.sh --check       the same but for headers in incomplete.txt, which may only get shorter; fails if any are left
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$here/../..
if [[ ${1-} != --check ]]; then
    root=${1-$root}
else
    names=$("$0" | awk -F: 'FILENAME != "-" { known[$1]; next } !($1 in known)' "$here/incomplete.txt" -)
    [[ -n $names ]] || exit 0
    echo "public names without documentation:"$'\n'"$names" >&2
    exit 1
fi
cd "$root"
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT

{
    cat "$here/Doxyfile"
    printf '%s\n' "OUTPUT_DIRECTORY = $out" "WARN_LOGFILE = $out/warnings" 'WARN_AS_ERROR = NO' 'HAVE_DOT = NO' \
        'GENERATE_HTML = NO' 'GENERATE_XML = YES' 'XML_PROGRAMLISTING = NO' "INPUT = include/gpushare $here/groups.dox" \
        "FILTER_PATTERNS = *.hpp=$here/filter.awk *.cuh=$here/filter.awk"
} | doxygen -

{
    sed -En 's/^(.*:[0-9]+): warning: (Compound|Member) (.*) is not documented\.$/\1: \3/p' "$out/warnings"
    find "$out/xml" -name '*.xml' -exec awk -f "$here/undocumented.awk" {} +
} | sed -E 's|^([^:]*/)?gpushare/||' | sort -u -t: -k1,1 -k2,2n -k3
