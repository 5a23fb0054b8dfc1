#!/bin/sh
# Runs a program of Windows under Wine, whose folders are in build/cross/windows/wine.
#
#   tools/dev/run_windows.sh PROGRAM [ARGUMENT...]
WINEPREFIX=$(cd "$(dirname "$0")/../.." && pwd)/build/cross/windows/wine
export WINEPREFIX WINEDEBUG=-all
exec /usr/lib/wine/wine64 "$@"
