#!/usr/bin/env bash
# One run on two hosts with a common folder, and no second machine needed: the hosts are network namespaces of this one,
# with a cable between them. Needs root and iproute2.
#
#     examples/two_hosts.sh examples/two_hosts.toml [OPTIONS OF terrazzo train]
#
# On real hosts, give the `terrazzo train` command below on each of them.
set -euo pipefail

one="tz$$a" other="tz$$b"
cleanup() {
    kill $(jobs -p) 2>/dev/null || true
    wait
    ip netns del "$one" 2>/dev/null || true
    ip netns del "$other" 2>/dev/null || true
}
trap cleanup EXIT

ip netns add "$one"
ip netns add "$other"
ip link add "$one" netns "$one" type veth peer name "$other" netns "$other"
ip -n "$one" addr add 10.77.0.1/24 dev "$one"
ip -n "$other" addr add 10.77.0.2/24 dev "$other"
for host in "$one" "$other"; do
    ip -n "$host" link set lo up
    ip -n "$host" link set "$host" up
done

start() { # gloo is told the network, as the host's name stands for another one
    exec ip netns exec "$1" env GLOO_SOCKET_IFNAME="$1" ${TERRAZZO:-terrazzo} train "${@:2}"
}
start "$one" "$@" &
first=$!
start "$other" "$@" &
second=$!
wait "$first"
wait "$second"
