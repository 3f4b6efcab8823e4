#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Makes a folder with all that a machine with a GPU needs to do what `./dev gpu` does: two programs, a shared
# object for PyTorch, four programs and an object on PyTorch's libraries if these were built, and run.sh. There it takes
# a driver, bash and Debian 12's C library or a newer one; no toolkit, no compiler, no network. Steps
# on PyTorch are left out where PyTorch isn't installed.
#
#   pack.sh PROGRAMS PACK
set -euo pipefail
programs=$1 pack=$2
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
newest_glibc=2.36  # Debian 12's
most_mib=60

pytorch_has='libtorch_cpu|libtorch_cuda|libc10|libc10_cuda|libcudart|libcupti|libstdc\+\+|libgcc_s'
all=(test_gpu gpu_figures pytorch_tenants.so)
on_libtorch=()
for program in engine_figures torch_figures training_figures gpu_server python_tenants.so; do
    if [[ -e $programs/$program ]]; then
        on_libtorch+=("$program")
    else
        echo "pack: without $program, which wasn't built for lack of libtorch"
        rm -f "$pack/$program"{,.libtorch}
    fi
done
all+=("${on_libtorch[@]}")

mkdir -p "$pack"
for program in "${all[@]}"; do
    strip -o "$pack/$program" "$programs/$program"
    libraries=$(objdump -p "$pack/$program" | sed -n 's/^ *NEEDED *//p')
    others=$(grep -Ev '^(libc|libm|ld-linux-x86-64)\.so\.[0-9]+$' <<<"$libraries") || true
    [[ " ${on_libtorch[*]} " != *" $program "* ]] || others=$(grep -Ev "^($pytorch_has)\.so(\.[0-9]+)?$" <<<"$others") || true
    if [[ -n $others ]]; then
        echo "pack: $program needs libraries that may not be there: ${others//$'\n'/ }" >&2
        exit 1
    fi
    newest=$(objdump -T "$pack/$program" | grep -o 'GLIBC_[0-9.]*' | sed 's/GLIBC_//' | sort -V | tail -n 1)
    if [[ $(printf '%s\n' "$newest" "$newest_glibc" | sort -V | tail -n 1) != "$newest_glibc" ]]; then
        echo "pack: $program needs glibc $newest, newer than $newest_glibc" >&2
        exit 1
    fi
    echo "$program: $(du -k "$pack/$program" | cut -f 1) KiB, needs glibc $newest"
done
cp "$here/run.sh" "$programs/tenants.py" "$pack/"
for program in "${on_libtorch[@]}"; do
    if [[ $program == *.so ]]; then  # which says itself for which version it is made
        cp "$programs"/{training,gpushare_torch}.py "$pack/"
    else
        cp "$programs/$program.libtorch" "$programs"/{engines,server,server_models}.py "$pack/"
    fi
done
[[ ! -e $programs/commit ]] || cp "$programs/commit" "$pack/"

# Shows no device even where there is one: each program has to say so.
for program in test_gpu gpu_figures; do
    code=0
    said=$(CUDA_VISIBLE_DEVICES='' "$pack/$program" --device 2>&1) || code=$?
    if ((code != 3)); then
        printf 'pack: without a device %s ends with code %s instead of 3:\n%s\n' "$program" "$code" "$said" >&2
        exit 1
    fi
done

size=$(du -sk "$pack" | cut -f 1)
if ((size > most_mib * 1024)); then
    echo "pack: $size KiB, more than $most_mib MiB" >&2
    exit 1
fi
echo "pack: $pack, $size KiB"
