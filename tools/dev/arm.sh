# ./dev test --arm: the unit tests of a build for 64-bit Arm, under qemu-user.

ARM_PACKAGE_LIST=$ROOT/tools/packages.arm64
ARM_ROOT=build/arm64-root

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
  run_tests arm -R "^($names)(\.even|\.odd)?\$|^level_objects\$"
}
