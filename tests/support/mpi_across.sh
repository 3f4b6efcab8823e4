#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Inside shaped_link.sh: an MPI's processes on both sides of the link, as many on each.
#
#   mpi_across.sh openmpi|MPICH_FOLDER PROCESSES blocks|interleaved [--OPTION VALUE...] PROGRAM [ARG...]
#
# blocks: ranks 0, 1 | 2, 3; interleaved: 0, 2 | 1, 3. Options that begin with -- go to the launcher.
set -euo pipefail

mpi=$1 n=$2 placement=$3
shift 3
options=()
while [[ ${1-} == --* ]]; do
    options+=("${@:1:3}")  # --mca NAME VALUE
    shift 3
done
each=$((n / 2))
if [[ $mpi == openmpi ]]; then
    by=slot
    [[ $placement == blocks ]] || by=node
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
    # More processes than cores: who waits has to let go of its core.
    exec mpirun --mca plm_rsh_agent "$GPUSHARE_ON_RIGHT" --host "$GPUSHARE_LEFT:$each,$GPUSHARE_RIGHT:$each" \
        --map-by "$by" --bind-to none --mca mpi_yield_when_idle 1 --mca btl self,vader,tcp \
        --mca btl_tcp_if_include wire --mca oob_tcp_if_include wire "${options[@]}" -n "$n" "$@"
fi
hosts=$GPUSHARE_LEFT:1,$GPUSHARE_RIGHT:1
[[ $placement != blocks ]] || hosts=$GPUSHARE_LEFT:$each,$GPUSHARE_RIGHT:$each
# Whatever else UCX finds goes round the link.
export UCX_TLS=tcp,self UCX_NET_DEVICES=wire LD_LIBRARY_PATH=$mpi/lib
exec "$mpi/bin/mpiexec.hydra" -launcher ssh -launcher-exec "$GPUSHARE_ON_RIGHT" -iface wire -hosts "$hosts" -n "$n" "$@"
