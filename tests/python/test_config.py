"""kvx-config. That a C program compiles by what it prints is tested on a wheel (./dev wheel)."""

import sys

import pytest

import kvx
from kvx import config


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A folder in the place of the installed package's."""
    monkeypatch.setattr(config, "_PACKAGE", tmp_path)
    return tmp_path


def run(monkeypatch, *options):
    monkeypatch.setattr(sys, "argv", ["kvx-config", *options])
    config.main()


def test_prints_what_a_compiler_needs_in_the_order_asked(package, monkeypatch, capsys):
    (package / "lib").mkdir()
    (package / "lib" / "libkvx.so.1").touch()
    run(monkeypatch, "--libs", "--cflags", "--cmakedir", "--version")
    lib = package / "lib"
    assert capsys.readouterr().out.split() == [
        f"-L{lib}",
        "-l:libkvx.so.1",
        f"-Wl,-rpath,{lib}",
        f"-I{package / 'include'}",
        str(lib / "cmake" / "kvx"),
        kvx.__version__,
    ]


def test_says_where_no_library_is(package, monkeypatch, capsys):
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, "--libs")
    assert ended.value.code == 1
    assert f"there is no libkvx.so in {package / 'lib'}; install the kvx wheel" in (
        capsys.readouterr().err
    )


def test_names_the_options_where_none_is_given(monkeypatch, capsys):
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch)
    assert ended.value.code == 2
    assert "expected one of --cflags, --libs, --cmakedir, --version" in capsys.readouterr().err
