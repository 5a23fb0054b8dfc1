"""The package's types: it passes mypy --strict itself, and a user's script is told what is wrong in
it and nothing else."""

import re
import subprocess
import sys
from pathlib import Path

import kvx

HERE = Path(__file__).parent
PACKAGE = Path(kvx.__file__).parent
# kvx.hf, kvx.lmdeploy, kvx.torch and kvx.vllm extend libraries that this environment does not have.
MODULES = sorted(p.stem for p in PACKAGE.glob("*.py"))
# Of torch and transformers, which mypy reads for a minute, there is one for each environment.
MYPY_CACHE = Path(sys.prefix) / "mypy_cache"


def mypy(*arguments):
    # mypy finds an installed package by itself, and refuses to be told where.
    is_installed = PACKAGE.parent.name == "site-packages"
    where = {} if is_installed else {"MYPYPATH": str(PACKAGE.parent)}
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--hide-error-context"]
        + ["--cache-dir", str(MYPY_CACHE), *map(str, arguments)],
        capture_output=True,
        text=True,
        env={"PATH": "", **where},
    )
    assert done.returncode in (0, 1), done.stderr
    return done.stdout


def test_the_package_passes_strict_mypy():
    assert (PACKAGE / "_core.pyi").exists()  # the target kvx_python_stub
    modules = [f"--module=kvx.{name}" for name in MODULES if name != "__init__"]
    found = mypy("--module=kvx", *modules).splitlines()
    # nanobind writes the stub, with bare dict and list for what the package turns into dataclasses.
    assert [line for line in found if "_core.pyi" not in line] == []


def check_script(script):
    found = {}
    for line in mypy("--follow-imports=silent", script).splitlines():
        place = re.match(r".*user_script\.py:(\d+): error: (.*)", line)
        if place:
            found.setdefault(int(place[1]), []).append(place[2])
    expected = {
        i: line.split("# error: ")[1]
        for i, line in enumerate(script.read_text().splitlines(), 1)
        if "  # error: " in line
    }
    assert expected and found.keys() == expected.keys(), found
    for number, words in expected.items():
        assert any(words in message for message in found[number]), (number, words, found[number])


def test_a_users_script_is_told_what_is_wrong_and_nothing_else():
    check_script(HERE / "user_script.py")


def test_the_package_says_that_it_has_types():
    assert (PACKAGE / "py.typed").exists()
