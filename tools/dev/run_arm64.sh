#!/bin/sh
# Runs a 64-bit Arm program under qemu-user, on the processor that KVX_ARM_CPU names (qemu's names;
# `max` has everything that qemu emulates; without SVE, which kvx has no code for and in which the C
# library moves bytes, tests take a quarter less).
#
#   KVX_ARM_CPU=neoverse-n1 tools/dev/run_arm64.sh PROGRAM [ARGUMENT...]
# A program cannot start itself again (the system has no emulator for its kind): death tests fork.
export GTEST_DEATH_TEST_STYLE=fast
exec qemu-aarch64 -L /usr/aarch64-linux-gnu -cpu "${KVX_ARM_CPU:-max,sve=off}" "$@"
