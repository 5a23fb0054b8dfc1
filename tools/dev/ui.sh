# What the script says: steps with the time passed, errors, and a summary of what was done.

SECONDS=0
DONE=()  # lines of the closing summary

elapsed() { printf '%d:%02d' $((SECONDS / 60)) $((SECONDS % 60)); }

# The line that opens a step: [0:07] Building
step() { printf '[%s] %s\n' "$(elapsed)" "$*"; }

did() { DONE+=("$*"); }

fail() {
  printf './dev: %s\n' "$*" >&2
  exit 1
}

# A word that the command does not know: the command's help, exit code 2.
bad_usage() {
  local command=$1
  shift
  printf './dev %s: %s\n\n' "$command" "$*" >&2
  "help_$command" >&2
  exit 2
}

summary() {
  echo
  echo "Done in $(elapsed):"
  local line
  for line in "${DONE[@]}"; do
    printf '  - %s\n' "$line"
  done
}

cache_dir() { echo "${XDG_CACHE_HOME:-$HOME/.cache}/kvx"; }
