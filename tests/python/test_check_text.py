"""tools/dev/check_text.py finds what ./dev format --check refuses."""

import subprocess
import sys
from pathlib import Path

import pytest

CHECKER = Path(__file__).parents[2] / "tools" / "dev" / "check_text.py"
WORDS = r"""
exempt: log/
allow: page.md: the old door of
(?i)\bdoors?\b  =>  API boundary  =>  houses/
"""


@pytest.fixture
def check(tmp_path):
    """Writes files into a new tree and returns the checker's lines for it."""
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)

    def run(**files):
        for path, text in {"tools/dev/forbidden_words.txt": WORDS, **files}.items():
            place = tmp_path / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text)
        (tmp_path / ".gitignore").write_text("tools/\n")
        done = subprocess.run(
            [sys.executable, CHECKER, tmp_path], capture_output=True, text=True, check=False
        )
        assert done.returncode == (1 if done.stdout else 0), done.stderr
        return done.stdout.splitlines()

    return run


def test_a_forbidden_word_is_named_with_its_place_and_its_replacement(check):
    assert check(**{"a.cpp": "int x;\n// Behind a Door.\n"}) == [
        "a.cpp:2: 'Door'; write API boundary"
    ]


def test_a_forbidden_word_in_a_path_is_found(check):
    assert check(**{"src/door_test.cpp": "int x;\n"}) == [
        "src/door_test.cpp: 'door' in its name; write API boundary"
    ]


def test_exempt_folders_and_allowed_lines_are_left_alone(check):
    assert not check(
        **{"log/a.md": "a door", "houses/a.cpp": "// door", "page.md": "Once the old door of kvx"}
    )


def test_an_allowed_line_allows_no_other(check):
    assert len(check(**{"page.md": "the old door of kvx\na new door\n"})) == 1


def test_markdown_has_at_most_100_columns(check):
    assert check(**{"a.md": "x " * 50 + "\n" + "y " * 51 + "\n"}) == [
        "a.md:2: 102 columns; at most 100"
    ]


def test_columns_are_characters_not_bytes(check):
    assert not check(**{"a.md": "─ " * 50})


def test_output_of_a_tool_and_one_long_link_may_be_wide(check):
    wide = "y " * 60
    assert not check(**{"a.md": f"```\n{wide}\n```\n- [name](https://{'x' * 100})\n"})
    assert len(check(**{"a.md": f"```python\n{wide}\n```\n{wide}\n"})) == 2
