"""Runs the Python blocks of a documentation page, one after the other, in one namespace."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_blocks(page, kind="", replaced=(), **names):
    """Returns how many blocks the page has; a failing line shows its number in the page.

    kind: what follows "python" where a block begins; " gpu" for those that need one.
    replaced: (words of the page, what is run instead)."""
    text = (ROOT / page).read_text()
    for words, instead in replaced:
        assert words in text, words
        text = text.replace(words, instead)
    blocks = list(re.finditer(rf"^```python{kind}\n(.*?)^```", text, re.DOTALL | re.MULTILINE))
    for block in blocks:
        lines_before = text.count("\n", 0, block.start(1))
        exec(compile("\n" * lines_before + block[1], page, "exec"), names)  # noqa: S102
    return len(blocks)
