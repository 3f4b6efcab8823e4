#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Everything that needs a device, in under ten minutes: the conformance suites, the figures, PyTorch in the memory of two
# tenants, training by libtorch, the example server, models of libtorch beside each other, compute-sanitizer's tools.
# Each step is a process of its own with a time limit, so that one that crashes or hangs costs nothing but itself.
#
#   run.sh [--programs DIR] [--keep DIR] [--more] [OUTPUT]
#
# --more: in place of all that, models beside each other under other loads, as graphs and decoding, in at most four minutes.
# --programs: where test_gpu, gpu_figures and, if they were built, training_figures, torch_figures, gpu_server and engine_figures are, by default beside
# this file. Writes gpu.txt, a page of at most 60 lines, gpu.json, every repeat of every figure, and gpu.log, all that was printed, to OUTPUT, by default the current directory,
# and to the folder that the variable OUT names, if it does; the page and the JSON as well to the folder DEVICE within that of
# --keep, so that results of several devices lie side by side. What was built is told by a file `commit` beside the programs.
# GPU_RUN_LIMIT is how many seconds it may take, 570 if unset; what there is no time for is left out.
# Exit code 0: all passed or can't be done by this device; 1: something failed or ran out of time; 3: no device.
set -uo pipefail

programs=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
keep=
more=
while [[ ${1-} == --* ]]; do
    case $1 in
        --programs) programs=$(cd "$2" && pwd) || exit 2 ;;
        --keep) keep=$2 ;;
        --more)
            more=yes
            shift
            continue
            ;;
        *)
            echo "run.sh: unknown option $1" >&2
            exit 2
            ;;
    esac
    shift 2
done
output=${1-.}
whole_limit=${GPU_RUN_LIMIT:-570}  # seconds, all in all
results=()  # NAME|STATUS|SECONDS, in order
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
: >"$scratch/printed"  # by all steps

# step NAME LIMIT COMMAND...: sets `status`
step() {
    local name=$1 limit=$2 begin=$SECONDS left=$((whole_limit - SECONDS)) code
    shift 2
    echo "== $name"
    if ((left < 5)); then
        status='left out: no time'
    else
        timeout -k 5 $((limit < left ? limit : left)) "$@" </dev/null 2>&1 | tee "$scratch/of_step" | tee -a "$scratch/printed"
        code=${PIPESTATUS[0]}
        case $code in
            0) status=passed ;;
            4) status='not supported' ;;
            124 | 137) status='out of time' ;;
            *)
                status="failed with exit code $code"
                # compute-sanitizer has one code for that and for what it finds.
                ! grep -qa '^=====.*evice not supported' "$scratch/of_step" || status='not supported'
                ;;
        esac
    fi
    results+=("$name|$status|$((SECONDS - begin))")
    echo "== $name: $status, $((SECONDS - begin)) s"
}

# The sanitizers take the suites, collectives among them, several times over; what the library refuses on purpose isn't an error to them. Without
# those about memory, which take all that there is (the tools need some), and without those where a kernel waits for what
# the host does after its launch: the tools may let launches through one by one.
sanitize() {
    local sanitizer tool
    sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null) || {
        echo "== without compute-sanitizer: it isn't installed here"
        results+=("compute-sanitizer|left out: not installed|0")
        return
    }
    for tool in memcheck racecheck initcheck synccheck; do
        step "$tool" 90 "$sanitizer" --tool "$tool" --report-api-errors no --error-exitcode 9 "$programs/test_gpu" \
            '~[memory]~[waits]'
    done
}

pytorch() {
    local python
    if python=$(command -v python3); then
        step pytorch 60 "$python" "$programs/tenants.py" "$programs/pytorch_tenants.so" "$scratch/figures/pytorch"  # 4 where there is no PyTorch
    else
        results+=("pytorch|left out: not installed|0")
    fi
}

# Tenants that train, by scopes of libtorch.
training() {
    local python
    if [[ ! -e $programs/python_tenants.so ]]; then
        echo "== without training: python_tenants.so wasn't built, for lack of libtorch"
        results+=("training|left out: not built|0")
    elif python=$(command -v python3); then
        step training 60 "$python" "$programs/training.py" "$programs/python_tenants.so" "$scratch/figures/training"
    else
        results+=("training|left out: not installed|0")
    fi
}

# The example server, two models of libtorch and their clients.
server() {
    local python seconds=$((whole_limit - SECONDS - 20))
    ((seconds <= 100)) || seconds=100
    if [[ ! -x $programs/gpu_server ]]; then
        echo "== without server: gpu_server wasn't built, for lack of libtorch or Boost"
        results+=("server|left out: not built|0")
    elif ! python=$(command -v python3); then
        echo "== without server: there is no Python, and so no PyTorch whose libtorch it could run with"
        results+=("server|left out: not installed|0")
    elif ((seconds < 40)); then
        echo "== server: left out: no time"
        results+=("server|left out: no time|0")
    else
        # Models go to a folder that is removed even if the step is killed.
        step server 120 env TMPDIR="$scratch" "$python" "$programs/server.py" "$programs/gpu_server" "$scratch/figures/server" --seconds "$seconds"
    fi
}

# Two ranks train modules of libtorch, by the libraries that PyTorch has here.
ranks() {
    local python
    if [[ ! -x $programs/training_figures ]]; then
        echo "== without ranks: training_figures wasn't built, for lack of libtorch"
        results+=("ranks|left out: not built|0")
    elif python=$(command -v python3); then
        step ranks 120 "$python" "$programs/engines.py" "$programs/training_figures" "$scratch/figures/ranks"
    else
        echo "== without ranks: there is no Python, and so no PyTorch whose libtorch it could run with"
        results+=("ranks|left out: not installed|0")
    fi
}

# A decoder on pages, and what runs on a slice of SMs: by the libraries that PyTorch has here.
libtorch() {  # EXPERIMENT LIMIT
    local python
    if [[ ! -x $programs/torch_figures ]]; then
        echo "== without $1: torch_figures wasn't built, for lack of libtorch"
        results+=("$1|left out: not built|0")
    elif python=$(command -v python3); then
        step "$1" "$2" "$python" "$programs/engines.py" "$programs/torch_figures" "$1" "$scratch/figures/$1"
    else
        echo "== without $1: there is no Python, and so no PyTorch whose libtorch it could run with"
        results+=("$1|left out: not installed|0")
    fi
}

# Models of libtorch beside each other, by the libraries that PyTorch has here: engines.py finds them.
engines() {  # STEP [ARG...]
    local step=$1 python seconds=$((whole_limit - SECONDS - 15))
    ((seconds <= 225)) || seconds=225
    if [[ ! -x $programs/engine_figures ]]; then
        echo "== without engines: engine_figures wasn't built, for lack of libtorch"
        results+=("$step|left out: not built|0")
    elif python=$(command -v python3); then
        step "$step" 240 "$python" "$programs/engines.py" "$programs/engine_figures" "$scratch/figures/$step" --seconds "$seconds" "${@:2}"
    else
        echo "== without engines: there is no Python, and so no PyTorch whose libtorch they could run with"
        results+=("$step|left out: not installed|0")
    fi
}

run_all() {
    local code
    mkdir "$scratch/figures"
    echo "# $(date -u '+%Y-%m-%d %H:%M:%S') UTC"
    device=$("$programs/gpu_figures" --device 2>&1) || {
        code=$?
        echo "$device"
        ((code == 3)) && echo "gpu: there is no device to run on"
        return $((code == 3 ? 3 : 1))
    }
    driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1)
    echo "$device"
    echo "# driver ${driver:-of unknown version}"

    if [[ -n $more ]]; then
        engines engines_more --more
    else
        run_steps
    fi
    page >"$scratch/page"
    sed 's/ *$//' "$scratch/page" | head -n 60 | tee "$scratch/gpu.txt"
    write_json >"$scratch/gpu.json"
    ((failed == 0))
}

run_steps() {
    local experiments experiment name limit
    step conformance 150 "$programs/test_gpu"
    mapfile -t experiments < <("$programs/gpu_figures" --list)
    for experiment in "${experiments[@]}"; do
        read -r name limit <<<"$experiment"
        step "$name" "$limit" "$programs/gpu_figures" "$name" "$scratch/figures/$name"
    done
    pytorch
    training
    ranks
    libtorch decoder 20
    libtorch slices 30
    server
    engines engines
    sanitize
}

# What ran where, how it went, what was measured (medians) and what was learnt on the way.
page() {
    echo "== $(date -u '+%Y-%m-%d %H:%M') UTC"
    echo "$device"
    echo "# driver ${driver:-of unknown version}"
    grep -aE '^(All tests passed|test cases:)' "$scratch/printed" | head -n 1
    summary
    grep -aoE '^ *not supported: .*' "$scratch/printed" | sed 's/^ *//' | cut -c 1-120 | sort -u | head -n 4  # within a step
    echo "== figures"
    figures_of_page |
        awk '{ printf "%-40s %9s %-8s%s", $1, $2, $3, NR % 2 ? " " : "\n" } END { if (NR % 2) print "" }'
    echo "== learnt"
    grep -aE '^# [a-z0-9]' "$scratch/printed" | cut -c 1-120 | head -n 12
}

# As many as there is room for. All are in the JSON file.
figures_of_page() {
    local all
    all=$(sed -n 's/^figure gpu\.//p' "$scratch/printed" | grep -v '_with_a_planted_fault ')
    [[ -z $more ]] || { grep '^engines_' <<<"$all" | head -n 58; return; }
    local main='^(engines_(p99_vs_alone_[a-z]+(_held|_native)? |background_pct_[a-z]+(_held)? |gate_cost|hold_cost|share_error_pp|metering_error)|server_|open_wait_)'
    local engines
    engines=$(grep -E "$main" <<<"$all" | head -n 31)
    grep -Ev '^(engines|server|open_wait)_' <<<"$all" | head -n $((58 - $(grep -c . <<<"$engines")))
    grep . <<<"$engines"
}

# What passed in one go; all else by name. Sets `failed`.
summary() {
    local entry name status seconds passed=0 without=0
    failed=0
    for entry in "${results[@]}"; do
        IFS='|' read -r name status seconds <<<"$entry"
        [[ $status == passed ]] || printf '%-28s %-26s %4s s\n' "$name" "$status" "$seconds"
        case $status in
            passed) passed=$((passed + 1)) ;;
            'not supported' | 'left out: not installed' | 'left out: not built') without=$((without + 1)) ;;
            *) failed=$((failed + 1)) ;;
        esac
    done
    echo "gpu: $passed passed, $failed failed or unfinished, $without can't be done here; $SECONDS s on ${device#\# }"
}

quoted() { printf '"%s"' "$(tr -d '\000-\037' <<<"$1" | sed 's/[\\"]/\\&/g')"; }

write_json() {
    local entry name status seconds separator=$'\n'
    printf '{"date": %s,\n "device": %s,\n "driver": %s,\n "steps": {' "$(quoted "$(date -u +%FT%TZ)")" \
        "$(quoted "${device#\# }")" "$(quoted "${driver:-unknown}")"
    for entry in "${results[@]}"; do
        IFS='|' read -r name status seconds <<<"$entry"
        printf '%s  %s: {"status": %s, "seconds": %s' "$separator" "$(quoted "$name")" "$(quoted "$status")" "$seconds"
        separator=$',\n'
        # What was killed may have left half a file.
        [[ -s $scratch/figures/$name && $status != 'out of time' ]] && printf ', "result": %s' "$(<"$scratch/figures/$name")"
        printf '}'
    done
    printf '\n }}\n'
}

mkdir -p "$output" || exit 2
[[ ! -e $programs/commit ]] || GPUSHARE_BENCH_COMMIT=$(<"$programs/commit")
export GPUSHARE_BENCH_COMMIT=${GPUSHARE_BENCH_COMMIT:-unknown}
run_all | tee "$scratch/gpu.log"
code=${PIPESTATUS[0]}
for folder in "$output" ${OUT:+"$OUT"}; do
    mkdir -p "$folder" && cp "$scratch/gpu.log" "$folder/"
    [[ ! -e $scratch/gpu.json ]] || cp "$scratch/gpu.txt" "$scratch/gpu.json" "$folder/"
done
if [[ -n $keep && -e $scratch/gpu.json ]]; then
    # "NVIDIA H100 80GB HBM3, compute capability ..." becomes nvidia-h100-80gb-hbm3.
    name=$(sed -n 's/^ "device": "\([^,]*\).*/\1/p' "$scratch/gpu.json" | tr '[:upper:]' '[:lower:]' | tr -cs '[:alnum:]' -)
    mkdir -p "$keep/${name%-}" && cp "$scratch"/gpu.{txt,json} "$keep/${name%-}/"
fi
exit "$code"
