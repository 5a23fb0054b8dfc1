#!/usr/bin/env bash
# Instructions of a call of each packed kernel, a token, on an emulated 64-bit Arm processor.
#
#   bench/cpu/count_arm64.sh PROGRAM LEVEL FORMAT...
set -euo pipefail
program=$1
level=$2
shift 2
run=$(dirname "${BASH_SOURCE[0]}")/../../tools/dev/run_arm64.sh

# How many instructions the program with so many calls runs: the emulator logs each on a line.
count() {
  QEMU_SINGLESTEP=1 QEMU_LOG=exec,nochain QEMU_LOG_FILENAME=/dev/stdout "$run" "$program" \
    --levels "$level" --calls "$1" "$2" | grep -c '^Trace'
}

for format in "$@"; do
  echo "$format $level $((($(count 3 "$format") - $(count 1 "$format")) / 2 / 64))"
done
