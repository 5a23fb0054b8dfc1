#!/usr/bin/env bash
# Builds and runs the installed examples; licence and documentation lie beside them.
# shellcheck source=tests/install/installed.sh
source "$(dirname "${BASH_SOURCE[0]}")/installed.sh"

for file in README.md LICENSE CHANGELOG.md docs/abi.md docs/versioning.md docs/quickstart.md; do
  [[ -s $docs/$file ]] || fail "share/doc/kvx/$file is not installed"
done

cp -r "$prefix/share/kvx/examples" examples
"$cmake" -S examples -B build -G Ninja -DCMAKE_PREFIX_PATH="$prefix" >configure.log 2>&1 ||
  fail "$(cat configure.log)"
"$cmake" --build build >build.log 2>&1 || fail "$(cat build.log)"

num_run=0
for example in build/{quantized_pages,owned_cache}_*; do
  [[ -f $example ]] || fail "no example was built"
  status=0
  "$example" || status=$?
  if [[ $example == *_cu && $status == 77 ]]; then
    echo "${example#build/}: skipped, no GPU"
    continue
  fi
  [[ $status == 0 ]] || fail "${example#build/} ended with $status"
  num_run=$((num_run + 1))
done
[[ $num_run -ge 4 ]] || fail "$num_run examples ran; expected two in C and two in C++"
echo "$num_run installed examples ran"
