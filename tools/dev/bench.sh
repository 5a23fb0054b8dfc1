# ./dev bench: kvx bench of a release build.

help_bench() {
  cat <<'END'
Measures attend, append and gather per format against this machine's memory bandwidth.

usage: ./dev bench [KVX BENCH OPTIONS]

All options go to `kvx bench` of the release build; `./dev bench -- --help` lists them.
END
}

cmd_bench() {
  [[ ${1:-} == -- ]] && shift
  ensure_packages
  build_preset release
  step "kvx bench $*"
  build/release/tools/kvx/kvx bench "$@"
}
