# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash disable=SC2034,SC2154  # shares its variables with ./dev
# Functions that other commands use: steps that say how long they took; and configuring, building
# and testing CMake's presets.

# Runs a command between two lines, which have the step's name and, at the end, its duration.
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

# Configures a preset if it wasn't configured yet, the presets have changed, or a tool was
# installed. After any other change, ninja configures again by itself.
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
    # ccache finds what another work tree has compiled, or an earlier run of CI on the same machine.
    # Precompiled headers differ from work tree to work tree, so files that use them aren't found.
    ! command -v ccache >/dev/null || options+=(-DCMAKE_{C,CXX}_COMPILER_LAUNCHER=ccache -DCMAKE_DISABLE_PRECOMPILE_HEADERS=ON)
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

# Runs a preset's tests. Prints failures once more at the end, because the output of other tests may
# take thousands of lines in between.
run_tests() {  # PRESET [ARGUMENT OF CTEST...]
    local run=() status=0
    # ThreadSanitizer doesn't support how widely newer kernels randomise addresses, so its tests run
    # without randomised addresses.
    if [[ $1 == tsan ]] && setarch -R true 2>/dev/null; then run=(setarch -R); fi
    (cd "$root" && "${run[@]}" ctest --preset "$@") || status=$?
    ((status == 0)) || awk -f "$root/tools/failures.awk" "$(build_dir "$1")/Testing/Temporary/LastTest.log"
    return "$status"
}
