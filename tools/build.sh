# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash disable=SC2034,SC2154  # shares its variables with ./dev
# What other commands are made of: steps that say how long they took, and CMake's presets,
# configured and built.

# Runs a command between two lines that say what it is and how long it took.
step() {  # NAME COMMAND...
    local name=$1 begin=$SECONDS
    shift
    echo "== $name ..."
    "$@"
    echo "== $name: $((SECONDS - begin)) s"
}

build_dir() {  # PRESET
    case $1 in
        bench) echo "$root/build/bench/tree" ;;
        *) echo "$root/build/$1" ;;
    esac
}

# Configures only where nothing is yet, the presets changed or a tool came: ninja repeats it when
# anything else did.
configure() {  # PRESET
    local dir source
    dir=$(build_dir "$1")
    for source in "$root/CMakePresets.json" "$tools/.packages" "$tools"/*/.requirements; do
        if [[ ! -e $dir/build.ninja || $source -nt $dir/build.ninja ]]; then
            mkdir -p "$dir"
            step "configure $1" run_cmake "$1" "$dir/configure.log"
            return
        fi
    done
}

run_cmake() {  # PRESET LOG
    local options=("${cuda_options[@]}")
    # A precompiled header is another one in each work tree, and so would be all that is compiled
    # with it. CI begins with an empty cache.
    ! command -v ccache >/dev/null || [[ ${CI-} == true ]] || options+=(-DCMAKE_{C,CXX}_COMPILER_LAUNCHER=ccache -DCMAKE_DISABLE_PRECOMPILE_HEADERS=ON)
    (cd "$root" && cmake --preset "$1" "${options[@]}") >"$2" 2>&1 || {
        cat "$2" >&2
        fail 1 "configuring $1 failed"
    }
    grep '^-- Without ' "$2" || true
}

build() {  # PRESET TARGET...
    local preset=$1
    shift
    configure "$preset"
    step "build $preset: $*" cmake --build "$(build_dir "$preset")" -j "$jobs" --target "$@"
}

# Runs a preset's tests. What failed is printed once more at the end: in between, the output of
# other tests may be thousands of lines long.
run_tests() {  # PRESET [ARGUMENT OF CTEST...]
    local run=() status=0
    # ThreadSanitizer doesn't know how far newer kernels randomise addresses.
    if [[ $1 == tsan ]] && setarch -R true 2>/dev/null; then run=(setarch -R); fi
    (cd "$root" && "${run[@]}" ctest --preset "$@") || status=$?
    ((status == 0)) || awk -f "$root/tools/failures.awk" "$(build_dir "$1")/Testing/Temporary/LastTest.log"
    return "$status"
}
