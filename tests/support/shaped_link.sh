#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Two machines on a wire, as far as one machine can be two: two network namespaces, each with a host name and a /dev/shm of its own,
# joined by a veth pair that is shaped (tbf) in both directions.
#
#   shaped_link.sh [--rate 1gbit] [--burst 256kb] [--seconds 120] [--at-least BYTES] COMMAND [ARG...]
#
# COMMAND runs on the left side, with
#   GPUSHARE_LEFT, GPUSHARE_RIGHT   the addresses of both sides; the device is called `wire` on both
#   GPUSHARE_ON_RIGHT               a program that runs its arguments on the right side. An MPI's launcher takes it for its ssh: it drops
#                                   a host name and options in front of them
#   GPUSHARE_SHARED                 an empty folder that both see; TMPDIR is another one for each
# With --at-least it is an error if fewer bytes than that left either side. Needs root and iproute2: without them it ends with 77, and with 1
# where CI is set. Nothing but the two namespaces is touched, and everything in them ends with this program, however that ends.
set -euo pipefail

rate=1gbit burst=256kb seconds=120 at_least=0
while [[ ${1-} == --* ]]; do
    case $1 in
        --rate) rate=$2 ;;
        --burst) burst=$2 ;;
        --seconds) seconds=$2 ;;
        --at-least) at_least=$2 ;;
        *) echo "shaped_link: unknown option $1" >&2; exit 2 ;;
    esac
    shift 2
done

PATH=$PATH:/usr/sbin:/sbin
if [[ ${SHAPED_LINK_INSIDE-} != yes ]]; then
    why=
    for program in ip tc unshare nsenter; do command -v "$program" >/dev/null || why="there is no $program"; done
    [[ -n $why ]] || unshare --net --mount --uts --pid --fork true 2>/dev/null || why="no namespace may be made here"
    if [[ -n $why ]]; then
        echo "shaped_link: skipped: $why" >&2
        [[ ${CI-} != true ]] || exit 1
        exit 77
    fi
    export SHAPED_LINK_INSIDE=yes
    # Whatever runs in a PID namespace ends with its first process, and that one with `unshare`.
    exec timeout --kill-after 5 "$seconds" unshare --net --mount --uts --pid --fork --kill-child --mount-proc \
        "$0" --rate "$rate" --burst "$burst" --at-least "$at_least" "$@"
fi
unset SHAPED_LINK_INSIDE

# ---- both sides

settle() {  # NAME ADDRESS: what a side has of its own
    hostname "$1"
    mount -t sysfs sysfs /sys  # shows the devices of the namespace that mounts it
    mount -t tmpfs tmpfs /dev/shm
    ip link set lo up
    ip address add "$2/24" dev wire
    ip link set wire up
    tc qdisc add dev wire root tbf rate "$rate" burst "$burst" latency 50ms
}

export GPUSHARE_LEFT=10.76.25.1 GPUSHARE_RIGHT=10.76.25.2 GPUSHARE_SHARED=/mnt TMPDIR=/dev/shm rate burst
mount -t tmpfs tmpfs "$GPUSHARE_SHARED"  # before there are two
export -f settle
unshare --net --mount --uts bash -c 'touch /mnt/.right; exec sleep infinity' &
right=$!
while [[ ! -e $GPUSHARE_SHARED/.right ]]; do sleep 0.01; done
rm "$GPUSHARE_SHARED/.right"
ip link add wire type veth peer name wire netns "$right"
settle left "$GPUSHARE_LEFT"
nsenter -t "$right" -n -m -u bash -euc "settle right $GPUSHARE_RIGHT"

export GPUSHARE_ON_RIGHT=$GPUSHARE_SHARED/on_right
cat >"$GPUSHARE_ON_RIGHT" <<END_OF_AGENT
#!/bin/sh
while :; do
    case \$1 in
        -x | -q | -n) shift ;;
        10.76.25.*) shift ;;
        *) break ;;
    esac
done
exec nsenter -t $right -n -m -u sh -c "\$*"
END_OF_AGENT
chmod +x "$GPUSHARE_ON_RIGHT"

status=0
"$@" || status=$?
for side in left right; do
    enter=()
    [[ $side == left ]] || enter=(nsenter -t "$right" -n -m -u)
    sent=$("${enter[@]}" cat /sys/class/net/wire/statistics/tx_bytes)
    echo "shaped_link: $sent bytes left the $side side"
    if ((sent < at_least)); then
        echo "shaped_link: that is fewer than $at_least: they went another way" >&2
        status=1
    fi
done
exit "$status"
