#!/usr/bin/env bash
# Builds consumers in C and C++ against an installed kvx, and asks for its version in all ways.
# shellcheck source=tests/install/installed.sh
source "$(dirname "${BASH_SOURCE[0]}")/installed.sh"

cat >consumer.c <<'EOF'
#include <kvx/kvx_abi.h>
#include <stdio.h>
static kvx_version_t v = {sizeof v, 0, 0, 0};
int main(void) {
  return kvx_get_version(&v) || printf("%u.%u.%u\n", v.abi_major, v.abi_minor, v.abi_patch) < 0;
}
EOF
cat >consumer.cpp <<'EOF'
#include <kvx/kvx.hpp>
int main() {
  const kvx_version_t v = kvx::version().value();
  return std::printf("%u.%u.%u\n", v.abi_major, v.abi_minor, v.abi_patch) < 0;
}
EOF
cat >CMakeLists.txt <<'EOF'
cmake_minimum_required(VERSION 3.22)
project(consumer C CXX)
set(CMAKE_CXX_STANDARD ${STANDARD})
find_package(kvx ${ASKED} REQUIRED)
add_executable(from_c consumer.c)
add_executable(from_cpp consumer.cpp)
target_link_libraries(from_c kvx::kvx)
target_link_libraries(from_cpp kvx::kvx)
EOF

part() { awk -v name="KVX_ABI_VERSION_$1" '$2 == name { print $3 }' "$prefix/include/kvx/kvx_abi.h"; }
major=$(part MAJOR) minor=$(part MINOR) version=$(part MAJOR).$(part MINOR).$(part PATCH)

expect_version() {
  local got
  got=$("$@")
  [[ $got == "$version" ]] || fail "$* printed '$got'; expected '$version' as in the installed header"
}

# configure ASKED STANDARD FOLDER
configure() {
  "$cmake" -S . -B "$3" -G Ninja -DCMAKE_PREFIX_PATH="$prefix" -DASKED="$1" -DSTANDARD="$2" \
    >configure.log 2>&1
}

for standard in 17 20; do
  configure "$major.$minor" "$standard" "cmake_$standard" || fail "$(cat configure.log)"
  "$cmake" --build "cmake_$standard" >build.log || fail "$(cat build.log)"
  expect_version "cmake_$standard/from_c"
  expect_version "cmake_$standard/from_cpp"
done

# Without a standard of the consumer's own the package asks for the one that it needs.
sed -i '/CMAKE_CXX_STANDARD/d' CMakeLists.txt
configure "" "" own_standard || fail "$(cat configure.log)"
"$cmake" --build own_standard >build.log || fail "$(cat build.log)"

# Which versions a consumer may ask for; no language is needed for that.
mkdir asks
cat >asks/CMakeLists.txt <<'EOF'
cmake_minimum_required(VERSION 3.22)
project(asks NONE)
find_package(kvx ${ASKED} REQUIRED)
EOF
asks_for() {
  "$cmake" -S asks -B "asks/$1" -DCMAKE_PREFIX_PATH="$prefix" -DASKED="$1" >asks.log 2>&1
}
for asked in "$major" "$major.0" "$major.$minor" "$version"; do
  asks_for "$asked" || fail "find_package(kvx $asked): $(cat asks.log)"
done
for refused in 0.1 "$major.$((minor + 1))" "$((major + 1))"; do
  if asks_for "$refused"; then
    fail "find_package(kvx $refused) accepts version $version"
  fi
  grep -q "considered but not accepted" asks.log ||
    fail "find_package(kvx $refused) fails for another reason: $(cat asks.log)"
done
grep -q "cxx_std_17" -r "$prefix/lib"*/cmake "$prefix"/lib/*/cmake 2>/dev/null ||
  fail "the exported target does not ask for C++17"

# A compiler before C++17 gets one clear sentence.
if c++ -std=c++14 -fsyntax-only -I"$prefix/include" consumer.cpp 2>c++14.log; then
  fail "kvx.hpp compiles as C++14"
fi
grep -q "needs C++17" c++14.log || fail "kvx.hpp does not say what it needs: $(head -3 c++14.log)"

[[ $(with_pkg_config --modversion kvx) == "$version" ]] || fail "kvx.pc has another version"
with_pkg_config --exists "kvx >= $major.$minor" || fail "pkg-config refuses kvx >= $major.$minor"
flags=$(with_pkg_config --cflags --libs kvx)
# shellcheck disable=SC2086 # the flags are words
cc consumer.c $flags -o pc_c
# shellcheck disable=SC2086
c++ -std=c++17 consumer.cpp $flags -o pc_cpp
expect_version with_library ./pc_c
expect_version with_library ./pc_cpp

soname=$(objdump -p "$libdir/libkvx.so" | awk '$1 == "SONAME" { print $2 }')
[[ $soname == "libkvx.so.$major" ]] || fail "the soname is $soname; expected libkvx.so.$major"
[[ -f $libdir/libkvx.so.$version ]] || fail "libkvx.so.$version is not installed"
echo "kvx $version found by CMake and by pkg-config, from C and from C++"
