#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# What including the library costs: the processor time to compile a file that includes an umbrella, against a file that includes
# the standard and toolkit headers which our headers name, with the same flags, alternately. And what using it costs: the time to
# compile README's program, and a file that only allocates and submits.
#
#   bench/include_cost.sh [JSON]         core.include_ratio            <gpushare/gpushare.hpp>
#                                        core.readme_compile_s         README's program with gpushare::compiled
#                                        core.readme_header_only_compile_s    the same with gpushare::gpushare
#                                        core.handler_compile_s        tests/consumers/compiled/handler.cpp with gpushare::compiled
#   bench/include_cost.sh cuda [JSON]    cuda.include_ratio_runtime    and <gpushare/backend/cuda/cuda.hpp>, by g++
#                                        cuda.include_ratio_nvcc       <gpushare/gpushare.cuh>, by nvcc
#   bench/include_cost.sh -v             every header by itself, instead of the figures
#
# CUDA_HOME (/usr/local/cuda) is where the toolkit lies.
set -euo pipefail
export LC_ALL=C

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cuda=${CUDA_HOME:-/usr/local/cuda}
repeats=9
by_gcc=(g++ -std=c++20 -O2 -I "$root/include")
by_gcc_with_cuda=("${by_gcc[@]}" -isystem "$cuda/include")
by_nvcc=("$cuda/bin/nvcc" -std=c++20 -O2 -arch=sm_90 -I "$root/include")  # one architecture, as in development
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

includes() { printf '#include <%s>\n' "$@"; }

# The foreign headers named by headers of ours that FILE includes, however indirectly.
foreign_includes() {  # FILE
    local own
    own=$("${compiler[@]}" -M "$1" | tr ' ' '\n' | grep -F "$root/include/" | sort -u)
    # shellcheck disable=SC2086  # one path a word
    sed -n 's|^ *# *include *\(<[^>]*>\).*|#include \1|p' $own | grep -v '<gpushare/' | sort -u || true
}

# Processor time, which is less disturbed by what else the machine does than the clock on the wall.
compile_us() {  # FILE
    local TIMEFORMAT='%U %S'
    { time "${compiler[@]}" -c "$1" -o "$scratch/out.o" 2>/dev/null; } 2>&1 | awk '{ printf "%d\n", ($1 + $2) * 1000000 }'
}

# Prints, for a file of these includes and the array `compiler`: median of ours in us, median of the foreign headers' in
# us, ratio of the medians, least and largest ratio of a pair.
measure() {  # SUFFIX HEADER...
    local i ours=$scratch/ours.$1 foreign=$scratch/foreign.$1
    shift
    includes "$@" >"$ours"
    foreign_includes "$ours" >"$foreign"
    compile_us "$ours" >/dev/null  # the first reads the files from the disk
    compile_us "$foreign" >/dev/null
    for ((i = 0; i < repeats; ++i)); do
        echo "$(compile_us "$ours") $(compile_us "$foreign")"
    done >"$scratch/times"
    paste -d ' ' <(cut -d ' ' -f 1 "$scratch/times" | sort -n) <(cut -d ' ' -f 2 "$scratch/times" | sort -n) \
        <(awk '{ print $1 / $2 }' "$scratch/times" | sort -n) |
        awk '{ ours[NR] = $1; foreign[NR] = $2; ratio[NR] = $3 }
             END {
                 m = (NR + 1) / 2
                 printf "%d %d %.3f %.3f %.3f ", ours[m], foreign[m], ours[m] / foreign[m], ratio[1], ratio[NR]
                 for (i = 1; i <= NR; ++i) printf "%s%.3f", (i > 1 ? "," : ""), ratio[i]
                 print ""
             }'
}

# Measures as `measure` does and prints the figure; adds it to the array `json`.
figure() {  # NAME SUFFIX HEADER...
    local name=$1 ours foreign ratio least most all
    shift
    read -r ours foreign ratio least most all <<<"$(measure "$@")"
    echo "# ${compiler[*]:0:3}: $((ours / 1000)) ms against $((foreign / 1000)) ms, medians of $repeats"
    echo "figure $name $ratio x"
    json+=("$(printf '"%s": {"value": %s, "is": "median", "unit": "x", "least": %s, "most": %s, "repeats": [%s]}' \
        "$name" "$ratio" "$least" "$most" "$all")")
}

# Prints the figure of one file, in seconds; adds it to the array `json`.
compile_figure() {  # NAME FILE
    local i median least most all
    compile_us "$2" >/dev/null  # the first reads the files from the disk
    for ((i = 0; i < repeats; ++i)); do compile_us "$2"; done | sort -n >"$scratch/times"
    read -r median least most all <<<"$(awk '{ t[NR] = $1 / 1e6 }
        END {
            printf "%.3f %.3f %.3f ", t[(NR + 1) / 2], t[1], t[NR]
            for (i = 1; i <= NR; ++i) printf "%s%.3f", (i > 1 ? "," : ""), t[i]
        }' "$scratch/times")"
    [[ -e $scratch/out.o ]] || { echo "$2 doesn't compile" >&2; exit 1; }
    rm "$scratch/out.o"
    echo "figure $1 $median s"
    json+=("$(printf '"%s": {"value": %s, "is": "median", "unit": "s", "least": %s, "most": %s, "repeats": [%s]}' \
        "$1" "$median" "$least" "$most" "$all")")
}

verbose() {
    local header suffix ours foreign ratio
    (cd "$root/include" && find gpushare -name '*.hpp' -o -name '*.cuh' | sort) | while read -r header; do
        suffix=cpp compiler=("${by_gcc[@]}")
        case $header in
            *.cuh) suffix=cu compiler=("${by_nvcc[@]}") ;;
            */cuda/* | */cuda_*) compiler=("${by_gcc_with_cuda[@]}") ;;
        esac
        read -r ours foreign ratio _ _ _ <<<"$(measure "$suffix" "$header")"
        printf '%-50s %6d ms %6d ms %6.2f\n' "$header" $((ours / 1000)) $((foreign / 1000)) "$ratio"
    done
}

if [[ ${1-} == -v ]]; then
    verbose
    exit
fi

json=()
if [[ ${1-} == cuda ]]; then
    shift
    compiler=("${by_gcc_with_cuda[@]}")
    figure cuda.include_ratio_runtime cpp gpushare/gpushare.hpp gpushare/backend/cuda/cuda.hpp
    compiler=("${by_nvcc[@]}")
    figure cuda.include_ratio_nvcc cu gpushare/gpushare.cuh
else
    compiler=("${by_gcc[@]}")
    figure core.include_ratio cpp gpushare/gpushare.hpp
    awk '/^```cpp$/ { inside = 1; next } /^```$/ { if (inside) exit } inside' "$root/README.md" >"$scratch/readme.cpp"
    repeats=5
    compile_figure core.readme_header_only_compile_s "$scratch/readme.cpp"
    compiler+=(-DGPUSHARE_COMPILED -DGPUSHARE_COMPILED_HOST)
    compile_figure core.readme_compile_s "$scratch/readme.cpp"
    compile_figure core.handler_compile_s "$root/tests/consumers/compiled/handler.cpp"
fi
if [[ -n ${1-} ]]; then
    (
        IFS=,
        echo "{\"figures\": {${json[*]}}}"
    ) >"$1"
fi
