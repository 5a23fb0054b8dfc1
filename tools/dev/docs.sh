# ./dev docs: the Python reference, as HTML pages.

help_docs() {
  cat <<'END'
Writes the Python reference from the docstrings into build/docs-python, and checks it.

usage: ./dev docs

Read it in a browser: build/docs-python/index.html. A warning, a public name without a docstring
and a dead link are errors. The pages of kvx.hf and kvx.torch need the environment of
./dev test --hf; where that is not there they are left out, and the last line says so.
END
}

cmd_docs() {
  (($# == 0)) || bad_usage docs "unknown option '$1'"
  ensure_packages
  ensure_python_env "$TEST_REQUIREMENTS"
  configure_python dev
  build_preset dev kvx_python
  local test_env hf_env
  test_env=$(python_env "$TEST_REQUIREMENTS")
  hf_env=$(python_env "$HF_REQUIREMENTS")
  rm -rf build/docs-python
  step "Writing build/docs-python"
  if [[ -f $hf_env/complete ]]; then
    # Of the tests' environment comes what the larger one lacks, matplotlib.
    PYTHONPATH=build/dev/python:$(echo "$test_env"/lib/python3.*/site-packages) \
      "$hf_env/bin/python" tools/dev/python_docs.py --with-torch build/docs-python ||
      fail "the Python reference has problems"
  else
    PYTHONPATH=build/dev/python "$test_env/bin/python" tools/dev/python_docs.py build/docs-python ||
      fail "the Python reference has problems"
    did "kvx.hf and kvx.torch have no pages: their environment is not there (./dev test --hf)"
  fi
  did "build/docs-python/index.html"
  summary
}
