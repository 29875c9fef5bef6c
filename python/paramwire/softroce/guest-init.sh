#!/bin/busybox sh
# Process 1 of the guest, from the initramfs: modules, the host's file system under an overlay, then guest-main.sh in it.
# /softroce holds what was made for this run: settings (MTU), keep/* and out_folder (each one path), command, mark. What goes wrong here is
# told on the console, which the host shows when no status of the command comes.
# Commands are busybox's own, without a PATH: Debian's busybox takes its applets first, by /proc/self/exe.
/bin/busybox mkdir -p /proc /sys /dev /host /over /new /hide
/bin/busybox mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev

stop() {
  echo "softroce: $*" >/dev/console
  poweroff -f
}

for module in $(cat /modules/order); do
  insmod "/modules/$module" || stop "module $module can not be loaded"
done

# The device of the virtio port of that name.
port() {
  for entry in /sys/class/virtio-ports/*; do
    read -r found <"$entry/name" && [ "$found" = "$1" ] && echo "/dev/${entry##*/}" && return
  done
}
control=$(port control) stdout=$(port stdout) stderr=$(port stderr)
[ -n "$control" ] && [ -n "$stdout" ] && [ -n "$stderr" ] || stop "no virtio ports"
exec 3<>"$control"
echo hello >&3

# msize: bytes in a message; virtio takes at most this. loose: pages and names are kept, for the host's files are taken as frozen.
mount -t 9p -o trans=virtio,version=9p2000.L,ro,msize=512000,cache=loose root /host || stop "no 9p share of the host's /"
mount -t tmpfs -o mode=755 over /over && mkdir /over/up /over/work &&
  mount -t overlay -o lowerdir=/host,upperdir=/over/up,workdir=/over/work overlay /new || stop "no overlay over the host's /"
mount -t proc proc /new/proc && mount -t sysfs sysfs /new/sys && mount -t devtmpfs devtmpfs /new/dev &&
  mkdir -p /new/dev/pts /new/dev/shm && mount -t devpts devpts /new/dev/pts || stop "no proc, sys or dev"
# What udev makes elsewhere.
for link in fd=fd stdin=fd/0 stdout=fd/1 stderr=fd/2; do
  ln -s "/proc/self/${link#*=}" "/new/dev/${link%=*}"
done

keep() {
  if [ -d "/new$1" ]; then mkdir -p "$2"; else mkdir -p "${2%/*}" && touch "$2"; fi && mount --bind "/new$1" "$2"
}

# Empty ones, but for what keep/* names below them: the command needs it.
for place in /tmp /run /dev/shm; do
  mount -t tmpfs -o mode=1777 tmpfs /hide || stop "no tmpfs"
  for entry in /softroce/keep/*; do
    [ -e "$entry" ] && kept=$(cat "$entry") || continue
    case "$kept" in "$place"/*) keep "$kept" "/hide/${kept#"$place"/}" || stop "$kept is not there" ;; esac
  done
  mount --move /hide "/new$place" || stop "no tmpfs on $place"
done

if [ -e /softroce/out_folder ]; then
  out=$(cat /softroce/out_folder)
  # mmap: writes go through at once, and files can be mapped.
  mkdir -p "/new$out" && mount -t 9p -o trans=virtio,version=9p2000.L,msize=512000,cache=mmap out "/new$out" ||
    stop "no 9p share of $out"
fi

cp -r /softroce /new/run/ && cp /bin/busybox /new/run/softroce/ || stop "no room in /run"
exec switch_root /new /run/softroce/busybox sh /run/softroce/guest-main.sh "$stdout" "$stderr"
