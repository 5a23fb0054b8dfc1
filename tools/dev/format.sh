# ./dev format: clang-format over all C and C++ files; with --check also the tree's text.

help_format() {
  cat <<'END'
Formats every C and C++ file with clang-format 14.

usage: ./dev format [--check]

  --check   change nothing; list the files that are not formatted, lines of Markdown over 100 columns,
            and words that docs/glossary.md replaces (tools/dev/forbidden_words.txt); exit code 1 if
            there are any
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
  [[ ${1:-} == --check ]] || return 0
  step "columns of Markdown, forbidden words"
  python3 tools/dev/check_text.py ||
    fail "some lines are too wide or use a word that docs/glossary.md replaces"
}
