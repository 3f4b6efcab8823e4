# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash disable=SC2034,SC2154  # shares its variables with ./dev
# `./dev bench`: measures, keeps and compares figures.

bench() {  # [AREA [ARG...]] | --keep [AREA...] | --compare OLD NEW [AREA...]
    local areas=() one area options=()
    mapfile -t areas < <(bench_areas | grep -vxE 'serving|adoption|graph')
    if [[ " $* " == *" serving "* && " $* " == *" --gemma-terms-accepted "* ]]; then
        options=(--gemma-terms-accepted)
    fi
    case ${1-} in
        --keep)
            shift
            (($# == 0)) || mapfile -t areas < <(printf '%s\n' "$@" | grep -v '^--')
            known_areas "${areas[@]}"
            build_benchmarks "${options[@]}"
            for area in "${areas[@]}"; do bench_area "$area" "${options[@]}"; done
            local status=0
            "$root/bench/results.py" keep "$root/build/bench" "${areas[@]}" || status=$?
            "$root/bench/results.py" fill
            return "$status"
            ;;
        --compare)
            (($# >= 3)) || fail 2 "compare what? ./dev bench --compare OLD NEW [AREA...]"
            compare "${@:2}"  # reads `areas`
            ;;
        *)
            one=${1-}
            [[ -z $one ]] || areas=("$one")
            known_areas "${areas[@]}"
            build_benchmarks "${options[@]}"
            for area in "${areas[@]}"; do bench_area "$area" "${@:2}"; done
            ;;
    esac
}

bench_areas() {
    local file
    for file in "$root"/bench/*.cpp "$root/bench/adoption.py"; do
        file=${file##*/}
        echo "${file%.*}"
    done
}

known_areas() {  # AREA...
    local area all
    all=$(bench_areas)
    for area in "$@"; do
        grep -qxF -- "$area" <<<"$all" || fail 2 "unknown area '$area'; the areas are: ${all//$'\n'/ }"
    done
}

# Builds the benchmarks of `areas`. Removes the areas that can't be measured here from `areas`.
build_benchmarks() {  # [--gemma-terms-accepted]
    local needed=() programs=() area
    [[ " ${areas[*]} " != *" cuda "* && " ${areas[*]} " != *" device "* ]] || needed=(cuda)
    uses build "${needed[@]}"
    needed=("$@")
    if [[ -z $cuda_home ]]; then
        [[ ! ${areas[*]} =~ ^(cuda|device)$ ]] || fail 3 "the area '${areas[*]}' needs a CUDA toolkit"
        mapfile -t areas < <(printf '%s\n' "${areas[@]}" | grep -vxE 'cuda|device')
    fi
    for area in "${areas[@]}"; do
        case $area in
            cuda) needed+=(test) ;;  # for the consumers' projects
            serving | graph | memory | collective | gradient | adoption) needed+=("$area") ;;
        esac
    done
    uses "${needed[@]}"
    # Makes CMake look again for the libraries with which these areas compare.
    [[ ! " ${needed[*]} " =~ " "(graph|collective|gradient)" " ]] || rm -f "$(build_dir bench)/build.ninja"
    mapfile -t programs < <(printf 'bench_%s\n' "${areas[@]}" | grep -vx bench_adoption)
    ((${#programs[@]} == 0)) || build bench "${programs[@]}"
    [[ " ${areas[*]} " != *" adoption "* ]] || build_for_adoption
}

# Builds the tests that use engines' own libraries.
build_for_adoption() {
    if (uses libtorch); then
        rm -f "$(build_dir host)/build.ninja"  # makes CMake look for libtorch again
        build host test_interop test_torch_tenant
    else
        build host test_interop
    fi
}

bench_area() {  # AREA [ARG...]
    local area=$1 json=$root/build/bench/$1
    GPUSHARE_BENCH_COMMIT=$(measured_commit)
    export GPUSHARE_BENCH_COMMIT
    if [[ $area == adoption ]]; then
        step "bench adoption" "$root/bench/adoption.py" "$(build_dir host)" "$json.json"
        return
    fi
    step "bench $area" "$(build_dir bench)/bench/bench_$area" "$json.json" "${@:2}"
    case $area in
        core) step "bench core, include cost" "$root/bench/include_cost.sh" "${json}_include.json" ;;
        cuda) step "bench cuda, include cost" env CUDA_HOME="$cuda_home" "$root/bench/include_cost.sh" cuda "${json}_include.json"
            build host build.ninja
            step "bench cuda, consumers" "$root/bench/consumers.sh" "$(build_dir host)" "${json}_consumers.json" ;;
    esac
}

# Prints the commit, with -dirty if the tree has changes. Results, and the tables made of them,
# don't count as changes, so that several areas can be kept one after the other before they are
# committed.
measured_commit() {
    local commit
    commit=$(git -C "$root" rev-parse --short=12 HEAD 2>/dev/null) || commit=unknown
    [[ -z $(git -C "$root" status --porcelain -- . ':!bench/results' ':!README.md' ':!docs' 2>/dev/null) ]] || commit+=-dirty
    echo "$commit"
}

# Compares two results or two commits. Builds each commit in a work tree of its own, by the commit's
# own ./dev, and runs the two in turn, so that both meet the same state of the machine.
compare() {  # OLD NEW [AREA...]
    local sides=("$1" "$2") folder=$root/build/bench/compare side round area part tree status=0
    shift 2
    if [[ -e ${sides[0]} && -e ${sides[1]} ]]; then
        "$root/bench/results.py" compare "${sides[@]}"
        return
    fi
    known_areas "$@"
    (($# == 0)) || areas=("$@")
    rm -rf "$folder"
    for side in 0 1; do
        tree=$folder/tree$side
        git -C "$root" worktree prune
        git -C "$root" worktree add --quiet --force --detach "$tree" "${sides[side]}" ||
            fail 2 "'${sides[side]}' is neither a commit nor results"
        mkdir -p "$folder/$side" "$tree/build"
        [[ ! -d $tools ]] || ln -s "$tools" "$tree/build/tools"
    done
    for round in 1 2 3 4 5; do
        for area in "${areas[@]}"; do
            for side in 0 1; do
                "$folder/tree$side/dev" bench "$area" || fail 1 "$area of ${sides[side]} failed"
                for part in "$folder/tree$side/build/bench/$area"{,_*}.json; do
                    [[ ! -e $part ]] || cp "$part" "$folder/$side/$(basename "$part" .json).$round.json"
                done
            done
        done
    done
    "$root/bench/results.py" compare "$folder/0" "$folder/1" || status=$?
    for side in 0 1; do git -C "$root" worktree remove --force "$folder/tree$side"; done
    return "$status"
}
