# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash disable=SC2034,SC2154  # shares its variables with ./dev
# `./dev check`: the checks that take longer than tests, as many of them as fit into CI's time.

check() {  # [clients | toolkits | --soak [MINUTES]]
    case ${1-} in
        clients)
            setup serve clients browser
            clients
            return
            ;;
        toolkits)
            toolkits
            return
            ;;
        --soak)
            setup serve clients
            build_server
            step "soak" "$tools/clients/bin/python" "$root/tests/clients/soak.py" "$server" "${2:-60}"
            return
            ;;
        ?*) fail 2 "unknown argument '$1': ./dev check [clients | toolkits | --soak [MINUTES]]" ;;
    esac
    setup check
    # These areas wait for the network for minutes, while the sanitizers' builds use the processors.
    set_up_beside clients mpis libtorch cuda_engines
    # Steps that take seconds come first; the others follow in the order of how much they find. The
    # minutes are for CI's two cores, with a margin. If a build takes even longer, its tests are
    # left out.
    if have_formatter; then
        step "formatting" lint
    else
        echo "== formatting: not checked, there is no clang-format 14"
    fi
    docs
    if in_time 25 "AddressSanitizer"; then sanitize asan-ubsan; fi
    if in_time 15 "ThreadSanitizer"; then sanitize tsan; fi
    wait_for_setup
    if in_time 6 "the example server by others' clients"; then check_clients; fi
    if in_time 20 "long tests, by -O2, and MPIs of PyPI"; then
        uses mpis
        [[ -z $cuda_home ]] || build host test_compiled  # the same program in both trees
        build long long_tests
        if in_time 8 "running long tests, by -O2, and MPIs of PyPI"; then run_tests long; fi
    fi
    if in_time 8 "each header alone"; then build host self_contained; fi
    if in_time 5 "training by libtorch"; then check_torch; fi
    if in_time 4 "engines' libraries for CUDA"; then check_cuda_engines; fi
    if in_time 4 "benchmarks compile"; then check_benchmarks; fi
    ((${#left_out[@]} == 0)) || printf '== LEFT OUT, for there was no time: %s\n' "${left_out[@]}"
}

sanitize() {  # PRESET
    build "$1" unit_tests
    if in_time 7 "tests of $1"; then run_tests "$1"; fi
}

# Compilers and toolkits that aren't available are left out of the tables, with a line that says so.
toolkits() {
    local options=() home
    setup toolkits
    [[ -z $zig ]] || options+=(--zig "$zig")
    for home in "$cuda_home" "$newest_cuda"; do
        [[ -z $home ]] || options+=(--cuda "$home")
    done
    step "toolkits" "$root/tests/toolkits/toolkits.py" "$root/build/toolkits" "${options[@]}"
}

# Whether this many minutes are left of the 80 that CI may take. Without a limit, the answer is yes.
left_out=()
in_time() {  # MINUTES WHAT
    local over=$((($(date +%s) - ${CI_BEGAN:-$(date +%s)}) / 60))
    ((over + $1 > 80)) || return 0
    left_out+=("$2")
    echo "== $2: left out, it takes up to $1 minutes and $over of CI's 80 are over"
    return 1
}

# No other part of CI compiles benchmarks.
check_benchmarks() {
    configure bench
    step "benchmarks compile" "$root/bench/syntax.py" "$(build_dir bench)" "$jobs"
}

# Tests training with libtorch beside torch's own data-parallel training. The packages take half a
# gigabyte, so a machine without them leaves the tests out; CI doesn't.
check_torch() {
    if (uses libtorch); then
        build host test_torch test_torch_tenant test_torch_decoder test_torch_server
        step "libtorch" "$(build_dir host)/tests/interop/test_torch"
        step "libtorch as a tenant" "$(build_dir host)/tests/interop/test_torch_tenant"
        step "a decoder on libtorch" "$(build_dir host)/tests/interop/test_torch_decoder"
        step "the server with models of libtorch" "$(build_dir host)/tests/interop/test_torch_server"
    elif [[ ${CI-} == true ]]; then
        fail 1 "libtorch isn't installed"
    else
        echo "== without libtorch: training of its modules isn't tested"
    fi
}

# Tests the scope for libtorch on CUDA, compiled with the headers of PyPI's PyTorch. The scope runs
# over the stand-in for CUDA, with PyTorch's libc10_cuda and with operators of the host.
# torch_figures is only built here: it is also linked with PyTorch's libtorch_cuda, and runs only on
# a device.
check_cuda_engines() {
    local tree
    tree=$(build_dir host)
    if (uses cuda_engines) && [[ -e $tools/torch_cuda/.requirements && -e $tools/onnxruntime_cuda/.requirements ]]; then
        build host test_torch_scope test_torch_python test_onnxruntime_cuda torch_rehearsal torch_figures
        step "libtorch on CUDA as a tenant" "$tree/tests/interop/test_torch_scope"
        step "libtorch on CUDA for Python" "$tree/tests/interop/test_torch_python"
        step "a decoder on libtorch on CUDA" "$tree/gpu/torch_rehearsal" decoder --small
        step "operators on a slice of SMs" "$tree/gpu/torch_rehearsal" slices --small
        step "ONNX Runtime with a CUDA provider" "$tree/tests/interop/test_onnxruntime_cuda"
    elif [[ ${CI-} == true ]]; then
        fail 1 "engines' libraries for CUDA aren't there"
    else
        echo "== without engines' libraries for CUDA: the scope for libtorch on CUDA isn't tested"
    fi
}
