# ./dev test: builds a preset and runs its tests on the real model.

help_test() {
  cat <<'END'
Builds and runs the tests; what they need is installed and downloaded first.

usage: ./dev test [--preset P] [--full] [-R REGEX] [-L LABEL]
       ./dev test --arm [REGEX]
       ./dev test --windows [REGEX] | --macos
       ./dev test --hf | --vllm | --lmdeploy | --torch | --mooncake | --oldest |
                  --python-asan

  --preset P  dev (default), asan or tsan
  --full      also the exhaustive sweeps, which take minutes (KVX_TEST_FULL=1)
  -R REGEX    only test binaries whose name matches
  -L LABEL    only test binaries with this label (threaded, gpu)
  --arm       only the unit tests, or those whose binary's name matches, built for 64-bit Arm and
              run under qemu-user on the processor that KVX_ARM_CPU names (default max,sve=off): the
              cross compiler, the emulator and Arm's libraries are fetched first, 250 MB
  --windows   only kvx.dll and the conformance kit, the examples and tests/core, or those whose
              name matches, built by ziglang and run under Wine (docs/windows.md): 100 MB of
              compilers from PyPI, and sources of libraries
  --macos     only libkvx.dylib, the conformance kit, the tool and the examples, likewise built,
              and not run
  --hf        only the transformers suite (tests/hf), in an environment of its own: 3.3 GB of
              downloads at the first run, 5 GB on the disk
  --vllm      only the vLLM suite (tests/vllm), likewise: 3.7 GB and 6.2 GB
  --lmdeploy  only the suite of LMDeploy's PyTorch engine (tests/lmdeploy), likewise: 3.4 GB
              and 5.4 GB
  --torch     only PyTorch's operators (tests/torch), in the environment of --vllm
  --mooncake  only the tests of Mooncake and NIXL (tests/mooncake), likewise: 115 and 390 MB
  --oldest    the Python package's suite and transformers' on the oldest versions that are
              supported (docs/python-support.md), in environments of their own: 6 GB
  --python-asan  only the Python package's suite (tests/python), on a module with
              AddressSanitizer and UndefinedBehaviorSanitizer

example: ./dev test -R cache
END
}

cmd_test() {
  local preset=dev ctest_options=() targets=()
  while (($# > 0)); do
    case $1 in
      --full) export KVX_TEST_FULL=1 ;;
      --hf | --vllm | --lmdeploy | --torch | --mooncake | --oldest | --python-asan)
        (($# == 1)) || bad_usage test "$1 stands alone"
        local suite=${1#--}
        "test_${suite//-/_}"
        return
        ;;
      --arm)
        (($# <= 2)) || bad_usage test "--arm takes at most one name"
        test_arm "${2:-}"
        return
        ;;
      --macos)
        (($# == 1)) || bad_usage test "--macos stands alone"
        test_macos
        return
        ;;
      --windows)
        (($# <= 2)) || bad_usage test "--windows takes at most one pattern"
        test_windows "${2:-}"
        return
        ;;
      --preset | -R | -L)
        (($# > 1)) || bad_usage test "$1 needs a value"
        if [[ $1 == --preset ]]; then preset=$2; else ctest_options+=("$1" "$2"); fi
        if [[ $1 == -L ]]; then targets+=("tests_$2"); fi
        shift
        ;;
      *) bad_usage test "unknown option '$1'" ;;
    esac
    shift
  done
  [[ $preset =~ ^(dev|asan|tsan)$ ]] || bad_usage test "unknown preset '$preset'"

  ensure_packages
  ensure_model
  ensure_text
  [[ $preset != dev ]] || configure_python dev
  build_preset "$preset" ${targets[@]+"${targets[@]}"}
  summary
  echo
  run_tests "$preset" ${ctest_options[@]+"${ctest_options[@]}"}
}

# Runs ctest on a built preset, counts the cases in its binaries, ends with ctest's own last lines.
run_tests() {
  local preset=$1
  shift
  KVX_TEST_MODEL=$(model_path)
  KVX_TEST_TEXT=$(text_path)
  export KVX_TEST_MODEL KVX_TEST_TEXT
  export UBSAN_OPTIONS=${UBSAN_OPTIONS:-print_stacktrace=1}
  # A process that a test forks may have threads of its own.
  export TSAN_OPTIONS=${TSAN_OPTIONS:-suppressions=$ROOT/tests/tsan.supp:die_after_fork=0}

  local build=build/$preset status=0
  rm -rf "$build/test-reports"
  step "Testing build/$preset"
  # One more than there are processors: some tests wait for times and for one another.
  ctest --test-dir "$build" --output-on-failure --no-tests=error -j $(($(nproc) + 1)) \
    --timeout 1200 \
    "$@" 2>&1 | tee "$build/ctest.log" || status=1
  echo
  /usr/bin/python3 tools/dev/count_tests.py "$build/test-reports" || status=1
  sed -n '/tests passed.*tests failed out of/,$p' "$build/ctest.log"
  return $status
}
