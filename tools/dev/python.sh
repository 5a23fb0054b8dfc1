# The Python module in build/dev, and the environments of its tests.

TEST_REQUIREMENTS=tests/python/requirements.txt
HF_REQUIREMENTS=tests/hf/requirements.txt
VLLM_REQUIREMENTS=tests/vllm/requirements.txt
LMDEPLOY_REQUIREMENTS=tests/lmdeploy/requirements.txt
MOONCAKE_REQUIREMENTS=tests/mooncake/requirements.txt

DEBIANS_PYTHON=/usr/bin/python3  # whatever else is on the PATH

# The folder of the environment that a requirements file asks for; another content, another folder.
# $2: the interpreter, Debian's without.
python_env() {
  local name
  name=python-$(sha256sum "$ROOT/$1" | cut -c1-12)
  [[ ${2:-$DEBIANS_PYTHON} == "$DEBIANS_PYTHON" ]] || name+=-$(basename "$2")
  echo "$(cache_dir)/$name"
}

# A stamp says that an environment is complete. Arguments as python_env.
ensure_python_env() {
  local requirements=$1 python=${2:-$DEBIANS_PYTHON} env
  env=$(python_env "$@")
  if [[ -f $env/complete ]]; then
    did "Python environment of $requirements: was there"
    return
  fi
  step "Installing $requirements from PyPI"
  rm -rf "$env"
  mkdir -p "$(cache_dir)"
  "$python" -m venv "$env" &&
    "$env/bin/python" -m pip --disable-pip-version-check --retries 2 install --quiet --no-deps \
      -r "$ROOT/$requirements" ||
    fail "cannot install $requirements from PyPI (no network?)"
  touch "$env/complete"
  did "Python environment of $requirements: installed"
}

# Makes build/<preset> build kvx._core with the test environment's nanobind.
configure_python() {
  local preset=$1 python
  ensure_python_env "$TEST_REQUIREMENTS"
  python=$(python_env "$TEST_REQUIREMENTS")/bin/python
  local cache=build/$preset/CMakeCache.txt
  [[ -f $cache ]] && grep -q '^KVX_PYTHON:BOOL=ON$' "$cache" &&
    grep -q "^Python_EXECUTABLE:[A-Z]*=$python\$" "$cache" && return
  step "Configuring build/$preset with the Python module"
  mkdir -p "build/$preset"
  cmake --preset "$preset" -DKVX_PYTHON=ON -DPython_EXECUTABLE="$python" -U 'nanobind_*' \
    -U '_Python*' >"build/$preset/configure.log" 2>&1 || {
    cat "build/$preset/configure.log" >&2
    fail "cmake could not configure the Python module"
  }
}

# The package's suite and transformers' on the oldest versions that are supported. Left out are the
# tests of types and pages, whose tools need newer ones (mypy 2.4 ends with an error of its own on
# torch 2.9), and JAX's, which needs NumPy 2.
test_oldest() {
  run_python_suite tests/python/requirements-oldest.txt tests/python \
    --ignore tests/python/test_types.py --ignore tests/python/test_reference.py \
    --ignore tests/python/test_jax.py
  run_python_suite tests/hf/requirements-oldest.txt tests/hf --ignore tests/hf/test_types.py
}

# The suites of transformers, vLLM, LMDeploy and PyTorch's operators, on the module that build/dev
# has. vLLM's environment has a PyTorch.
test_hf() { run_python_suite "$HF_REQUIREMENTS" tests/hf; }
test_vllm() { run_python_suite "$VLLM_REQUIREMENTS" tests/vllm; }
test_lmdeploy() { run_python_suite "$LMDEPLOY_REQUIREMENTS" tests/lmdeploy; }
test_mooncake() { run_python_suite "$MOONCAKE_REQUIREMENTS" tests/mooncake; }
test_torch() { run_python_suite "$VLLM_REQUIREMENTS" tests/torch; }

run_python_suite() {
  local requirements=$1 suite=$2
  shift 2
  ensure_packages
  ensure_model
  ensure_text
  ensure_python_env "$requirements"
  configure_python dev
  build_preset dev kvx_python kvx_tool
  summary
  step "Testing $suite"
  KVX_TEST_MODEL=$(model_path) KVX_TEST_TEXT=$(text_path) \
    PYTHONPATH=build/dev/python PYTHONDONTWRITEBYTECODE=1 \
    "$(python_env "$requirements")/bin/python" -m pytest -q -p no:cacheprovider "$suite" "$@"
}

# The package's own suite on a module with AddressSanitizer and UBSan, whose runtime the interpreter
# has to bring along. Python keeps memory until its end: leaks are not looked for. The command line
# tool, which has tests of its own under asan, is that of build/dev.
test_python_asan() {
  ensure_packages
  ensure_model
  ensure_text
  build_preset dev kvx_tool
  configure_python asan
  build_preset asan kvx_python
  ln -sfn "$ROOT/build/dev/tools/kvx/kvx" build/asan/python/kvx/bin/kvx
  summary
  step "Testing tests/python under AddressSanitizer"
  local runtime
  runtime=$(clang++ -print-file-name=libclang_rt.asan-x86_64.so)
  KVX_TEST_MODEL=$(model_path) KVX_TEST_TEXT=$(text_path) \
    PYTHONPATH=build/asan/python PYTHONDONTWRITEBYTECODE=1 \
    ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
    LD_PRELOAD="$runtime $(clang++ -print-file-name=libstdc++.so.6)" \
    "$(python_env "$TEST_REQUIREMENTS")/bin/python" -m pytest -q -p no:cacheprovider tests/python
}
