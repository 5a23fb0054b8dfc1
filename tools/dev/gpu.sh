# ./dev gpu: the tests that need a GPU.

help_gpu() {
  cat <<'END'
Runs the tests labelled gpu, and takes a missing GPU for a failure.

usage: ./dev gpu [-R REGEX]
END
}

cmd_gpu() {
  command -v nvidia-smi >/dev/null || fail "no NVIDIA driver on this machine (nvidia-smi is missing)"
  grep -q '"name": "cuda"' CMakePresets.json ||
    fail "this version has no CUDA backend (CMakePresets.json has no preset cuda)"
  export KVX_REQUIRE_GPU=1
  ensure_packages
  ensure_model
  ensure_text
  build_preset cuda
  run_tests cuda -L gpu "$@"
}
