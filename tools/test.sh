# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash disable=SC2034,SC2154  # shares its variables with ./dev
# `./dev demo`, `./dev test` and `./dev walk`: the commands that build and run the preset `host`.

demo() {
    setup build
    build host trace_replay
    GPUSHARE_BENCH_COMMIT=$(measured_commit)
    export GPUSHARE_BENCH_COMMIT
    "$(build_dir host)/examples/trace_replay" "$@"
}

# The areas with a Catch2 program, as tests/CMakeLists.txt finds them.
unit_areas() {
    local file
    for file in "$root"/standins/*/tests; do echo "standin_$(basename "$(dirname "$file")")"; done
    for file in "$root"/tests/*/*.cpp; do
        file=$(basename "$(dirname "$file")")
        [[ $file =~ ^(build_failure|consumers|device|gpu|structure|readme|support)$ ]] || echo "$file"
    done | sort -u
}

test_() {  # [AREA]
    local area=${1-} built others=(build_failure consumers)
    built="$(unit_areas) structure device gpu readme"
    if [[ -z $area ]]; then
        setup test
        build host all
        run_tests host
        return
    fi
    if grep -qwF -- "$area" <<<"$built"; then
        setup test
        [[ -n $cuda_home || ! $area =~ ^((standin_)?cuda|device|gpu)$ ]] || fail 3 "the area '$area' needs a CUDA toolkit"
        build host "test_$area"
    elif [[ " ${others[*]} " == *" $area "* ]]; then
        setup test
        build host build.ninja  # the area has no program, but its tests need the list of installed files
    else
        fail 2 "unknown area '$area'; the areas are: ${built//$'\n'/ } ${others[*]}"
    fi
    run_tests host -L "^$area\$"
}

walk() {  # [--write]
    local walks=() backend
    uses test
    for backend in host cuda; do
        [[ -z $cuda_home && $backend == cuda ]] || walks+=("$backend=$(build_dir host)/tests/structure/walk_$backend")
    done
    [[ ${1-} != --write || -n $cuda_home ]] || fail 3 "the numbers of CUDA need a CUDA toolkit"
    build host "${walks[@]##*/}"
    "$root/tests/structure/walk.py" "$@" "${walks[@]}"
}
