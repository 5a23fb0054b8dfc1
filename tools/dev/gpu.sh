# ./dev gpu: everything that needs a GPU: tests, compute-sanitizer, benchmark.

help_gpu() {
  cat <<'END'
Builds with CUDA, runs the GPU's tests, the same under compute-sanitizer, and the benchmark.

usage: ./dev gpu [--tests | --bench] [-R FILTER]

  --tests    only the tests, a missing GPU is a failure
  --bench    only the benchmark: kvx bench --device cuda
  -R FILTER  only test cases that GoogleTest's filter names

Needs an NVIDIA driver, a Hopper GPU and nvcc (KVX_CUDA in cmake/cuda.cmake).
END
}

# Test cases that between them launch every kernel, small enough to run under the sanitizer.
SANITIZED='GpuAppend.HandlesHeadDims*:GpuAppend.Skips*:GpuGoldenRows.Transforms*:GpuCopyBlocks.Skips*'
SANITIZED+=':GpuAppend.WritesTheCpusBytesUnderPage*:GpuCopyBlocks.Writes*'
SANITIZED+=':GpuAttend.Tiles*:GpuAttend.Captured*:GpuAttend.Skips*:GpuAttend.Heads*'
SANITIZED+=':GpuPrefill.Captured*:GpuPrefill.Skips*:GpuPrefill.Splits*'
SANITIZED+=':GpuAbiWrite.Takes*:GpuAbiWrite.Encodes*:GpuAbiWrite.Skips*:GpuAbiWrite.Captured*'
SANITIZED+=':GpuAbiGather.Takes*:GpuAbiGather.Converts*:GpuAbiGather.Skips*:GpuAbiGather.Reads*:GpuAbiVerbs.*'

cmd_gpu() {
  local only=all filter='*'
  while (($# > 0)); do
    case $1 in
      --tests | --bench) only=${1#--} ;;
      -R)
        (($# > 1)) || bad_usage gpu "$1 needs a value"
        filter=$2
        shift
        ;;
      *) bad_usage gpu "unknown option '$1'" ;;
    esac
    shift
  done
  command -v nvidia-smi >/dev/null || fail "no NVIDIA driver on this machine (nvidia-smi is missing)"
  export KVX_REQUIRE_GPU=1
  ensure_packages
  build_preset cuda
  local tests=build/cuda/tests/gpu/gpu_test
  if [[ $only != bench ]]; then
    step "GPU tests"
    "$tests" --gtest_brief=1 --gtest_filter="$filter" || fail "GPU tests failed"
  fi
  if [[ $only == all ]]; then
    sanitize "$tests"
  fi
  if [[ $only != tests ]]; then
    step "kvx bench --device cuda"
    build/cuda/tools/kvx/kvx bench --device cuda
  fi
}

# Every kernel under each of compute-sanitizer's tools.
sanitize() {
  command -v compute-sanitizer >/dev/null || fail "compute-sanitizer is missing (CUDA toolkit)"
  local tool
  for tool in memcheck racecheck synccheck initcheck; do
    step "compute-sanitizer $tool"
    compute-sanitizer --tool "$tool" --error-exitcode 9 "$1" --gtest_brief=1 \
      --gtest_filter="$SANITIZED" || fail "compute-sanitizer $tool found errors"
  done
}
