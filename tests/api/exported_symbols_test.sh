#!/usr/bin/env bash
# libkvx.so shows kvx_* and nothing else, under the soname of the ABI's major version.
set -euo pipefail
library=$1

symbols=$(nm -D --defined-only "$library" | awk '$2 != "A" { print $3 }' | sed 's/@.*//')
if [[ -z $symbols ]]; then
  echo "$library exports nothing; expected kvx_get_version at least" >&2
  exit 1
fi
if foreign=$(grep -v '^kvx_' <<<"$symbols"); then
  printf '%s exports symbols that are no part of the C ABI:\n%s\n' "$library" "$foreign" >&2
  exit 1
fi
if ! grep -qx kvx_get_version <<<"$symbols"; then
  echo "$library does not export kvx_get_version" >&2
  exit 1
fi

soname=$(objdump -p "$library" | awk '$1 == "SONAME" { print $2 }')
if [[ $soname != libkvx.so.1 ]]; then
  echo "soname is $soname; expected libkvx.so.1" >&2
  exit 1
fi
echo "$(wc -l <<<"$symbols") symbols, all kvx_*, soname $soname"
