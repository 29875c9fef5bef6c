#!/bin/sh
# Two RoCE devices on the two ends of a veth pair, for a host and for the guest alike. POSIX sh; needs ip and rdma.
#
#   devices.sh up MTU     makes a pair, and prints NAME='VALUE' lines that say what was made
#   devices.sh hold MTU   the same, then an empty line; at the end of its input it kills the process groups that it read, one a line
#                         ("forget": none of those so far), and takes down what it made: so it does when its caller is killed
#
# Pair K is rxe devices rx(2K) and rx(2K+1) on netdevs rxv(2K) and rxv(2K+1); the first K that is free is taken, so that a second run
# on one machine gets devices of its own. Addresses: 198.18.0.0/15 is for benchmarks (RFC 2544), fd5a:9c31:e7b4::/48 is a unique local
# prefix (RFC 4193): neither is anybody's route.
set -u
PATH=/usr/sbin:/usr/bin:/sbin:/bin:${PATH:-}
PAIRS=100

fail() {
  echo "$*" >&2
  exit 1
}

names() {
  one=rx$((2 * $1)) two=rx$((2 * $1 + 1))
  net_one=rxv$((2 * $1)) net_two=rxv$((2 * $1 + 1))
}

# What `up` made; a module that it loaded goes too, unless someone has made rxe devices since (only rxe has "parent").
down() {
  names "$pair"
  for device in $made; do
    rdma link delete "$device"
  done
  # The other end goes with it.
  ip link delete $net_one
  for device in /sys/class/infiniband/*/parent; do
    [ ! -e "$device" ] || return 0
  done
  [ -z "$loaded" ] || modprobe -r $loaded 2>/dev/null || true
}

# Whole or not at all: what fails takes down what was made.
undo() {
  down 2>/dev/null
  fail "$*"
}

# So that packets between the two ends, both of them this host's, take the wire and are accepted (ip-sysctl: accept_local, arp_ignore,
# arp_announce; rp_filter 2 is loose, and the larger one of "all" and the device's counts). No wait for duplicate addresses. All of
# these are the device's own and go with it.
settle() {
  for setting in accept_local=1 arp_ignore=1 arp_announce=2 rp_filter=2; do
    echo "${setting#*=}" >"/proc/sys/net/ipv4/conf/$1/${setting%=*}" || return 1
  done
  [ ! -e "/proc/sys/net/ipv6/conf/$1/accept_dad" ] || echo 0 >"/proc/sys/net/ipv6/conf/$1/accept_dad"
}

up() {
  mtu=$1
  loaded= made=
  for module in rdma_rxe rdma_ucm; do
    [ ! -e /sys/module/$module ] || continue
    if reason=$(modprobe $module 2>&1); then
      loaded="$module $loaded"
    elif [ $module = rdma_rxe ]; then # rdma_ucm is for librdmacm; verbs alone do without
      fail "module rdma_rxe can not be loaded: $reason"
    fi
  done

  # The netdev is the claim: of two that make one at the same moment, the kernel lets one have it.
  pair=0
  while names $pair; do
    if [ ! -e /sys/class/infiniband/$one ] && [ ! -e /sys/class/infiniband/$two ]; then
      reason=$(ip link add $net_one mtu "$mtu" type veth peer name $net_two mtu "$mtu" 2>&1) && break
      [ -e /sys/class/net/$net_one ] || [ -e /sys/class/net/$net_two ] || fail "no veth pair: $reason"
    fi
    pair=$((pair + 1))
    [ $pair -lt $PAIRS ] || fail "$PAIRS pairs of devices are there already: rdma link shows them"
  done

  side=1
  for net in $net_one $net_two; do
    reason=$(settle $net 2>&1) || undo "settings of $net: $reason"
    reason=$(ip link set $net up 2>&1) || undo "$net does not come up: $reason"
    reason=$(ip address add 198.18.$pair.$side/24 dev $net 2>&1) || undo "no IPv4 address on $net: $reason"
    ip address add fd5a:9c31:e7b4:$((pair + 1))::$side/64 dev $net nodad 2>/dev/null || true # a kernel without IPv6
    side=2
  done
  reason=$(rdma link add $one type rxe netdev $net_one 2>&1) || undo "no device $one: $reason"
  made=$one
  reason=$(rdma link add $two type rxe netdev $net_two 2>&1) || undo "no device $two: $reason"
  made="$one $two"
  # 12B7 is 4791, RoCE v2's port. Kernels whose rxe knows one network namespace only listen in the first one, so a device made in
  # another is listed and reaches nobody.
  grep -q ':12B7 ' /proc/net/udp /proc/net/udp6 2>/dev/null ||
    undo "rxe of this kernel ($(uname -r)) serves the first network namespace only, and this is another: a device made here would be listed and reach nobody"

  echo "PARAMWIRE_SOFTROCE_DEVICES='$one $two'"
  echo "PARAMWIRE_SOFTROCE_NETDEVS='$net_one $net_two'"
  echo "PARAMWIRE_SOFTROCE_IPV4='198.18.$pair.1 198.18.$pair.2'"
  echo "PARAMWIRE_SOFTROCE_IPV6='fd5a:9c31:e7b4:$((pair + 1))::1 fd5a:9c31:e7b4:$((pair + 1))::2'"
}

hold() {
  # For a terminal's Ctrl-C and the like: the caller answers those, and the end of the input tells.
  trap '' INT TERM HUP
  up "$1"
  echo
  groups=
  while read -r line; do
    [ "$line" = forget ] && groups= || groups="$groups $line"
  done
  for group in $groups; do
    kill -KILL -- "-$group" 2>/dev/null
  done
  down
}

case "${1:-}" in
  up | hold) "$1" "$2" ;;
  *) fail "usage: devices.sh up|hold MTU" ;;
esac
