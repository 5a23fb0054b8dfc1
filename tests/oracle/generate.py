#!/usr/bin/env python3
"""Writes the golden files, or with --check compares them with the committed ones byte for byte."""

import argparse
import pathlib
import sys

from golden_files import (
    choices,
    codes,
    dual,
    fed,
    latent_fp8,
    packed,
    rows,
    sglang_latent,
    transformed,
    turbomind_blocks,
)
from golden_files.json_text import dump

MODULES = (codes, rows, choices, fed, dual, transformed, packed, turbomind_blocks, sglang_latent, latent_fp8)
DEFAULT = pathlib.Path(__file__).resolve().parent.parent / "golden"


def generate(folder):
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for module in MODULES:
        for name, content in module.files():
            text = dump(content)
            (folder / name).write_text(text, encoding="ascii", newline="\n")
            written.append(name)
    return written


def differences(made, committed, names):
    """One sentence for each file that is not the same in both folders."""
    on_disk = {path.name for path in committed.glob("*.json")}
    for name in sorted(on_disk - set(names)):
        yield f"{committed / name} is not made by the generator"
    for name in names:
        if name not in on_disk:
            yield f"{committed / name} is missing"
            continue
        ours, theirs = (made / name).read_bytes(), (committed / name).read_bytes()
        if ours != theirs:
            at = next(
                (i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b),
                min(len(ours), len(theirs)),
            )
            line = ours[:at].count(b"\n") + 1
            yield f"{committed / name} differs from the generator's at byte {at}, line {line}"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, default=DEFAULT, help="where to write")
    parser.add_argument("--check", type=pathlib.Path, help="folder of committed files to compare")
    arguments = parser.parse_args()
    names = generate(arguments.out)
    if arguments.check is None:
        return 0
    problems = list(differences(arguments.out, arguments.check, names))
    for problem in problems:
        print(problem, file=sys.stderr)
    print(f"{len(names)} golden files compared, {len(problems)} differ")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
