# ./dev test --windows and --macos: the library, the conformance kit and the examples, built for
# another system by PyPI's ziglang. Windows' programs run under Wine; nothing runs macOS' here.

CROSS_PACKAGE_LIST=$ROOT/tools/packages.cross
CROSS_FOLDER=$ROOT/build/cross
ZIG_REQUIREMENTS=tools/dev/requirements-zig.txt

# What zig calls a system, and what OpenSSL does.
zig_target() { if [[ $1 == windows ]]; then echo x86_64-windows-gnu; else echo aarch64-macos; fi; }
openssl_target() { if [[ $1 == windows ]]; then echo mingw64; else echo darwin64-arm64-cc; fi; }

# Compilers and binutils of a system, in build/cross/<system>/bin, as programs: that is what CMake
# and OpenSSL's Configure take. zig's own checks of undefined behaviour would need a run time.
make_cross_compilers() {
  local system=$1 bin=$CROSS_FOLDER/$1/bin zig pair
  ensure_python_env "$ZIG_REQUIREMENTS"
  zig=$(echo "$(python_env "$ZIG_REQUIREMENTS")"/lib/python3*/site-packages/ziglang/zig)
  mkdir -p "$bin"
  for pair in clang=cc clang++=c++; do
    write_program "$bin/${pair%%=*}" "$zig ${pair#*=} -target $(zig_target "$system")" \
      '-fno-sanitize=undefined -Wno-unused-command-line-argument'
  done
  for pair in ar ranlib rc; do write_program "$bin/$pair" "$zig $pair"; done
}

# A program that is there stays as it is, and so does what ccache has of it.
write_program() {
  local file=$1 text
  shift
  text=$(printf '#!/bin/sh\nexec %s "$@"' "$*")
  [[ -f $file && $(<"$file") == "$text" ]] || echo "$text" >"$file"
  chmod +x "$file"
}

# The sources that tools/packages.cross names, in build/cross/sources: from the release's own
# archive, which keeps its files, by an apt of their own.
ensure_cross_sources() {
  local key sources=$CROSS_FOLDER/sources line
  key=$(sha256sum <"$CROSS_PACKAGE_LIST")
  [[ ! -f $sources/list || $(<"$sources/list") != "$key" ]] || return 0
  step "Downloading the sources of Debian's libraries"
  local apt=$CROSS_FOLDER/apt
  rm -rf "$sources" "$apt"
  mkdir -p "$sources" "$apt/state/lists/partial" "$apt/cache/archives/partial"
  : >"$apt/status"
  apt-get indextargets 'Created-By: Packages' \
    --format 'deb-src $(REPO_URI) $(RELEASE) $(COMPONENT)' | sort -u |
    grep -vE ' [a-z]+-[a-z]+ ' >"$apt/sources.list"
  local options=(-o "Dir::State=$apt/state" -o "Dir::State::status=$apt/status"
    -o "Dir::Cache=$apt/cache" -o "Dir::Etc::sourcelist=$apt/sources.list"
    -o Dir::Etc::sourceparts=/nonexistent -o APT::Sandbox::User=root)
  apt-get "${options[@]}" update -qq >"$apt/log" 2>&1 || cat "$apt/log" >&2
  while IFS= read -r line; do
    [[ $line != *:source=* ]] || download_source "${line%%:*}" "${line#*=}"
  done <"$CROSS_PACKAGE_LIST"
  rm -rf "$apt"
  echo "$key" >"$sources/list"
  did "downloaded the sources of Debian's libraries"
}

# The original archive of a package, unpacked: sources/<name>. Of ensure_cross_sources alone.
download_source() {
  local name=$1 uri file hash
  # A line: 'http://...' name.orig.tar.gz 171552 SHA256:...
  read -r uri file _ hash < <(apt-get "${options[@]}" source --print-uris --only-source "$name" \
    2>>"$apt/log" | grep -E '\.orig\.tar\.[a-z0-9]+ ' | tr -d "'") ||
    fail "no source of $name in this machine's archives (no network?); see $apt/log"
  file=${file##*_}
  check_version "$name:source" "${file%%.orig*}-1" "$2" "offered by the archive"
  /usr/lib/apt/apt-helper -o APT::Sandbox::User=root download-file "$uri" "$sources/$name.tar" \
    "$hash" >>"$apt/log" 2>&1 || fail "cannot download $uri (no network?); see $apt/log"
  mkdir "$sources/$name"
  tar -xf "$sources/$name.tar" --strip-components=1 -C "$sources/$name"
  rm "$sources/$name.tar"
}

# The libraries of a system, static, in build/cross/<system>/root. Compiled anew where what they are
# made of or how has changed.
ensure_cross_root() {
  local system=$1 key root=$CROSS_FOLDER/$1/root log=$CROSS_FOLDER/$1/libraries.log name
  ensure_packages "$CROSS_PACKAGE_LIST"
  make_cross_compilers "$system"
  ensure_cross_sources
  key=$({
    cat "$CROSS_PACKAGE_LIST" cmake/cross_libraries/CMakeLists.txt cmake/toolchains/zig.cmake \
      "$CROSS_FOLDER/$system/bin/clang"
    declare -f build_cross_libraries build_openssl
  } | sha256sum)
  [[ ! -f $root/list || $(<"$root/list") != "$key" ]] || return 0
  step "Compiling OpenSSL, fmt, hiredis, xxHash and zstd for $system"
  rm -rf "$root"
  mkdir -p "$root/include" "$root/share/cmake"
  for name in CLI nlohmann; do cp -r "/usr/include/$name" "$root/include"; done
  for name in CLI11 nlohmann_json; do cp -r "/usr/share/cmake/$name" "$root/share/cmake"; done
  if ! { build_cross_libraries "$system" && build_openssl "$system"; } >"$log" 2>&1; then
    tail -n 20 "$log" >&2
    fail "the libraries for $system cannot be compiled; see $log"
  fi
  echo "$key" >"$root/list"
  did "compiled the libraries for $system"
}

build_cross_libraries() {
  local system=$1 build=$CROSS_FOLDER/$1/libraries tests=OFF
  [[ $system == macos ]] || tests=ON
  rm -rf "$build"
  cmake -G Ninja -S cmake/cross_libraries -B "$build" -DCMAKE_BUILD_TYPE=Release \
    -DCMAKE_TOOLCHAIN_FILE="$ROOT/cmake/toolchains/zig.cmake" -DKVX_SYSTEM="$system" \
    -DBUILD_TESTING="$tests" -DKVX_SOURCES="$CROSS_FOLDER/sources" \
    -DCMAKE_INSTALL_PREFIX="$CROSS_FOLDER/$system/root" &&
    cmake --build "$build" --target install
}

# What kvx calls: TLS, SHA-256, AES-GCM. Without assembler code, for nothing here measures time.
build_openssl() {
  local system=$1 bin=$CROSS_FOLDER/$1/bin build=$CROSS_FOLDER/$1/openssl
  rm -rf "$build"
  mkdir -p "$build"
  (cd "$build" &&
    CC=$bin/clang AR=$bin/ar RANLIB=$bin/ranlib RC=$bin/rc CFLAGS="-O2 -fvisibility=hidden" \
      "$CROSS_FOLDER/sources/openssl/Configure" "$(openssl_target "$system")" no-shared no-tests \
      no-asm no-engine no-legacy no-cms no-cmp no-ts no-srp no-aria no-camellia no-seed no-sm2 \
      no-sm3 no-sm4 no-idea no-bf no-cast no-mdc2 no-rc2 no-rc4 no-md4 no-whirlpool no-gost \
      --prefix="$CROSS_FOLDER/$system/root" --libdir=lib &&
    make -j"$(nproc)" build_libs && make install_dev)
}

build_cross() {
  ensure_packages
  ensure_cross_root "$1"
  build_preset "$1"
}

# The names that a library shows must be those of the C ABI. zig's linker does not read the list of
# names that Apple's linker takes (cmake/libkvx.exports): macOS' library shows two of the linker's,
# and the C++ library's operators new and delete, which are weak.
check_exports() {
  local library=$1 wanted shown
  wanted=$(grep -oE "<elf-symbol name='[^']+" abi/libkvx.abi | cut -d"'" -f2 | sort)
  if [[ $library == *.dll ]]; then
    shown=$(llvm-readobj-14 --coff-exports "$library" |
      awk '$1 == "Name:" && $2 { print $2 }' | sort)
  else
    shown=$(llvm-nm-14 --extern-only --defined-only --format=just-symbols "$library" |
      grep -vxE '__mh_dylib_header|___dso_handle|__Z(n[aw]|d[al])[A-Za-z0-9_]+' | sed 's/^_//' | sort)
  fi
  [[ $shown == "$wanted" ]] || {
    diff <(echo "$wanted") <(echo "$shown") | head -n 20 >&2
    fail "$library shows other names than the C ABI's"
  }
  did "$library shows the $(wc -l <<<"$wanted") names of the C ABI"
}

# test_windows [REGEX]: kvx.dll under the conformance kit, the examples on it, and tests/core;
# or those of them whose name matches.
test_windows() {
  build_cross windows
  check_exports build/windows/bin/kvx.dll
  tools/dev/run_windows.sh wineboot --init >build/windows/wine.log 2>&1 ||
    fail "Wine does not start; see build/windows/wine.log"
  summary
  run_tests windows ${1:+-R "$1"}
}

# Nothing runs a program of macOS here.
test_macos() {
  local library=build/macos/src/libkvx.dylib id
  build_cross macos
  check_exports $library
  id=$(llvm-objdump-14 --macho --dylib-id $library | tail -n 1)
  [[ $id == @rpath/libkvx.1.dylib ]] ||
    fail "$library calls itself '$id', expected @rpath/libkvx.1.dylib"
  summary
}
