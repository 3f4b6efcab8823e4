# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash disable=SC2034,SC2154  # shares its variables with ./dev
# `./dev gpu`: runs everything that needs a GPU, or packs it for a machine that has one.

# A machine with a GPU but without a toolkit runs a pack that another machine made. If the variable
# OUT names a folder, that folder gets the results, too.
gpu() {  # [--pack [DIR]]
    local pack=$root/build/gpu_pack programs
    if [[ ${1-} == --pack ]]; then
        pack=${2:-$pack}
    elif (($# > 0)); then
        fail 2 "unknown argument '$1': ./dev gpu [--pack [DIR]]"
    elif [[ -x $pack/run.sh ]] && ! can_build_for_gpu; then
        "$pack/run.sh" --keep "$root/bench/results" "$root/build/gpu"
        return
    fi
    uses gpu
    [[ -n $cuda_home ]] || fail 3 "no CUDA toolkit, and no build/gpu_pack from a machine that has one (./dev gpu --pack)"
    cuda_options+=(-DGPUSHARE_CUDA_FOR_A_DEVICE=ON)  # PTX for each architecture, and optimised host code
    rm -f "$(build_dir host)/build.ninja"
    build host test_gpu
    programs=$(build_dir host)/gpu
    measured_commit >"$programs/commit"
    if [[ ${1-} == --pack ]]; then
        "$root/bench/gpu/pack.sh" "$programs" "$pack"
    else
        "$root/bench/gpu/run.sh" --programs "$programs" --keep "$root/bench/results" "$root/build/gpu"
    fi
}

can_build_for_gpu() {
    local package
    for package in nvcc g++ cmake ninja-build catch2 librange-v3-dev; do
        PATH=$PATH:/usr/local/cuda/bin have_package "$package" || return 1
    done
}
