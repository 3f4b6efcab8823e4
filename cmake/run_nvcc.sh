#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Runs nvcc so that its PTX stays in DIRECTORY, and what it prints in DIRECTORY/report.txt; shows that if it fails.
#
#   run_nvcc.sh DIRECTORY NVCC [ARG...]
set -eu
directory=$1
shift
if ! "$@" --keep --keep-dir "$directory" >"$directory/report.txt" 2>&1; then
    cat "$directory/report.txt" >&2
    exit 1
fi
# Of what nvcc keeps, megabytes of preprocessed source are of no use.
find "$directory" -type f ! -name '*.ptx' ! -name '*.o' ! -name '*.d' ! -name report.txt -delete
