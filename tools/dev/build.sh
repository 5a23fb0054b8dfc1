# ./dev build: configures and compiles one preset.

help_build() {
  cat <<'END'
Builds the library, the tools and the tests into build/<preset>.

usage: ./dev build [PRESET | --release] [-- NINJA OPTIONS]

  PRESET     dev (default), release, release-all, cuda, asan, tsan, arm,
             windows or macos, as in CMakePresets.json
  --release  release-all: what is given away, with kernels for every supported GPU

example: ./dev build asan -- -j4
END
}

cmd_build() {
  local preset=dev
  if [[ ${1-} == --release ]]; then
    preset=release-all
    shift
  elif (($# > 0)) && [[ $1 != -* ]]; then
    preset=$1
    shift
  fi
  if (($# > 0)); then
    [[ $1 == -- ]] || bad_usage build "unknown option '$1'"
    shift
  fi
  [[ $preset =~ ^(dev|release|release-all|cuda|asan|tsan|arm|windows|macos)$ ]] ||
    bad_usage build "unknown preset '$preset'"
  ensure_packages
  [[ $preset != arm ]] || ensure_arm_packages
  [[ ! $preset =~ ^(windows|macos)$ ]] || ensure_cross_root "$preset"
  build_preset "$preset" "$@"
  summary
}

# What CMake is told of the compilers, where ccache is at hand.
use_ccache() {
  if command -v ccache >/dev/null; then
    # what ccache asks for where headers are precompiled
    export CCACHE_SLOPPINESS=${CCACHE_SLOPPINESS:-pch_defines,time_macros}
    export CMAKE_C_COMPILER_LAUNCHER=${CMAKE_C_COMPILER_LAUNCHER:-ccache}
    export CMAKE_CXX_COMPILER_LAUNCHER=${CMAKE_CXX_COMPILER_LAUNCHER:-ccache}
    export CMAKE_CUDA_COMPILER_LAUNCHER=${CMAKE_CUDA_COMPILER_LAUNCHER:-ccache}
  fi
}

# Configures once, then lets ninja find out what is left to do. Further arguments go to ninja.
build_preset() {
  local preset=$1
  shift
  use_ccache
  mkdir -p "build/$preset"
  if [[ ! -f build/$preset/build.ninja ]]; then
    step "Configuring build/$preset"
    cmake --preset "$preset" >"build/$preset/configure.log" 2>&1 || {
      cat "build/$preset/configure.log" >&2
      fail "cmake could not configure the preset $preset"
    }
  fi
  step "Building build/$preset"
  NINJA_STATUS='[%f/%t %es] ' cmake --build "build/$preset" -- "$@" ||
    fail "the build of $preset failed"
  did "built build/$preset"
}
