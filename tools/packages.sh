# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash disable=SC2034,SC2154  # shares its variables with ./dev
# Installs tools. apt-get installs the distribution's packages. Packages that Debian doesn't have
# come from PyPI, and go into build/tools and nowhere else. tools/setup.sh says which area needs
# which packages. Only `setup` installs: it sets `installing`. Other commands use the packages that
# are there, and print the `./dev setup` line that installs a missing one. The packages of PyPI, by
# their folders, and two of Debian's:
#
#   cuda              a CUDA toolkit, if the machine has none of version 13.0 or later
#   newest_cuda, zig  the newest toolkit, and a newer clang with libc++, for `./dev check toolkits`
#   cccl              a newer CCCL than that toolkit's, for the adapters to libcu++ and Thrust
#   doxygen_awesome   the theme of `./dev docs`
#   conan             Conan, which runs our recipe
#   onnxruntime       ONNX Runtime's library; tests put its tensors on a tenant's memory
#   ggml              ggml's libraries; tests put their buffers into a tenant's arena
#   rmm               RAPIDS' memory manager; tests put it on a tenant's memory and below a quota
#   torch             headers of PyTorch, which our adaptor has to fit; taken from the wheel for
#                     macOS, the smallest by far
#   torch_cuda        PyTorch for Linux with CUDA: headers, and the libraries to link with, for the
#                     models of `./dev gpu`, and for the scope that `./dev check` compiles
#   onnxruntime_cuda  ONNX Runtime's library, built for a CUDA provider, without the provider itself
#   digits            handwritten digits, on which examples/data_parallel_training trains: one file
#                     of scikit-learn's wheel
#   openvino          OpenVINO alone, for tests with its tensors and calls, if `serving` isn't
#                     installed
#   serving           OpenVINO, a voice detector and a text reader, for `./dev bench serving` and
#                     the example server
#   clients           other projects' clients of the example server, for `./dev check`
#   prometheus        another such client, a package of Debian's
#   nginx             a proxy in front of the example server, a package of Debian's
#   openmpi5, mpich   two more MPIs, for `./dev check`, and for comparisons in
#                     `./dev bench collective`
#   oneccl            oneCCL and the MPI that it comes with, for `./dev bench collective`
#   gemma             a language model for the server, for users who accept the terms of its weights
#
# If a package is missing, the tests that need it are left out, with a line that says so. In CI, a
# missing package is an error.

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
        libjs-lunr | python3-lunr | libonnx-testdata | libjemalloc2 | libmimalloc2.0 | libtcmalloc-minimal4 | libopenblas0-pthread | \
            libclang-rt-16-dev) dpkg -s "$1" >/dev/null 2>&1 ;;
        python3-venv) python3 -c 'import ensurepip, venv' 2>/dev/null ;;
        *) command -v "$1" >/dev/null ;;
    esac
}

# The areas of `./dev setup` that a command needs. `installing` isn't empty while missing packages
# are to be installed.
asked_areas=
installing=

missing() {  # WHAT...
    fail 3 "missing: $*; run: ./dev setup $asked_areas"
}

# Installs the packages that are missing: as root, or through sudo if sudo needs no password.
need() {  # PACKAGE...
    local absent=() package as_root=()
    for package in "$@"; do
        have_package "$package" || absent+=("$package")
    done
    if ((${#absent[@]} == 0)); then
        return
    fi
    [[ -n $installing ]] || missing "${absent[@]}"
    if ! command -v apt-get >/dev/null; then
        fail 3 "missing: ${absent[*]} (Debian's names): install them, then run this again"
    fi
    if ((EUID != 0)); then
        if ! sudo -n true 2>/dev/null; then
            fail 3 "missing packages, please run: sudo apt-get update && sudo apt-get install -y ${absent[*]}"
        fi
        as_root=(sudo -n)
    fi
    step "install ${absent[*]}" install_packages
}

install_packages() {
    { "${as_root[@]}" apt-get -qq update &&
        "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends "${absent[@]}"; } ||
        fail 3 "these packages can't be installed: ${absent[*]}"  # `set -e` wouldn't suffice: it is off in conditions
    mkdir -p "$tools"
    touch "$tools/.packages"  # trees that were configured without the packages are configured again
}

# Unpacks Debian's package without installing it, because an installed package would start its
# server.
unpacked() {  # PACKAGE
    local folder=$tools/$1
    [[ -n $installing ]] || missing "$1"
    mkdir -p "$folder"
    (cd "$folder" && apt-get -qq download "$1" && dpkg -x "$1"_*.deb .) || fail 3 "Debian's package $1 can't be had"
}

# ---- PyPI

# Provides optional packages. If they are missing, prints the consequence and returns 1; in CI,
# fails.
from_pypi() {  # FOLDER CONSEQUENCE REQUIREMENT...
    local folder=$1 consequence=$2
    shift 2
    ! there "$folder" "$@" || return 0
    if [[ -n $installing ]]; then
        ! fetch_anew "$folder" "$@" || return 0
        echo "== without $folder: $consequence. $* can't be fetched from PyPI, see $tools/$folder.log"
    else
        [[ ${CI-} != true ]] || missing "$folder"
        echo "== without $folder: $consequence. To have it, run: ./dev setup $asked_areas"
    fi
    return 1
}

# Provides packages that the command can't do without; otherwise fails.
need_from_pypi() {  # FOLDER WHAT REQUIREMENT...
    local folder=$1 what=$2
    shift 2
    ! there "$folder" "$@" || return 0
    [[ -n $installing ]] || missing "$what"
    fetch_anew "$folder" "$@" || fail 3 "$what can't be fetched from PyPI, see $tools/$folder.log"
}

# Whether the folder has these packages. A mark has the requirements for which the folder was
# filled, so a change of requirements fetches the packages again.
there() {  # FOLDER REQUIREMENT...
    local mark=$tools/$1/.requirements
    shift
    [[ -e $mark && $(<"$mark") == "$*" ]]
}

fetch_anew() {  # FOLDER REQUIREMENT...
    local folder=$1 log=$tools/$1.log
    shift
    mkdir -p "$tools"
    rm -rf "${tools:?}/$folder" "$log"
    if (need python3-venv) && fetch "$folder" "$@" >"$log" 2>&1; then
        echo "$*" >"$tools/$folder/.requirements"
        echo "== fetched from PyPI: $*"
        return
    fi
    rm -rf "${tools:?}/$folder"
    if [[ ${CI-} == true ]]; then
        cat "$log" >&2 || true
        fail 1 "$* can't be fetched from PyPI"
    fi
    return 1
}

# Makes a virtual environment for conan and clients; for other folders, unpacks the packages' files.
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
        fetch_from_wheel "$folder" 'include torch_cpu torch_cuda c10 c10_cuda gomp' --platform manylinux_2_28_x86_64 --python-version 3.12 "$@"
    elif [[ $folder == onnxruntime_cuda ]]; then
        fetch_from_wheel "$folder" 'onnxruntime' --platform manylinux_2_28_x86_64 --python-version 3.12 "$@"
    else
        [[ -x $tools/pip/bin/pip ]] || python3 -m venv "$tools/pip" || return 1
        local where=--target
        [[ $folder != openmpi5 && $folder != mpich && $folder != oneccl ]] || where=--prefix  # these packages have bin/ and lib/, which --target drops
        "$tools/pip/bin/pip" install --quiet --retries 1 --no-deps "$where" "$tools/$folder" "$@"
    fi
}

# Unpacks the digits, a data file of the wheel.
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

# Takes only the named parts of a wheel, which needn't run here: its headers ("include"), and shared
# libraries by their names.
fetch_from_wheel() {  # FOLDER PARTS OPTION... REQUIREMENT
    local folder=$1 parts=$2
    shift 2
    [[ -x $tools/pip/bin/pip ]] || python3 -m venv "$tools/pip" || return 1
    mkdir -p "$tools/$folder/wheel"
    "$tools/pip/bin/pip" download --quiet --retries 1 --no-deps --only-binary=:all: --dest "$tools/$folder/wheel" "$@" || return 1
    python3 - "$tools/$folder" "$parts" <<'END' && rm -r "${tools:?}/$folder/wheel"
import glob, os, sys, zipfile
folder, parts = sys.argv[1], sys.argv[2].split()
libraries = tuple(f'/{place}/lib{part}.so' for part in parts for place in ('lib', 'capi'))
def wanted(name):
    header = '/include/' in name and name.endswith(('.h', '.hpp', '.inc'))
    return header if 'include' in parts and header else any(name.endswith(l) or l + '.' in name for l in libraries)
for wheel in glob.glob(folder + '/wheel/*.whl'):
    with zipfile.ZipFile(wheel) as z:
        z.extractall(folder + '/wheel/unpacked', [n for n in z.namelist() if wanted(n)])
for part in os.listdir(folder + '/wheel/unpacked'):  # all at once: a tree may be configured meanwhile
    os.rename(folder + '/wheel/unpacked/' + part, folder + '/' + part)
END
}

# Sets cuda_home to the directory of a toolkit of version 13.0 or later; empty if there is none.
# Sets cuda_options to the options that CMake needs for the toolkit.
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

# Fetches a toolkit if the machine has none. The toolkit may still be missing afterwards: see
# from_pypi.
need_cuda_toolkit() {
    find_cuda_toolkit
    [[ -z $cuda_home ]] || return 0
    from_pypi cuda "all that is on CUDA is left out" \
        nvidia-cuda-{nvcc,runtime,cccl,crt}'==13.0.*' 'nvidia-nvvm==13.0.*' || return 0
    as_installed "$own_cuda"
    find_cuda_toolkit
}

# Fetches PyPI's newest toolkit, for `./dev check toolkits`. Sets newest_cuda; empty if the toolkit
# isn't available.
need_newest_cuda() {
    newest_cuda=$tools/newest_cuda/nvidia/cu13
    from_pypi newest_cuda "no newer toolkit is tested" nvidia-cuda-{nvcc,runtime,cccl,crt}'==13.*' 'nvidia-nvvm==13.*' || newest_cuda=
    [[ -z $newest_cuda ]] || as_installed "$newest_cuda"
}

# Gives a toolkit of PyPI the layout that an installer makes.
as_installed() {  # HOME
    ln -sfn lib "$1/lib64"
    ln -sf libcudart.so.13 "$1/lib/libcudart.so"
}
