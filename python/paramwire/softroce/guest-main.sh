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

. ./settings
hostname softroce
ulimit -l unlimited
ip link set lo up
made=$(/bin/sh devices.sh up "$MTU" 2>&1) || failed "$made"
eval "$made"
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
