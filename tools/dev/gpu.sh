# ./dev gpu: everything that needs a GPU: tests, compute-sanitizer, benchmark.

help_gpu() {
  cat <<'END'
Builds with CUDA, runs the GPU's tests, the same under compute-sanitizer, and the benchmark.

usage: ./dev gpu [--tests | --bench | --filters] [-R FILTER] [--built DIR] [-- BENCH OPTIONS]
       ./dev gpu --hf | --vllm [--built DIR] [-- OPTIONS OF bench/vllm/gpu.py]

  --tests      only the tests, a missing GPU is a failure
  --bench      only the benchmark: kvx bench --device cuda
  --filters    only checks that the filters below name test cases; needs no GPU
  --hf         only transformers' tests on the GPU
  --vllm       only vLLM on the GPU: tests/vllm/test_gpu.py, then bench/vllm/gpu.py
  -R FILTER    only test cases that GoogleTest's filter names
  --built DIR  builds nothing: DIR is a build folder, this machine's or a copy of another's, of
               which tests/gpu/gpu_test, tests/kv_test and tools/kvx/kvx are needed

Where python3 has torch, pytest and hypothesis and can import the build folder's python/kvx (or a kvx
that is installed), Python's GPU tests run too, transformers' with them if it is there.

Needs an NVIDIA driver, a GPU of compute capability 8.0 or later and, to build, nvcc
(KVX_CUDA and KVX_CUDA_TARGETS in cmake/cuda.cmake; kernels are built for 9.0 unless told).
END
}

# Test cases that between them launch every kernel, small enough to run under the sanitizer.
SANITIZED='GpuAppend.HandlesHeadDims*:GpuAppend.Skips*:GpuGoldenRows.Transforms*:GpuCopyBlocks.Skips*'
SANITIZED+=':GpuAppend.WritesTheCpusBytesUnderPage*:GpuCopyBlocks.Writes*:GpuCopyBlocks.Moves*:GpuTranscode.*'
SANITIZED+=':GpuAttend.Tiles*:GpuAttend.Captured*:GpuAttend.Skips*:GpuAttend.Heads*:GpuAttend.LongSequencesAmong*'
SANITIZED+=':GpuPrefill.Captured*:GpuPrefill.Skips*:GpuPrefill.Splits*:GpuPrefill.TakesInterleaved*'
SANITIZED+=':GpuAttend.SplitsOfShort*:GpuAttend.AWindowsSinks*:GpuAttend.BlocksBetween*'
SANITIZED+=':GpuPrefillDims.*Apart/*:GpuPrefillDims.TakesIntegers*:GpuPrefillLong.Reads*:GpuPrefillLong.Splits*'
SANITIZED+=':GpuAppend.WritesTheCpusCodes*:GpuCopyBlocks.Changes*:GpuAttend.Reference*InterleavedOrder:GpuAttend.Callers*:GpuAttend.ASequence*'
SANITIZED+=':GpuAbiWrite.Takes*:GpuAbiWrite.Encodes*:GpuAbiWrite.Skips*:GpuAbiWrite.Captured*'
SANITIZED+=':GpuAbiGather.Takes*:GpuAbiGather.Converts*:GpuAbiGather.Skips*:GpuAbiGather.Reads*:GpuAbiVerbs.*'
SANITIZED+=':GpuFeedback.WritesTheCpusBytesInEveryFormat:GpuFeedback.WritesTheCpusCodes*:GpuFeedback.Copies*'

# Of those, what racecheck does not understand: one lane arrives at a barrier for its warp, after
# __syncwarp, and the numbers that the other lanes wrote (scales of tokens) are read behind it.
NOT_RACECHECKED='GpuPrefill.Captured*/Wgmma:GpuPrefill.Skips*/Wgmma:GpuPrefill.*TokenScales/Wgmma:GpuPrefill.*FullPrecisionWindow/Wgmma'
NOT_RACECHECKED+=':GpuPrefill.TakesInterleaved/Wgmma'

# Cases of the assembled cache with its blocks on the device (tests/gpu/CMakeLists.txt), and some.
KV_CASES='KvCache.*:KvCacheFeedback.*:KvCacheFile.*:KvStep.*:Fork.*:Truncate.*:PartialAcceptance.*:Prefix.*:HostTier.*:Place.*:WindowSinks.*:Transcode.*:Speculation.*'
SANITIZED_KV='Fork.Shares*:PartialAcceptance.*:Prefix.ATenant*:HostTier.*:Place.Zeroes*'

cmd_gpu() {
  local only=all filter='*' built=''
  while (($# > 0)); do
    case $1 in
      --tests | --bench | --filters | --hf | --vllm) only=${1#--} ;;
      -R)
        (($# > 1)) || bad_usage gpu "$1 needs a value"
        filter=$2
        shift
        ;;
      --built)
        (($# > 1)) || bad_usage gpu "$1 needs a value"
        built=$2
        shift
        ;;
      --)
        shift
        break
        ;;
      *) bad_usage gpu "unknown option '$1'" ;;
    esac
    shift
  done
  [[ $only == filters ]] || command -v nvidia-smi >/dev/null ||
    fail "no NVIDIA driver on this machine (nvidia-smi is missing)"
  export KVX_REQUIRE_GPU=1
  if [[ -z $built ]]; then
    built=build/cuda
    ensure_packages
    build_preset cuda
  fi
  case $only in
    hf)
      test_hf_on_gpu "$built"
      return
      ;;
    vllm)
      test_vllm_on_gpu "$built" "$@"
      return
      ;;
  esac
  local tests=$built/tests/gpu/gpu_test kv_tests=$built/tests/kv_test
  local kvx=$built/tools/kvx/kvx program
  for program in "$tests" "$kv_tests" "$kvx"; do
    [[ -x $program ]] || fail "$program is missing"
  done
  if [[ $only != bench ]]; then
    check_filters "$tests" "$SANITIZED:$NOT_RACECHECKED"
    check_filters "$kv_tests" "$KV_CASES:$SANITIZED_KV"
  fi
  [[ $only != filters ]] || return 0
  if [[ $only != bench ]]; then
    step "GPU tests"
    "$tests" --gtest_brief=1 --gtest_filter="$filter" || fail "GPU tests failed"
    if [[ $filter == '*' ]]; then
      KVX_TEST_DEVICE=cuda "$kv_tests" --gtest_brief=1 --gtest_filter="$KV_CASES" ||
        fail "the assembled cache's tests failed"
      test_python_on_gpu "$built"
    fi
  fi
  if [[ $only == all ]]; then
    sanitize "$tests" "$SANITIZED"
    KVX_TEST_DEVICE=cuda sanitize "$kv_tests" "$SANITIZED_KV"
  fi
  if [[ $only != tests ]]; then
    step "kvx bench --device cuda"
    "$kvx" bench --device cuda "$@"
  fi
}

# Fails where a pattern of a filter matches no test case of a binary.
check_filters() {
  local pattern patterns
  IFS=: read -ra patterns <<<"$2"
  for pattern in "${patterns[@]}"; do
    "$1" --gtest_list_tests --gtest_filter="$pattern" | grep -q '^  ' ||
      fail "$1 has no test case that '$pattern' matches"
  done
}

# The GPU tests of the Python package, on the module of a build folder or the one that is installed.
test_python_on_gpu() {
  local -x PYTHONPATH=$1/python${PYTHONPATH:+:$PYTHONPATH} PYTHONDONTWRITEBYTECODE=1
  local missing
  if ! missing=$(python3 -c 'import torch, pytest, hypothesis, kvx' 2>&1); then
    step "Python's GPU tests: not run (${missing##*$'\n'})"
    return
  fi
  step "Python's GPU tests"
  python3 -m pytest -q -p no:cacheprovider tests/python/test_gpu.py || fail "Python's GPU tests failed"
  python3 -m pytest -q -p no:cacheprovider tests/torch/test_gpu.py ||
    fail "PyTorch's operators' GPU tests failed"
  if ! missing=$(python3 -c 'import kvx.hf' 2>&1); then
    step "transformers' GPU tests: not run (${missing##*$'\n'})"
    return
  fi
  test_hf_on_gpu "$1"
}

test_hf_on_gpu() {
  python_on_gpu "$1" -c 'import kvx.hf, pytest' || fail "python3 cannot import transformers and kvx"
  step "transformers' GPU tests"
  python_on_gpu "$1" -m pytest -q -p no:cacheprovider tests/hf/test_gpu.py ||
    fail "transformers' GPU tests failed"
}

# vLLM's GPU tests and benchmark; options behind the build folder are the benchmark's.
test_vllm_on_gpu() {
  local built=$1
  shift
  python_on_gpu "$built" -c 'import kvx.vllm, pytest' || fail "python3 cannot import vLLM and kvx"
  step "vLLM's GPU tests"
  python_on_gpu "$built" -m pytest -q -p no:cacheprovider tests/vllm/test_gpu.py ||
    fail "vLLM's GPU tests failed"
  step "bench/vllm/gpu.py"
  python_on_gpu "$built" bench/vllm/gpu.py --logs "$built/vllm-logs" "$@"
}

# python3 with the module of a build folder, or the kvx that is installed.
python_on_gpu() {
  local built=$1
  shift
  PYTHONPATH=$built/python${PYTHONPATH:+:$PYTHONPATH} PYTHONDONTWRITEBYTECODE=1 python3 "$@"
}

# Some cases of a binary under each of compute-sanitizer's tools.
sanitize() {
  command -v compute-sanitizer >/dev/null || fail "compute-sanitizer is missing (CUDA toolkit)"
  local tool filter
  for tool in memcheck racecheck synccheck initcheck; do
    step "compute-sanitizer $tool"
    filter=$2
    [[ $tool != racecheck ]] || filter+=-$NOT_RACECHECKED
    compute-sanitizer --tool "$tool" --error-exitcode 9 "$1" --gtest_brief=1 \
      --gtest_filter="$filter" || fail "compute-sanitizer $tool found errors"
  done
}
