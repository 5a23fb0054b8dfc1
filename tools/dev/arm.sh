# ./dev test --arm and ./dev wheel --arm: the unit tests of a build for 64-bit Arm, under qemu-user,
# and a wheel.

ARM_PACKAGE_LIST=$ROOT/tools/packages.arm64
ARM_ROOT=build/arm64-root
ARM_LIBRARIES=/usr/aarch64-linux-gnu/lib  # of the compiler: C and C++

# Test binaries that run under an emulator; the others start programs, load models or ask a GPU.
ARM_TESTS=(core_test device_test format_test cache_test ops_test kv_test engines_test quality_test
  tune_test api_test)

# The libraries of tools/packages.arm64, unpacked. They come by an apt of their own, which knows no
# other architecture, so that this system gets no foreign packages.
ensure_arm_root() {
  local key
  key=$(sha256sum <"$ARM_PACKAGE_LIST")
  [[ ! -f $ARM_ROOT/list || $(<"$ARM_ROOT/list") != "$key" ]] || return 0
  local names=() versions=() line
  while IFS= read -r line; do
    [[ $line == *:arm64=* ]] || continue
    names+=("${line%%:*}")
    versions+=("${line#*=}")
  done <"$ARM_PACKAGE_LIST"

  step "Unpacking ${#names[@]} Debian packages for 64-bit Arm into $ARM_ROOT"
  local apt=$ROOT/$ARM_ROOT/apt i version
  rm -rf "$ARM_ROOT"
  mkdir -p "$apt/state/lists/partial" "$apt/cache/archives/partial" "$apt/packages"
  : >"$apt/status"
  local options=(-o APT::Architecture=arm64 -o APT::Architectures=arm64 -o "Dir::State=$apt/state"
    -o "Dir::State::status=$apt/status" -o "Dir::Cache=$apt/cache" -o APT::Sandbox::User=root)
  apt-get "${options[@]}" update -qq >"$apt/log" 2>&1 || cat "$apt/log" >&2
  for i in "${!names[@]}"; do
    version=$(apt-cache "${options[@]}" policy "${names[i]}" | awk '/Candidate:/ { print $2 }')
    [[ -n $version && $version != "(none)" ]] ||
      fail "no package ${names[i]} for arm64 in this machine's archives (no network?)"
    check_version "${names[i]}:arm64" "$version" "${versions[i]}" "offered by the archive"
  done
  (cd "$apt/packages" && apt-get "${options[@]}" download "${names[@]}") >>"$apt/log" 2>&1 ||
    fail "apt-get could not download the packages for arm64 (no network?); see $apt/log"
  for i in "$apt"/packages/*.deb; do dpkg-deb -x "$i" "$ARM_ROOT"; done
  rm -rf "$apt"
  echo "$key" >"$ARM_ROOT/list"
  did "unpacked ${#names[@]} Debian packages for 64-bit Arm"
}

ensure_arm_packages() {
  ensure_packages "$ARM_PACKAGE_LIST"
  ensure_arm_root
}

# test_arm [REGEX]: test binaries whose name matches.
test_arm() {
  ensure_packages
  ensure_arm_packages
  local wanted=() name
  for name in "${ARM_TESTS[@]}"; do
    [[ ! $name =~ ${1:-} ]] || wanted+=("$name")
  done
  ((${#wanted[@]} > 0)) || fail "no test binary for Arm matches '$1'; there are ${ARM_TESTS[*]}"
  build_preset arm "${wanted[@]}"
  summary
  local names
  names=$(IFS='|' && echo "${wanted[*]}")
  run_tests arm -R "^($names)\.[0-9]+\$|^level_objects\$"
}

# What tests/python needs of tests/python/requirements.txt here, and those of its files that start no
# programs: a program cannot be started under qemu-user by another.
ARM_PYTHON_PACKAGES='contourpy|cycler|fonttools|hypothesis|iniconfig|kiwisolver|matplotlib|numpy|'
ARM_PYTHON_PACKAGES+='packaging|pillow|pluggy|Pygments|pyparsing|pytest|python-dateutil|sortedcontainers'
ARM_PYTHON_TESTS=(rows blocks cache cache_refusals steps golden latent speculation paged_layer
  paged_dual paged_window files wording)
ARM_PYTHON_TESTS=("${ARM_PYTHON_TESTS[@]/%/.py}")

# wheel_arm [yes]: a wheel without CUDA for 64-bit Arm and Debian's Python, and whether it works.
wheel_arm() {
  local tests=${1:-} python=$DEBIANS_PYTHON env folder
  ensure_arm_packages
  ensure_python_env "$WHEEL_REQUIREMENTS"
  env=$(python_env "$WHEEL_REQUIREMENTS")
  folder=$ROOT/$ARM_ROOT/usr/lib/aarch64-linux-gnu
  WHEEL_OUT=build/wheel-arm
  rm -rf "$WHEEL_OUT"
  mkdir -p "$WHEEL_OUT"
  use_ccache
  step "Building a wheel for 64-bit Arm"
  # The emulated interpreter says what its modules are called and writes the stub of kvx._core.
  PYTHONPATH=$(echo "$env"/lib/python3*/site-packages) _PYTHON_HOST_PLATFORM=linux-aarch64 \
    SETUPTOOLS_EXT_SUFFIX=.cpython-311-aarch64-linux-gnu.so \
    build_distribution "$python" --wheel -C 'build-dir=build/{wheel_tag}' \
    -C cmake.toolchain-file=cmake/toolchains/aarch64-linux-gnu.cmake -C cmake.python-hints=false \
    -C "cmake.define.Python_EXECUTABLE=$ROOT/tools/dev/python_arm64.sh" \
    -C "cmake.define.Python_INCLUDE_DIR=$ROOT/$ARM_ROOT/usr/include/python3.11" \
    -C cmake.define.KVX_OBSERVE=OFF -C cmake.define.KVX_TRANSFER=OFF
  repair_wheel "$python" --ldpaths "$folder:$ROOT/$ARM_ROOT/lib/aarch64-linux-gnu:$ARM_LIBRARIES"
  [[ -z $tests ]] || test_wheel_arm "$python"
  summary
}

# The wheel, installed beside NumPy for Arm: its tool, a C program against its library, its tests.
test_wheel_arm() {
  local site=$WHEEL_OUT/site wheel platform
  wheel=$(echo "$WHEEL_OUT"/*.whl)
  platform=${wheel##*-}
  step "Testing $wheel under qemu-user"
  mkdir -p "$site"
  grep -E "^($ARM_PYTHON_PACKAGES)==" "$TEST_REQUIREMENTS" >"$WHEEL_OUT/requirements.txt"
  "$(python_env "$WHEEL_REQUIREMENTS")/bin/python" -m pip --disable-pip-version-check install \
    --quiet --no-deps --target "$site" --only-binary=:all: --implementation cp \
    --python-version 3.11 --platform "${platform%.whl}" --platform manylinux_2_28_aarch64 \
    --platform manylinux_2_27_aarch64 --platform manylinux2014_aarch64 \
    -r "$WHEEL_OUT/requirements.txt" "$wheel" || fail "the wheel cannot be installed"
  tools/dev/run_arm64.sh "$site/kvx/bin/kvx" info >"$WHEEL_OUT/info.txt" ||
    fail "the wheel's tool does not run"
  did "kvx info: $(grep -i -m1 level "$WHEEL_OUT/info.txt")"
  export PYTHONPATH=$ROOT/$site PYTHONDONTWRITEBYTECODE=1
  write_client "$WHEEL_OUT/client.c"
  # shellcheck disable=SC2046 # the flags are words
  aarch64-linux-gnu-gcc "$WHEEL_OUT/client.c" -o "$WHEEL_OUT/client" \
    $(tools/dev/python_arm64.sh -m kvx.config --cflags --libs) &&
    [[ $(tools/dev/run_arm64.sh "$WHEEL_OUT/client") == \
      "$(tools/dev/python_arm64.sh -m kvx.config --version)" ]] ||
    fail "a C program cannot use the library that the wheel holds"
  PYTHONPATH+=:$ROOT/tests/python MPLBACKEND=Agg tools/dev/python_arm64.sh -c \
    'from pages import run_blocks; assert run_blocks("docs/python.md") >= 5' ||
    fail "the blocks of docs/python.md do not run"
  tools/dev/python_arm64.sh -m pytest -q -p no:cacheprovider \
    "${ARM_PYTHON_TESTS[@]/#/tests/python/test_}" || fail "the tests fail on the installed wheel"
  did "${#ARM_PYTHON_TESTS[@]} files of tests/python pass on 64-bit Arm's $(tools/dev/python_arm64.sh -V)"
}
