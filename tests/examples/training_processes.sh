#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# training_processes.sh THREADS PROCESSES DIGITS: the example that trains, by 2 and 4 processes, has the parameters that as many threads
# have; and when a process is killed in the middle, the others say which, and stop or go on as they were told.
set -euo pipefail
threads=$1 processes=$2 digits=$3
cd "$(mktemp -d)"
trap 'rm -rf "$PWD"' EXIT
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
train=(--data "$digits" --epochs 1)

by() {  # PROCESSES ARG...
    mpirun --bind-to none --oversubscribe --mca mpi_yield_when_idle 1 --enable-recovery -n "$1" "$processes" --ranks 1 "${train[@]}" "${@:2}" 2>&1
}
expect() {  # PATTERN TIMES TEXT
    [[ $(grep -cE "$1" <<<"$3") == "$2" ]] && return
    printf 'not %s times "%s":\n%s\n' "$2" "$1" "$3" >&2
    exit 1
}

for n in 2 4; do
    same=$("$threads" --ranks "$n" "${train[@]}" | grep -o 'parameters [0-9a-f]*')
    expect "$same, the same on all ranks" 1 "$(by "$n")"
    expect "$same, the same on all ranks" 1 "$(by "$n" --sharded)"
done
lost=$(by 4 --fail 2:10 --patience 1000 --lost go-on || true)
expect 'number [013]: stopped after 10 steps: .*rank 2' 3 "$lost"
expect 'goes on without number 2' 3 "$lost"
expect '3 processes: accuracy .*the same on all ranks' 1 "$lost"
lost=$(by 2 --fail 1:10 --patience 1000 || true)
expect 'number 0: stopped after 10 steps: .*rank 1' 1 "$lost"
expect 'accuracy' 0 "$lost"
echo "processes train as threads do"
