# ./dev wheel: the Python package as wheels that other Linux machines can install.

WHEEL_OUT=build/wheel
WHEEL_REQUIREMENTS=tools/dev/requirements-wheel.txt
WHEEL_TARGETS='80;80-virtual;89;90a;100f;120f'  # those of the preset release-all
WHEEL_LIMIT=$((100 * 1000 * 1000))              # bytes of a file that PyPI takes

help_wheel() {
  cat <<'END'
Builds the wheels and the sdist, and tests the wheels in fresh environments.

usage: ./dev wheel [--targets LIST | --no-cuda | --arm] [--no-tests]

  --targets LIST  compute capabilities of the kernels, as KVX_CUDA_TARGETS in cmake/cuda.cmake;
                  every supported GPU without (needs nvcc 12.9 or later)
  --no-cuda       without kernels; needs no nvcc
  --arm           for 64-bit Arm Linux and CPython 3.11, by Debian's cross compiler; its tests
                  run under qemu-user (docs/arm.md), and all of it lies in build/wheel-arm
  --no-tests      only builds and looks at what the wheels hold

Each Python of 3.10 to 3.14 that the PATH has (python3.10, ...; PYTHONS may name more) tests a
wheel. 3.10 and 3.11 get a wheel of their own, 3.12 and later share one. A wheel brings the C++
libraries that it needs (auditwheel) and is tagged with the oldest glibc that it runs on; it also
holds libkvx.so with its headers (kvx-config). All of it lies in build/wheel. With ccache, the
second and third wheel, and every later call, compile little.
END
}

cmd_wheel() {
  local targets=$WHEEL_TARGETS cuda=ON tests=yes arm='' what=''
  while (($# > 0)); do
    case $1 in
      --targets)
        (($# > 1)) || bad_usage wheel "$1 needs a value"
        targets=$2
        what+=$1
        shift
        ;;
      --no-cuda)
        cuda=OFF
        what+=$1
        ;;
      --arm)
        arm=yes
        what+=$1
        ;;
      --no-tests) tests= ;;
      *) bad_usage wheel "unknown option '$1'" ;;
    esac
    shift
  done
  [[ -z $arm || $what == --arm ]] || bad_usage wheel "--arm takes no option but --no-tests"
  ensure_packages
  if [[ -n $arm ]]; then
    wheel_arm "$tests"
    return
  fi
  ensure_model
  ensure_text
  local pythons=() python out=$WHEEL_OUT
  mapfile -t pythons < <(wheel_pythons)
  rm -rf "$out"
  mkdir -p "$out"
  use_ccache
  local has_abi3='' has_sdist=''
  for python in "${pythons[@]}"; do
    if (($(minor_version "$python") >= 12)); then
      [[ -z $has_abi3 ]] || continue
      has_abi3=yes
    fi
    ensure_python_env "$WHEEL_REQUIREMENTS" "$python"
    if [[ -z $has_sdist ]]; then
      step "Building the sdist"
      build_distribution "$python" --sdist
      mv "$out"/plain/*.tar.gz "$out"
      did "$(echo "$out"/*.tar.gz)"
      has_sdist=yes
    fi
    step "Building a wheel by $("$python" -V)"
    build_distribution "$python" --wheel -C 'build-dir=build/{wheel_tag}' \
      -C "cmake.define.KVX_CUDA=$cuda" -C "cmake.define.KVX_CUDA_TARGETS=$targets" \
      -C cmake.define.KVX_CUDA_OPTIMIZE=ON
    repair_wheel "$python"
  done
  [[ -z $tests ]] || for python in "${pythons[@]}"; do test_wheel "$python"; done
  summary
}

minor_version() { "$1" -c 'import sys; print(sys.version_info[1])'; }

# Paths of one interpreter for each minor version that this machine has, the oldest first. A name on
# the PATH may be a launcher that starts nothing.
wheel_pythons() {
  local minor python
  for minor in 10 11 12 13 14; do
    for python in ${PYTHONS:-} "/usr/bin/python3.$minor" "python3.$minor"; do
      [[ $("$python" -c 'import sys, ensurepip; print(sys.version_info[1])' 2>/dev/null) == "$minor" ]] ||
        continue
      echo "$python"
      break
    done
  done
}

build_distribution() {
  local python
  python=$(python_env "$WHEEL_REQUIREMENTS" "$1")/bin/python
  shift
  "$python" -m build "$@" --no-isolation --outdir "$WHEEL_OUT/plain" . \
    >>"$WHEEL_OUT/build.log" 2>&1 || {
    tail -n 60 "$WHEEL_OUT/build.log" >&2
    fail "build $1 failed; see $WHEEL_OUT/build.log"
  }
}

# repair_wheel PYTHON [AUDITWHEEL OPTIONS]
repair_wheel() {
  local python out=$WHEEL_OUT wheel bytes
  python=$(python_env "$WHEEL_REQUIREMENTS" "$1")/bin/python
  shift
  step "Giving the wheel its libraries"
  mkdir -p "$out/repaired"
  PATH=$(dirname "$python"):$PATH "$python" -m auditwheel repair --wheel-dir "$out/repaired" "$@" \
    "$out"/plain/*.whl >>"$out/build.log" 2>&1 || {
    tail -n 60 "$out/build.log" >&2
    fail "auditwheel could not repair the wheel; see $out/build.log"
  }
  rm "$out"/plain/*.whl
  wheel=$(echo "$out"/repaired/*.whl)
  mv "$wheel" "$out"
  wheel=$out/$(basename "$wheel")
  bytes=$(stat -c %s "$wheel")
  ((bytes < WHEEL_LIMIT)) || fail "$wheel has $bytes bytes; PyPI takes $WHEEL_LIMIT"
  did "$wheel, $((bytes / 1000 / 1000)) MB"
}

# A C program that prints the library's version.
write_client() {
  cat >"$1" <<'END'
#include <kvx/kvx_abi.h>
#include <stdio.h>
int main(void) {
  kvx_version_t v = {sizeof v, 0, 0, 0};
  return kvx_get_version(&v) || printf("%u.%u.%u\n", v.abi_major, v.abi_minor, v.abi_patch) < 0;
}
END
}

# The wheel that pip chooses for an interpreter: its tests, and a C program against its library.
test_wheel() {
  local python=$1 venv requirements=$TEST_REQUIREMENTS
  (($(minor_version "$python") > 10)) || requirements=tests/python/requirements-3.10.txt
  venv=build/wheel/venv-3.$(minor_version "$python")
  step "Testing on $("$python" -V) in a fresh environment"
  "$python" -m venv "$venv" &&
    "$venv/bin/python" -m pip --disable-pip-version-check install --quiet --no-deps \
      -r "$requirements" &&
    "$venv/bin/python" -m pip --disable-pip-version-check install --quiet --no-deps --no-index \
      --find-links build/wheel kvx ||
    fail "the wheel cannot be installed"
  "$venv/bin/kvx" info >"$venv/info.txt" || fail "the wheel's tool does not run"
  did "$("$venv/bin/python" -V): $(grep -i -m1 cuda "$venv/info.txt")"
  write_client "$venv/client.c"
  # shellcheck disable=SC2046 # the flags are words
  cc "$venv/client.c" $("$venv/bin/kvx-config" --cflags --libs) -o "$venv/client" &&
    [[ $("$venv/client") == "$("$venv/bin/kvx-config" --version)" ]] ||
    fail "a C program cannot use the library that the wheel holds"
  cat >"$venv/CMakeLists.txt" <<'END'
cmake_minimum_required(VERSION 3.22)
project(client C CXX)
find_package(kvx REQUIRED)
add_executable(client_by_cmake client.c)
target_link_libraries(client_by_cmake kvx::kvx)
END
  cmake -S "$venv" -B "$venv/cmake" -G Ninja \
    "-Dkvx_DIR=$("$venv/bin/kvx-config" --cmakedir)" >"$venv/cmake.log" 2>&1 &&
    cmake --build "$venv/cmake" >>"$venv/cmake.log" 2>&1 &&
    [[ $("$venv/cmake/client_by_cmake") == "$("$venv/client")" ]] ||
    fail "CMake cannot use the package that the wheel holds; see $venv/cmake.log"
  KVX_TEST_MODEL=$(model_path) KVX_TEST_TEXT=$(text_path) PYTHONDONTWRITEBYTECODE=1 \
    "$venv/bin/python" -m pytest -q -p no:cacheprovider tests/python ||
    fail "the tests fail on the installed wheel"
  did "tests/python pass on $("$python" -V)"
}
