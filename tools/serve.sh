# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash disable=SC2034,SC2154  # shares its variables with ./dev
# The example server: `./dev serve`, and the server's clients in `./dev check`.

# Builds the example server with the engines that are installed. Sets `server` to the program.
build_server() {  # [PROGRAM]
    build host "${1:-inference_server}"
    server=$(build_dir host)/examples/inference_server/${1:-inference_server}
}

# Runs the clients without real engines, which would take as long again to fetch. Without the
# clients, a developer's machine continues with the rest of the check.
check_clients() {
    if (uses clients); then
        clients triton_http triton_grpc kserve promtool wrk loadgen
    elif [[ ${CI-} == true ]]; then
        fail 1 "the example server's clients can't be had"
    else
        echo "== without others' clients: the example server isn't asked by them"
    fi
}

# Runs other projects' clients, all of them or the named ones; then attacks, nginx in front of the
# server, and the requests of `./dev gpu`.
clients() {  # [NAME...]
    uses clients
    build_server
    step "clients" "$tools/clients/bin/python" "$root/tests/clients/clients.py" "$server" "$@"
    step "gRPC from outside" "$tools/clients/bin/python" "$root/tests/clients/grpc_outside.py" "$server"
    step "attacks" python3 "$root/tests/clients/attacks.py" "$server"
    step "behind nginx" python3 "$root/tests/clients/proxy.py" "$server" "$nginx"
    step "as ./dev gpu asks" python3 "$root/bench/gpu/server.py" "$server" --host
}

# Takes `--on` from the arguments, which says where models of libtorch run. Sets `on` to its value,
# empty without `--on`, and `arguments` to the other arguments.
where_to_serve() {  # ARG...
    on='' arguments=()
    while (($# > 0)); do
        if [[ $1 == --on ]]; then
            [[ ${2-} == @(cuda|host) ]] || fail 2 "--on: '${2-}' is neither 'cuda' nor 'host'"
            on=$2
            shift
        else
            arguments+=("$1")
        fi
        shift
    done
    [[ -z $on || " ${arguments[*]} " == *" --torch "* ]] || fail 2 "--on: only models of libtorch run on CUDA; add --torch FOLDER"
}

# Whether the server on CUDA can be built, with the libtorch of the installed PyTorch. If not,
# `why_not` has the reason.
has_cuda_for_server() {
    why_not="nvidia-smi finds no GPU here"
    nvidia-smi -L >/dev/null 2>&1 || return 1
    why_not="there is no CUDA toolkit, or no libtorch for it: './dev setup gpu' fetches them"
    has_newer_libtorch
}

# Whether there is a libtorch that also loads packages of AOTInductor. It needs CUDA's libraries,
# even to run on the host.
has_newer_libtorch() {
    find_cuda_toolkit
    [[ -n $cuda_home && -e $tools/torch_cuda/torch/lib/libtorch_cpu.so ]] || return 1
    [[ -e $cuda_home/extras/CUPTI/include/cupti.h || -e $cuda_home/include/cupti.h ]]
}

# Builds the server with libtorch. Sets `run_server` to the command that starts it.
build_server_with_torch() {
    if [[ $on != host ]] && has_cuda_for_server; then
        build_server inference_server_on_cuda
        run_server=(python3 "$root/bench/gpu/engines.py" "$server")
        why_not="the server finds no device, or no PyTorch of the version that it is built for"
        if "${run_server[@]}" --find-device; then return; fi
    fi
    [[ $on != cuda ]] || fail 3 "--on cuda: $why_not"
    [[ $on == host ]] || echo "== models of libtorch on the host: $why_not"
    has_newer_libtorch || uses libtorch
    build_server inference_server_with_torch
    run_server=("$server")
}

serve() {  # [--demo | ARG...]
    local folder=$root/build/serve needed=(serve) on arguments run_server why_not
    where_to_serve "$@"
    set -- "${arguments[@]}"
    [[ " $* " != *" --gemma-terms-accepted "* ]] || needed+=(--gemma-terms-accepted)
    uses "${needed[@]}"
    if [[ " $* " == *" --torch "* ]]; then
        build_server_with_torch
    else
        build_server
        run_server=("$server")
    fi
    mkdir -p "$folder"
    if [[ ${1-} == --demo ]]; then
        step "demo" python3 "$root/tests/clients/demo.py" "$server" "$folder/demo.svg" "${@:2}"
        return
    fi
    [[ -e $folder/tenants.conf ]] || cp "$root/examples/inference_server/tenants.conf" "$folder"
    [[ " $* " != *" --help "* ]] || exec "${run_server[@]}" --help
    how_to_ask "$folder"
    exec "${run_server[@]}" --tenants "$folder/tenants.conf" --journal "$folder/usage" "$@"
}

how_to_ask() {  # FOLDER
    cat <<END
Tenants and their keys: $1/tenants.conf; change it while the server runs. What they use: $1/usage. Ask from another terminal:

  curl -H 'Authorization: Bearer demo-key-of-chat' http://127.0.0.1:8000/v2/models/mlp/infer -d \
    '{"inputs":[{"name":"INPUT","datatype":"FP32","shape":[1,16],"data":[0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15]}]}'
  curl -H 'Authorization: Bearer demo-key-of-chat' http://127.0.0.1:8000/v2/models/voice/infer -d \
    "{\"inputs\":[{\"name\":\"samples\",\"datatype\":\"FP32\",\"shape\":[512],\"data\":[\$(seq -s, 512)]}]}"
  curl -N -H 'Authorization: Bearer demo-key-of-batch' http://127.0.0.1:8000/v2/models/letters/generate_stream -d \
    '{"text_input":"hello","max_tokens":40}'        # with --gemma-terms-accepted: the model gemma, too
  curl http://127.0.0.1:8002/metrics                # and the status page: http://127.0.0.1:8002/

END
}
