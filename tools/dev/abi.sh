# ./dev abi: compares libkvx.so with the committed description of its ABI.

ABI_DUMP=abi/libkvx.abi
ABI_LIBRARY=build/dev/src/libkvx.so

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
  if [[ ! -f $ABI_DUMP && ${1:-} != --update ]]; then
    fail "$ABI_DUMP is missing: run ./dev abi --update and commit it"
  fi
  [[ ! -f $ABI_DUMP ]] || refuse_incompatible_change
  if [[ ${1:-} == --update ]]; then
    mkdir -p abi
    write_dump "$ABI_DUMP"
    did "wrote $ABI_DUMP"
  else
    abidiff "$ABI_DUMP" "$ABI_LIBRARY" ||
      fail "the ABI of libkvx.so grew: run ./dev abi --update and commit $ABI_DUMP"
    did "the ABI of libkvx.so is that of $ABI_DUMP"
  fi
  summary
}

# Writes a dump whose diff for a new field is the lines of that field: a type's id is a hash of its
# name instead of a running number, and names of parameters, locations and paths are left out.
write_dump() {
  abidw --headers-dir include --exported-interfaces-only --drop-private-types \
    --type-id-style hash --no-parameter-names --no-comp-dir-path --no-corpus-path \
    --no-show-locs --no-elf-needed --out-file "$1" "$ABI_LIBRARY"
  # abidw has no option that shortens the path of a translation unit.
  sed -i "s| path='[^']*/src/| path='src/|" "$1"
}

# Everything in the dump must stay as it is, types and enumerators included, except that structs may
# grow at their end; --update does not change that. abidiff alone calls only removed symbols
# incompatible.
refuse_incompatible_change() {
  step "abidiff $ABI_DUMP $ABI_LIBRARY"
  abidiff --no-added-syms --suppressions abi/tail_growth.suppr "$ABI_DUMP" "$ABI_LIBRARY" ||
    fail "$ABI_LIBRARY is not compatible with $ABI_DUMP: the ABI may grow and must not change"
}
