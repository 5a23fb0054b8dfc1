"""``kvx-config``: how a C or C++ program compiles against the library that this package holds."""

import argparse
from pathlib import Path

_PACKAGE = Path(__file__).parent


def include_dir() -> Path:
    """The folder that holds ``kvx/kvx_abi.h`` and ``kvx/kvx.hpp``."""
    return _PACKAGE / "include"


def library() -> Path:
    """The shared library. Raises FileNotFoundError: the package was not installed from a wheel."""
    found = sorted((_PACKAGE / "lib").glob("libkvx.so.*"))
    if not found:
        raise FileNotFoundError(
            f"there is no libkvx.so in {_PACKAGE / 'lib'}; install the kvx wheel, or use the "
            f"library that cmake --install put elsewhere"
        )
    return found[0]


def cmake_dir() -> Path:
    """What CMake takes as kvx_DIR or in CMAKE_PREFIX_PATH."""
    return library().parent / "cmake" / "kvx"


def main() -> None:
    """The program ``kvx-config``."""
    parser = argparse.ArgumentParser(
        prog="kvx-config",
        description="Prints how a C or C++ program compiles and links against this kvx, e.g. "
        "cc engine.c $(kvx-config --cflags --libs). The order of the options is kept.",
    )
    add = parser.add_argument
    add("--cflags", dest="wanted", action="append_const", const="cflags", help="compiler options")
    add("--libs", dest="wanted", action="append_const", const="libs", help="linker options")
    add("--cmakedir", dest="wanted", action="append_const", const="cmakedir", help="kvx_DIR")
    add("--version", dest="wanted", action="append_const", const="version")
    wanted = parser.parse_args().wanted
    if not wanted:
        parser.error("expected one of --cflags, --libs, --cmakedir, --version")
    try:
        print(*(_answer(what) for what in wanted))
    except FileNotFoundError as error:
        parser.exit(1, f"kvx-config: {error}\n")


def _answer(what: str) -> str | Path:
    if what == "cflags":
        return f"-I{include_dir()}"
    if what == "libs":
        file = library()
        return f"-L{file.parent} -l:{file.name} -Wl,-rpath,{file.parent}"
    if what == "cmakedir":
        return cmake_dir()
    from kvx import __version__

    return str(__version__)


if __name__ == "__main__":
    main()
