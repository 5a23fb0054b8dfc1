#!/bin/sh
# Every symbol that a level_<name>.cpp object defines for the linker lies in its level's namespace. A
# weak symbol outside it (a template or an inline function of a shared header) would be merged with
# another level's copy and could run instructions that the machine lacks.
#
#   level_objects_test.sh NM OBJECT...      objects that are no level's are passed over
set -eu
nm=$1
shift

objects=0
failures=0
for object in $(echo "$@" | tr ';' ' '); do
  level=$(basename "$object" | sed -n 's/^\(level_[a-z0-9]*\)\.cpp\.o$/\1/p')
  [ -n "$level" ] || continue
  objects=$((objects + 1))
  # Upper-case types are global; V, W, v, w and u are weak or merged. Lower-case t, r, d, b are local.
  strays=$("$nm" --defined-only -C "$object" | awk '$2 ~ /^[A-ZvwuWV]$/' | grep -v "::$level::" |
    grep -v ' DW\.ref\.' || true)
  if [ -n "$strays" ]; then
    echo "$object defines symbols outside namespace $level:"
    echo "$strays"
    failures=1
  fi
done

if [ "$objects" -lt 2 ]; then
  echo "$objects level objects found; expected two or more"
  exit 1
fi
echo "$objects level objects read"
exit $failures
