# Sourced by the tests of this folder: installs the library into an empty folder and sets prefix,
# docs, pkgconfig and libdir to its places. The current folder is an empty one outside the tree.
# shellcheck shell=bash disable=SC2034 # what the sourcing tests use
set -euo pipefail
build_dir=$1 cmake=$2 python=${3:-}

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
prefix=$work/prefix
"$cmake" --install "$build_dir" --component kvx --prefix "$prefix" >/dev/null
docs=$prefix/share/doc/kvx
pkgconfig=$(dirname "$(find "$prefix" -name kvx.pc)")
libdir=$(dirname "$pkgconfig")
mkdir "$work/consumer"
cd "$work/consumer"

fail() {
  echo "$*" >&2
  exit 1
}

with_pkg_config() { PKG_CONFIG_PATH=$pkgconfig pkg-config "$@"; }

# with_library COMMAND...: runs what was linked without a path to the library.
with_library() { LD_LIBRARY_PATH=$libdir "$@"; }
