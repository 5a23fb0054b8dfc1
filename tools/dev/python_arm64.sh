#!/bin/sh
# Runs Debian's Python for 64-bit Arm (build/arm64-root) under qemu-user.
#
#   tools/dev/python_arm64.sh [ARGUMENT...]
root=$(cd "$(dirname "$0")/../../build/arm64-root" && pwd) || exit 1
PYTHONHOME=$root/usr
export PYTHONHOME
exec "$(dirname "$0")/run_arm64.sh" \
  -E "LD_LIBRARY_PATH=$root/usr/lib/aarch64-linux-gnu:$root/lib/aarch64-linux-gnu" \
  "$root/usr/bin/python3.11" "$@"
