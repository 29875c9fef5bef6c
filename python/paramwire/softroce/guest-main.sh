# The guest's second half, as process 1 in the host's file system: devices up, the command, its status to the host.
# Lines to the host on descriptor 3: "hello" (guest-init.sh), "start KERNEL", then "exit STATUS" or "failed WHY". The host ends the
# guest when it has all it wants; the guest powers itself off should that not happen.
cd /run/softroce || exit
# Plain names are busybox's applets here, as in guest-init.sh; devices.sh wants the host's shell, ip and rdma.

failed() {
  echo "failed $*" | tr '\n' ' ' >&3
  echo >&3
  finish
}
finish() {
  read -r -t 60 _ <&3
  poweroff -f
}

# A program of the host's.
of_host() {
  PATH=/usr/sbin:/usr/bin:/sbin:/bin /usr/bin/env "$@"
}

. ./settings
hostname softroce
ulimit -l unlimited
ip link set lo up
# Packets between the two devices wait here for the one processor that works on them; what finds no room is dropped, and a READ whose
# packets are dropped may complete without its bytes (8 to 28 in a minute of 20 readers with the kernel's 1000, none with this).
echo 100000 >/proc/sys/net/core/netdev_max_backlog
made=$(of_host sh devices.sh up "$MTU" 2>&1) || failed "$made"
eval "$made"
# IPv6 finds any address of this machine before it looks at the device to go out by, so that packets between the two would stay inside,
# where rxe is not. The table for such addresses comes second here, for what goes out by one of the two; not on a host, where this is
# for all.
for net in $PARAMWIRE_SOFTROCE_NETDEVS; do
  of_host ip -6 rule add pref 10 oif "$net" table main
done
of_host ip -6 rule add pref 20 table local && of_host ip -6 rule delete pref 0 table local
mount -t cgroup2 cgroup2 /sys/fs/cgroup && mkdir /sys/fs/cgroup/softroce || failed "no control group"

# A virtio port can be open once only, and a command may open its /dev/stdout again: it gets pipes. mark is what the host takes for
# the end of the stream.
mkfifo out err
cat out mark >"$1" 3>&- &
cat_out=$!
cat err mark >"$2" 3>&- &
cat_err=$!

echo "start $(uname -r)" >&3
# In the foreground: a shell's background commands ignore SIGINT, and so would all that they start.
(
  exec 3>&- </dev/null >out 2>err
  echo 0 >/sys/fs/cgroup/softroce/cgroup.procs
  . ./command
)
status=$?
# What the command left running would hold the pipes open.
echo 1 >/sys/fs/cgroup/softroce/cgroup.kill
[ ! -e ./out_folder ] || umount "$(cat ./out_folder)" || sync
echo "exit $status" >&3
wait $cat_out $cat_err
finish
