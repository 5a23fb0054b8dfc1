# ./dev abi: holds libkvx.so against the committed description of its ABI.

ABI_DUMP=abi/libkvx.abi

help_abi() {
  cat <<'END'
Compares libkvx.so with abi/libkvx.abi; an incompatible change is an error.

usage: ./dev abi [--update]

  --update   write abi/libkvx.abi anew (after an additive change, in the same commit)
END
}

cmd_abi() {
  [[ $# -eq 0 || $* == --update ]] || bad_usage abi "unknown option '$1'"
  ensure_packages
  build_preset dev kvx
  if [[ ${1:-} == --update ]]; then
    mkdir -p abi
    abidw --headers-dir include --exported-interfaces-only --no-comp-dir-path --no-corpus-path \
      --no-show-locs --no-elf-needed --out-file "$ABI_DUMP" build/dev/src/libkvx.so
    did "wrote $ABI_DUMP"
    summary
    return
  fi
  compare_abi
}

# abidiff's exit code is a set of bits: 1 error, 2 wrong use, 4 the ABI changed, 8 incompatibly.
compare_abi() {
  local status=0
  step "abidiff $ABI_DUMP build/dev/src/libkvx.so"
  abidiff --headers-dir2 include "$ABI_DUMP" build/dev/src/libkvx.so || status=$?
  if ((status & 11)); then
    fail "the ABI of libkvx.so is not compatible with $ABI_DUMP"
  elif ((status & 4)); then
    fail "the ABI of libkvx.so grew: run ./dev abi --update and commit $ABI_DUMP"
  fi
  did "the ABI of libkvx.so is the one of $ABI_DUMP"
}
