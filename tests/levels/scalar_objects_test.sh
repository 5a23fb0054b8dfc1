#!/bin/sh
# Whatever runs before or without an AVX level runs on any x86-64: no object but those of such levels
# has an instruction that AVX, AVX-512 or BMI brought, but for functions that bear a level's name
# because they are chosen at run time. The scan must find some in an AVX2 object.
#
#   scalar_objects_test.sh OBJDUMP OBJECT...
set -eu
objdump=$1
shift

# Instructions with a VEX or EVEX prefix: names that begin with v (but for verr and verw), mask
# registers' and BMI's. tzcnt is not one of them: old machines run it as bsf. Functions whose name
# matches the pattern are passed over.
#   found_in OBJECT PATTERN
found_in() {
  "$objdump" -d --no-show-raw-insn --no-addresses "$1" | awk -F'\t' -v passed="$2" '
    /^</ { is_passed = $0 ~ passed }
    is_passed { next }
    { split($2, word, " ") }
    word[1] ~ /^v/ && word[1] !~ /^ver[rw]$/ { print word[1]; next }
    word[1] ~ /^k(mov|or|and|xor|not|shift|test|unpck|add)/ { print word[1]; next }
    word[1] ~ /^(andn|bextr|bls(i|r|msk)|bzhi|mulx|pdep|pext|rorx|sarx|shlx|shrx)[lq]?$/ { print word[1] }
  ' | sort | uniq -c
}

objects=0
controls=0
failures=0
for object in $(echo "$@" | tr ';' ' '); do
  case $(basename "$object") in
  level_avx2.cpp.o)
    controls=$((controls + 1))
    if [ -z "$(found_in "$object" none)" ]; then
      echo "$object: the scan finds no AVX instruction; it looks at the wrong thing"
      failures=1
    fi
    ;;
  level_avx*.cpp.o) ;;
  *.cpp.o)
    objects=$((objects + 1))
    # stream_copy_avx512 and its like are called only where the machine has the instructions.
    found=$(found_in "$object" '[a-z]_avx(2|512)')
    if [ -n "$found" ]; then
      echo "$object has instructions that not every x86-64 runs:"
      echo "$found"
      failures=1
    fi
    ;;
  esac
done

if [ "$objects" -lt 50 ] || [ "$controls" -lt 1 ]; then
  echo "$objects objects and $controls AVX2 objects read; expected 50 and 1 or more"
  exit 1
fi
echo "$objects objects read"
exit $failures
