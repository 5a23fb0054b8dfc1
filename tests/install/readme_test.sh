#!/usr/bin/env bash
# Compiles and runs the blocks of the installed README.md against the installed tree: C++, C, Python.
# Those of transformers and vLLM run in tests/hf and tests/vllm.
# shellcheck source=tests/install/installed.sh
source "$(dirname "${BASH_SOURCE[0]}")/installed.sh"

# blocks LANGUAGE: the fenced blocks of that language, joined.
blocks() {
  awk -v fence="\`\`\`$1" '
    $0 == fence { inside = 1; next }
    /^```/ { inside = 0 }
    inside { print }' "$docs/README.md"
}

for language in cpp c python; do
  blocks "$language" >"block.$language"
  [[ -s block.$language ]] || fail "README.md has no block of $language"
done

flags=$(with_pkg_config --cflags --libs kvx)
# The block is what stands in a function; q, k, v and out are the model's, 40 tokens in all blocks.
{
  grep '^#include' block.cpp
  cat <<'EOF'
#include <vector>
int main() {
  std::vector<float> q(40 * 8 * 64), k(40 * 2 * 64), v(40 * 2 * 64, 2.0f), out(q.size());
EOF
  grep -v '^#include' block.cpp
  echo '  return out[0] > 1.9f && out[0] < 2.1f ? 0 : 1; }'
} >block_cpp.cpp
{
  grep '^#include' block.c
  cat <<'EOF'
static float q[40 * 8 * 64], k[40 * 2 * 64], v[40 * 2 * 64], out[40 * 8 * 64];
int main(void) {
  for (int i = 0; i < 40 * 2 * 64; ++i) v[i] = 2.0f;
EOF
  grep -v '^#include' block.c
  echo '  return out[0] > 1.9f && out[0] < 2.1f ? 0 : 1; }'
} >block_c.c
# shellcheck disable=SC2086 # the flags are words
c++ -std=c++17 -Wall -Wextra -Werror block_cpp.cpp $flags -o block_cpp
# shellcheck disable=SC2086
cc -std=c99 -Wall -Wextra -Werror block_c.c $flags -o block_c
with_library ./block_cpp || fail "the C++ block of README.md gives a wrong output"
with_library ./block_c || fail "the C block of README.md gives a wrong output"

if [[ -z $python ]]; then
  echo "README.md: C++ and C ran; this build has no Python module"
  exit 0
fi
mkdir site
cp -rL "$build_dir/python/kvx" site/kvx
{
  echo 'import numpy as np'
  echo 'q, k, v = np.zeros((40, 8, 64)), np.zeros((40, 2, 64)), np.full((40, 2, 64), 2.0)'
  echo 'q, k, v = (x.astype(np.float32) for x in (q, k, v))'
  cat block.python
  echo 'assert kvx.__file__.startswith("'"$PWD"'"), kvx.__file__'
  echo 'assert abs(float(out[0, 0, 0]) - 2) < 0.1, out[0, 0, 0]'
} >block.py
PYTHONPATH=$PWD/site PYTHONDONTWRITEBYTECODE=1 "$python" block.py ||
  fail "the Python block of README.md fails"
echo "README.md: C++, C and Python ran against the installed tree"
