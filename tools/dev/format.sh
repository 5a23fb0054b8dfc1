# ./dev format: clang-format over all C and C++ files.

help_format() {
  cat <<'END'
Formats every C and C++ file with clang-format 14.

usage: ./dev format [--check]

  --check   change nothing, name the files that are not formatted, exit code 1 if there are any
END
}

cmd_format() {
  local mode=(-i)
  case ${1:-} in
    "") ;;
    --check) mode=(--dry-run --Werror) ;;
    *) bad_usage format "unknown option '$1'" ;;
  esac
  ensure_packages
  local files
  mapfile -t files < <(git ls-files --cached --others --exclude-standard -- \
    '*.c' '*.h' '*.cpp' '*.hpp' '*.cu' '*.cuh')
  step "clang-format ${mode[0]} on ${#files[@]} files"
  printf '%s\0' "${files[@]}" | xargs -0 -n 20 -P "$(nproc)" clang-format "${mode[@]}" ||
    fail "some files are not formatted: run ./dev format"
}
