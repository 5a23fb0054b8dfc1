# The Python module in build/dev, and the environments of its tests.

TEST_REQUIREMENTS=tests/python/requirements.txt
HF_REQUIREMENTS=tests/hf/requirements.txt

# The folder of the environment that a requirements file asks for; another content, another folder.
python_env() { echo "$(cache_dir)/python-$(sha256sum "$ROOT/$1" | cut -c1-12)"; }

# Debian's python3, whatever else is on the PATH. A stamp says that an environment is complete.
ensure_python_env() {
  local requirements=$1 env
  env=$(python_env "$requirements")
  if [[ -f $env/complete ]]; then
    did "Python environment of $requirements: was there"
    return
  fi
  step "Installing $requirements from PyPI"
  rm -rf "$env"
  mkdir -p "$(cache_dir)"
  /usr/bin/python3 -m venv "$env" &&
    "$env/bin/python" -m pip --disable-pip-version-check --retries 2 install --quiet --no-deps \
      -r "$ROOT/$requirements" ||
    fail "cannot install $requirements from PyPI (no network?)"
  touch "$env/complete"
  did "Python environment of $requirements: installed"
}

# Makes build/dev build kvx._core with the test environment's nanobind.
configure_python() {
  ensure_python_env "$TEST_REQUIREMENTS"
  local python
  python=$(python_env "$TEST_REQUIREMENTS")/bin/python
  local cache=build/dev/CMakeCache.txt
  [[ -f $cache ]] && grep -q '^KVX_PYTHON:BOOL=ON$' "$cache" &&
    grep -q "^Python_EXECUTABLE:[A-Z]*=$python\$" "$cache" && return
  step "Configuring build/dev with the Python module"
  mkdir -p build/dev
  cmake --preset dev -DKVX_PYTHON=ON -DPython_EXECUTABLE="$python" -U 'nanobind_*' -U '_Python*' \
    >build/dev/configure.log 2>&1 || {
    cat build/dev/configure.log >&2
    fail "cmake could not configure the Python module"
  }
}

# The transformers suite, on the module that build/dev has.
test_hf() {
  ensure_packages
  ensure_python_env "$HF_REQUIREMENTS"
  configure_python
  build_preset dev kvx_python kvx_tool
  summary
  step "Testing kvx.hf"
  PYTHONPATH=build/dev/python PYTHONDONTWRITEBYTECODE=1 \
    "$(python_env "$HF_REQUIREMENTS")/bin/python" -m pytest -q -p no:cacheprovider tests/hf
}
