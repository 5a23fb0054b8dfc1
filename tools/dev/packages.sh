# Debian packages: installs what a list (tools/packages.debian) asks for and the machine lacks.

PACKAGE_LIST=$ROOT/tools/packages.debian

# ensure_packages [LIST]: installs missing packages, as root directly, else through sudo; fast when
# all are there. Lines name:arm64 and name:source are not this machine's (arm.sh, cross.sh) and are
# passed over.
ensure_packages() {
  command -v dpkg-query >/dev/null ||
    fail "this is no Debian system: install what tools/packages.debian lists, use cmake --preset dev"

  local -A wanted=() found=()
  local name version line
  while IFS= read -r line; do
    [[ -z $line || $line == \#* || ${line%%=*} == *:* ]] && continue
    wanted[${line%%=*}]=${line#*=}
  done <"${1:-$PACKAGE_LIST}"
  while read -r name version line; do
    [[ $line == installed ]] && found[$name]=$version
  done < <(dpkg-query -W -f='${Package} ${Version} ${db:Status-Status}\n' \
    "${!wanted[@]}" 2>/dev/null)

  local missing=()
  for name in "${!wanted[@]}"; do
    if [[ -z ${found[$name]:-} ]]; then
      missing+=("$name")
    else
      check_version "$name" "${found[$name]}" "${wanted[$name]}" installed
    fi
  done
  if ((${#missing[@]} == 0)); then
    did "all ${#wanted[@]} Debian packages were there"
    return
  fi

  mapfile -t missing < <(printf '%s\n' "${missing[@]}" | sort)
  step "Installing ${#missing[@]} Debian packages: ${missing[*]}"
  local root=()
  if ((EUID != 0)); then
    command -v sudo >/dev/null ||
      fail "missing packages: ${missing[*]}; run as root, or install sudo"
    root=(sudo)
  fi
  # An unreadable list may be some other archive's: what can be installed decides, below.
  ${root[@]+"${root[@]}"} apt-get update -qq >"$(install_log)" 2>&1 || cat "$(install_log)" >&2
  for name in "${missing[@]}"; do
    version=$(apt-cache policy "$name" | awk '/Candidate:/ { print $2 }')
    [[ -n $version && $version != "(none)" ]] ||
      fail "no package $name in this machine's archives (no network?); missing: ${missing[*]}"
    check_version "$name" "$version" "${wanted[$name]}" "offered by the archive"
  done
  # apt's own progress lines are what a waiting user wants to see: one a package.
  ${root[@]+"${root[@]}"} env DEBIAN_FRONTEND=noninteractive apt-get install -y \
    --no-install-recommends -o Dpkg::Use-Pty=0 "${missing[@]}" 2>&1 | tee -a "$(install_log)" |
    show_apt_progress || {
    tail -n 20 "$(install_log)" >&2
    fail "apt-get could not install (no network?): ${missing[*]}; see $(install_log)"
  }
  did "installed ${#missing[@]} Debian packages: ${missing[*]}"
}

# Every 20th unpacked or configured package gives a line, and what cannot be fetched gives one each.
show_apt_progress() {
  awk '/^(Unpacking|Setting up) / && ++n % 20 == 0 { print "      " n " steps: " $0; fflush() }
       /^E: / { print }'
}

install_log() {
  mkdir -p "$ROOT/build"
  echo "$ROOT/build/apt.log"
}

# Pinned means pinned: another version is an error, unless its user says that it is meant.
check_version() {
  local name=$1 version=$2 pattern=$3 where=$4
  # shellcheck disable=SC2053 # the right side is a pattern
  [[ $version == $pattern ]] && return
  [[ ${KVX_ANY_VERSION:-} == 1 ]] && return
  fail "$name $version is $where, expected $pattern (KVX_ANY_VERSION=1 takes it anyway)"
}
