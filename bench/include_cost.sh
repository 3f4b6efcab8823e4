#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# core.include_ratio: the time to compile a file that includes <gpushare/gpushare.hpp>, against a file that includes
# the standard headers which our headers name, with the same flags, alternately.
#
#   bench/include_cost.sh [-v] [JSON]      -v: every header by itself, instead of the figure
set -euo pipefail
export LC_ALL=C

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
repeats=9
flags=(-std=c++20 -O2 -I "$root/include")
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

verbose=false
if [[ ${1-} == -v ]]; then
    verbose=true
    shift
fi
json=${1-}

# The standard headers named by a header of ours or by one of ours that it includes, however indirectly.
standard_includes() {  # HEADER
    local own
    own=$(g++ "${flags[@]}" -M -x c++ "$root/include/$1" | tr ' ' '\n' | grep -F "$root/include/" | sort -u)
    # shellcheck disable=SC2086  # one path a word
    sed -n 's|^ *# *include *\(<[^>]*>\).*|#include \1|p' $own | grep -v '<gpushare/' | sort -u || true
}

compile_us() {  # FILE
    local begin=${EPOCHREALTIME/./}
    g++ "${flags[@]}" -c "$1" -o "$scratch/out.o"
    echo $((${EPOCHREALTIME/./} - begin))
}

# Prints: median of ours in us, median of the standard headers' in us, ratio of the medians, least and largest ratio
# of a pair.
measure() {  # HEADER
    local i
    echo "#include <$1>" >"$scratch/ours.cpp"
    standard_includes "$1" >"$scratch/standard.cpp"
    compile_us "$scratch/ours.cpp" >/dev/null  # the first reads the files from the disk
    compile_us "$scratch/standard.cpp" >/dev/null
    for ((i = 0; i < repeats; ++i)); do
        echo "$(compile_us "$scratch/ours.cpp") $(compile_us "$scratch/standard.cpp")"
    done >"$scratch/times"
    paste -d ' ' <(cut -d ' ' -f 1 "$scratch/times" | sort -n) <(cut -d ' ' -f 2 "$scratch/times" | sort -n) \
        <(awk '{ print $1 / $2 }' "$scratch/times" | sort -n) |
        awk '{ ours[NR] = $1; standard[NR] = $2; ratio[NR] = $3 }
             END { m = (NR + 1) / 2; printf "%d %d %.3f %.3f %.3f\n", ours[m], standard[m], ours[m] / standard[m], ratio[1], ratio[NR] }'
}

if $verbose; then
    (cd "$root/include" && find gpushare -name '*.hpp' | sort) | while read -r header; do
        read -r ours standard ratio _ _ <<<"$(measure "$header")"
        printf '%-50s %6d ms %6d ms %6.2f\n' "$header" $((ours / 1000)) $((standard / 1000)) "$ratio"
    done
    exit
fi

result=$(measure gpushare/gpushare.hpp)
read -r ours standard ratio least most <<<"$result"
echo "# g++ $(g++ -dumpfullversion) ${flags[*]:0:2}: $((ours / 1000)) ms against $((standard / 1000)) ms, medians of $repeats"
echo "figure core.include_ratio $ratio x"
if [[ -n $json ]]; then
    printf '{"core.include_ratio": {"median": %s, "min": %s, "max": %s, "unit": "x", "repeats": %d}}\n' \
        "$ratio" "$least" "$most" "$repeats" >"$json"
fi
