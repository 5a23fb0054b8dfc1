# ./dev test --windows: whether MinGW's compiler takes the library's sources, and the tests of the
# system's calls under Wine. The library is not linked: Debian has neither zstd nor OpenSSL for
# Windows.

WINDOWS_PACKAGE_LIST=$ROOT/tools/packages.windows
WINDOWS_COMPILER=x86_64-w64-mingw32-g++-posix
WINDOWS_FOLDER=build/windows

# Headers of Debian's libraries that are the same for every system, and no others.
link_windows_headers() {
  local headers=$WINDOWS_FOLDER/include name
  rm -rf "$headers"
  mkdir -p "$headers/openssl"
  for name in fmt hiredis nlohmann zstd.h zstd_errors.h xxhash.h xxh_x86dispatch.h; do
    ln -s "/usr/include/$name" "$headers/$name"
  done
  for name in /usr/include/openssl/* /usr/include/x86_64-linux-gnu/openssl/*; do
    ln -s "$name" "$headers/openssl/${name##*/}"
  done
}

# The sources of a build without CUDA.
windows_sources() {
  find src -name '*.cpp' | grep -vE '/posix\.cpp$|/isa/(neon|dotprod)/|/device/cuda(_async)?\.cpp$' |
    grep -vE '/attend/(attend_cuda|cuda/[a-z_/]+)\.cpp$' | sort
}

# The flags of cmake/cpu_levels.cmake for a level's source.
windows_level_flags() {
  local avx512='-mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni -mavx512vbmi -mgfni -mfma -mf16c'
  case $1 in
    */isa/avx2/*) echo -mavx2 -mfma -mf16c ;;
    */isa/avxvnni/*) echo -mavx2 -mfma -mf16c -mavxvnni ;;
    */isa/avx512/*) echo "$avx512" ;;
    */isa/avx512amx/*) echo "$avx512" -mavx512bf16 -mamx-tile -mamx-bf16 ;;
  esac
}

# parse_for_windows SOURCE: prints the source's name if the compiler refuses it; its messages are in
# build/windows.
parse_for_windows() {
  local flags log=$WINDOWS_FOLDER/${1//\//.}.log
  flags=$(windows_level_flags "$1")
  # shellcheck disable=SC2086
  if "$WINDOWS_COMPILER" -std=c++20 -fsyntax-only -ffp-contract=off -Wall -Wextra -Werror \
    -Wno-maybe-uninitialized -Wno-uninitialized -DFMT_HEADER_ONLY \
    -DKVX_CPU_LEVELS='"scalar avx2"' -DKVX_HAS_LEVEL_AVX2 $flags -Isrc -Iinclude -I. \
    -isystem "$WINDOWS_FOLDER/include" "$1" >"$log" 2>&1; then
    rm -f "$log"
  else
    echo "$1"
  fi
}

# tests/core and what it tests, as a program of Windows.
run_windows_tests() {
  local googletest=/usr/src/googletest/googletest program=$WINDOWS_FOLDER/core_test.exe
  step "Running tests/core under Wine"
  "$WINDOWS_COMPILER" -std=c++20 -O1 -DFMT_HEADER_ONLY -Isrc -I. -isystem "$WINDOWS_FOLDER/include" \
    -isystem "$googletest/include" -I"$googletest" tests/core/*.cpp src/core/os/windows.cpp \
    src/core/log.cpp "$googletest/src/gtest-all.cc" "$googletest/src/gtest_main.cc" -static \
    -lws2_32 -o "$program" || fail "MinGW's compiler does not build tests/core"
  WINEPREFIX=$ROOT/$WINDOWS_FOLDER/wine WINEDEBUG=-all /usr/lib/wine/wine64 "$program" --gtest_brief=1
}

# test_windows [REGEX]: sources whose path matches.
test_windows() {
  ensure_packages
  ensure_packages "$WINDOWS_PACKAGE_LIST"
  link_windows_headers
  rm -f "$WINDOWS_FOLDER"/*.log
  local sources refused
  mapfile -t sources < <(windows_sources | grep -E "${1:-.}")
  ((${#sources[@]} > 0)) || fail "no source matches '$1'"
  step "Parsing ${#sources[@]} sources with MinGW's compiler"
  export WINDOWS_COMPILER WINDOWS_FOLDER
  export -f parse_for_windows windows_level_flags
  mapfile -t refused < <(printf '%s\n' "${sources[@]}" |
    xargs -P "$(nproc)" -I{} bash -c 'parse_for_windows {}' | sort)
  local source
  for source in ${refused[@]+"${refused[@]}"}; do
    echo "$source"
    grep -m 3 -E 'error|warning' "$WINDOWS_FOLDER/${source//\//.}.log" || true
  done
  [[ -n ${1:-} ]] || run_windows_tests || refused+=(tests/core)
  echo "$((${#sources[@]} - ${#refused[@]})) passed, ${#refused[@]} failed"
  ((${#refused[@]} == 0))
}
