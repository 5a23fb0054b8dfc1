"""Checks the tree's text for ./dev format --check: the columns of Markdown, and forbidden words.

usage: check_text.py [ROOT]    exit code 1, and a line for each fault: path:line: what is wrong

Markdown has at most 100 columns. Exempt are bench/log, tests/README.md (a table that a test
reads, a file a line), what stands in a fence without a language or of `text` (output of a tool),
and a line that is one long link. tools/dev/forbidden_words.txt lists
the words; git grep finds them in tracked and new files.
"""

import re
import subprocess
import sys
from pathlib import Path

COLUMNS = 100
WORDS = "tools/dev/forbidden_words.txt"
OUTPUT_FENCES = ("", "text")
WIDE_TABLES = ("bench/log/", "tests/README.md")


def git(root, *arguments):
    """Lines of a git command's output. git grep ends with 1 where it finds nothing."""
    done = subprocess.run(
        ["git", "-C", str(root), *arguments], capture_output=True, text=True, errors="replace"
    )
    if done.returncode not in (0, 1) or done.stderr:
        sys.exit(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout.splitlines()


def files_of(root, *patterns):
    listed = ("ls-files", "--cached", "--others", "--exclude-standard", "--", *patterns)
    return [path for path in git(root, *listed) if (Path(root) / path).is_file()]


def wide_lines(text):
    """Yields (number, columns) of the lines that are too wide."""
    fence = None  # what follows ``` where the open fence begins
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            fence = line.strip()[3:] if fence is None else None
        is_one_link = re.fullmatch(r"\s*([-*] )?(\[[^\]]*\]:? ?)?\(?\S+\)?[.,;:]?", line)
        if len(line) > COLUMNS and fence not in OUTPUT_FENCES and not is_one_link:
            yield number, len(line)


class WordList:
    """The parsed list: exempt paths, allowed lines, and (regex, replacement, paths that may)."""

    def __init__(self, text):
        self.exempt, self.allowed, self.words = [], [], []
        for line in text.splitlines():
            if line.startswith("exempt:"):
                self.exempt += line.removeprefix("exempt:").split()
            elif line.startswith("allow:"):
                path, part = line.removeprefix("allow:").split(":", 1)
                self.allowed.append((path.strip(), part.strip()))
            elif line.strip() and not line.startswith("#"):
                regex, replacement, *paths = (part.strip() for part in line.split("=>"))
                self.words.append((regex, replacement, " ".join(paths).split()))

    def allows(self, path, line):
        return any(path == where and part in line for where, part in self.allowed)


def forbidden_words(root, word_list):
    """Yields path:line: word; write ... for each hit in a text or a path."""
    paths = files_of(root)
    for regex, replacement, may in word_list.words:
        skipped = [*word_list.exempt, *may]
        excluded = [f":(exclude){path}" for path in skipped]
        search = ("grep", "--untracked", "-nPI", "-e", regex, "--", ".", *excluded)
        for hit in git(root, *search):
            path, number, line = hit.split(":", 2)
            found = re.search(regex, line)
            if not word_list.allows(path, line):
                word = found[0] if found else line.strip()
                yield f"{path}:{number}: '{word}'; write {replacement}"
        for path in paths:
            # An underscore and a dot end a word of a path.
            found = re.search(regex, re.sub(r"[_./]", " ", path))
            if found and not any(path.startswith(prefix) for prefix in skipped):
                yield f"{path}: '{found[0]}' in its name; write {replacement}"


def main():
    root = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    faults = []
    for path in files_of(root, "*.md"):
        if not path.startswith(WIDE_TABLES):
            text = (root / path).read_text(encoding="utf-8")
            faults += [
                f"{path}:{number}: {columns} columns; at most {COLUMNS}"
                for number, columns in wide_lines(text)
            ]
    faults += forbidden_words(root, WordList((root / WORDS).read_text(encoding="utf-8")))
    print(*faults, sep="\n", end="\n" if faults else "")
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
