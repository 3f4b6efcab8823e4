#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Makes the Conan package from this tree and builds and runs its test package, all below DIR and without a network, once
# as it is and once with CUDA.
#
#   create.sh CONAN SOURCE_DIR DIR CXX
set -eu
conan=$1 source=$2 dir=$3
CXX=$4
CONAN_HOME=$dir/home
export CXX CONAN_HOME
rm -rf "$dir"
"$conan" profile detect
for with_cuda in False True; do
    "$conan" create "$source" --no-remote --build=missing -s compiler.cppstd=20 -o "gpushare/*:with_cuda=$with_cuda" \
        -c tools.cmake.cmake_layout:test_folder="$dir/test" -c tools.cmake.cmaketoolchain:generator=Ninja
done
