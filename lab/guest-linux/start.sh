#!/bin/busybox sh
# The first process: it makes the system ready, and becomes busybox's init.
/bin/busybox --install -s
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t tmpfs tmp /tmp
mount -t tmpfs run /run
hostname guest
echo "Linux $(uname -r), VM of $(nproc) vCPUs. 'poweroff' ends it."
exec init
