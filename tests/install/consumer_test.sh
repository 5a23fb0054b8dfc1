#!/usr/bin/env bash
# Installs the library into an empty folder and builds consumers against it, far from the tree.
set -euo pipefail
build_dir=$1 cmake=$2

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
prefix=$work/prefix
"$cmake" --install "$build_dir" --component kvx --prefix "$prefix" >/dev/null

mkdir "$work/consumer"
cd "$work/consumer"
cat >consumer.c <<'END'
#include <kvx/kvx_abi.h>
#include <stdio.h>
static kvx_version_t v = {sizeof v, 0, 0, 0};
int main(void) { return kvx_get_version(&v) || printf("%u.%u\n", v.abi_major, v.abi_minor) < 0; }
END
cp consumer.c consumer.cpp
cat >CMakeLists.txt <<'END'
cmake_minimum_required(VERSION 3.25)
project(consumer C CXX)
find_package(kvx 0.1 REQUIRED)
add_executable(from_c consumer.c)
add_executable(from_cpp consumer.cpp)
target_link_libraries(from_c kvx::kvx)
target_link_libraries(from_cpp kvx::kvx)
END

major=$(awk '$2 == "KVX_ABI_VERSION_MAJOR" { print $3 }' "$prefix/include/kvx/kvx_abi.h")
minor=$(awk '$2 == "KVX_ABI_VERSION_MINOR" { print $3 }' "$prefix/include/kvx/kvx_abi.h")

expect_version() {
  local got
  got=$("$@")
  if [[ $got != "$major.$minor" ]]; then
    echo "$* printed '$got'; expected '$major.$minor' as in the installed header" >&2
    exit 1
  fi
}

"$cmake" -S . -B with_cmake -G Ninja -DCMAKE_PREFIX_PATH="$prefix" >/dev/null
"$cmake" --build with_cmake >/dev/null
expect_version with_cmake/from_c
expect_version with_cmake/from_cpp

pkgconfig=$(dirname "$(find "$prefix" -name kvx.pc)")
flags=$(PKG_CONFIG_PATH=$pkgconfig pkg-config --cflags --libs kvx)
# shellcheck disable=SC2086 # the flags are words
cc consumer.c $flags -o pc_c
# shellcheck disable=SC2086
c++ consumer.cpp $flags -o pc_cpp
libdir=$(dirname "$pkgconfig")
expect_version env LD_LIBRARY_PATH="$libdir" ./pc_c
expect_version env LD_LIBRARY_PATH="$libdir" ./pc_cpp
echo "kvx $major.$minor found by CMake and by pkg-config, from C and from C++"
