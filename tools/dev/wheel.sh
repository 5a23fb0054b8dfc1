# ./dev wheel: the Python package as a wheel that other Linux machines can install.

WHEEL_REQUIREMENTS=tools/dev/requirements-wheel.txt

help_wheel() {
  cat <<'END'
Builds the wheel and the sdist, and tests the wheel in a fresh environment.

usage: ./dev wheel

The wheel brings the C++ libraries that it needs (auditwheel) and is tagged with this machine's
glibc. Both lie in build/wheel.
END
}

cmd_wheel() {
  (($# == 0)) || bad_usage wheel "unknown option '$1'"
  ensure_packages
  ensure_model
  ensure_text
  ensure_python_env "$WHEEL_REQUIREMENTS"
  local python out=build/wheel
  python=$(python_env "$WHEEL_REQUIREMENTS")/bin/python
  rm -rf "$out"
  mkdir -p "$out"
  if command -v ccache >/dev/null; then
    export CMAKE_CXX_COMPILER_LAUNCHER=${CMAKE_CXX_COMPILER_LAUNCHER:-ccache}
  fi
  step "Building the sdist and the wheel"
  "$python" -m build --sdist --wheel --no-isolation --outdir "$out/plain" . >"$out/build.log" 2>&1 || {
    tail -n 60 "$out/build.log" >&2
    fail "the wheel could not be built; see $out/build.log"
  }
  mv "$out"/plain/*.tar.gz "$out"
  step "Giving the wheel its libraries"
  PATH=$(dirname "$python"):$PATH "$python" -m auditwheel repair --wheel-dir "$out" \
    "$out"/plain/*.whl >>"$out/build.log" 2>&1 || {
    tail -n 60 "$out/build.log" >&2
    fail "auditwheel could not repair the wheel; see $out/build.log"
  }
  local wheel
  wheel=$(echo "$out"/*.whl)
  did "$wheel, $(($(stat -c %s "$wheel") / 1024 / 1024)) MiB"
  did "$(echo "$out"/*.tar.gz)"

  step "Testing the wheel in a fresh environment"
  /usr/bin/python3 -m venv "$out/venv" &&
    "$out/venv/bin/python" -m pip --disable-pip-version-check install --quiet --no-deps \
      -r "$TEST_REQUIREMENTS" "$wheel" ||
    fail "the wheel cannot be installed"
  KVX_TEST_MODEL=$(model_path) KVX_TEST_TEXT=$(text_path) PYTHONDONTWRITEBYTECODE=1 \
    "$out/venv/bin/python" -m pytest -q -p no:cacheprovider tests/python ||
    fail "the tests fail on the installed wheel"
  did "tests/python pass on the installed wheel"
  summary
}
