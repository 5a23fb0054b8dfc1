"""Writes the Python package's reference pages from its docstrings, and checks them.

    python tools/dev/python_docs.py [--with-torch] FOLDER

Fails on a warning, on a public name without a docstring, and on a link that leads nowhere.
"""

import argparse
import inspect
import re
import sys
import warnings
from html.parser import HTMLParser
from pathlib import Path

import pdoc
import pdoc.docstrings
import pdoc.render

# What needs nothing beside the package; then what its own extras need.
MODULES = ["kvx", "kvx.marlin", "kvx.turbomind", "kvx.engines", "kvx.plot", "kvx.types"]
NEED_TORCH = ["kvx.hf", "kvx.torch"]


def markdown(docstring: str, *_: object) -> str:
    """A docstring as markdown: its lines ``name, name:  text`` become a list, and lines indented
    under them stay with them."""
    lines, is_in_list = [], False
    for line in inspect.cleandoc(docstring).splitlines():
        item = re.match(r"^((?:\w+)(?:, \w+)*):\s+(.+)$", line)
        if item and not line.startswith(("Raises", "Returns")):
            if not is_in_list:
                lines.append("")
            lines.append(f"- **{item[1]}**: {item[2]}")
            is_in_list = True
        elif is_in_list and line.startswith(" "):
            lines[-1] += f" {line.strip()}"
        else:
            if is_in_list and line:
                lines.append("")
            is_in_list = is_in_list and not line
            lines.append(line)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines))


class Page(HTMLParser):
    """The links of a page, and the anchors that others may lead to."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.anchors: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value:
                self.anchors.add(value)
            if name == "href" and tag == "a" and value:
                self.links.add(value)


def dead_links(folder: Path) -> list[str]:
    """``page: link`` for every link inside of the folder that leads nowhere."""
    pages = {path.resolve(): Page(path) for path in folder.rglob("*.html")}
    dead = []
    for path, page in pages.items():
        for link in page.links:
            if re.match(r"\w+:", link):
                continue
            file, _, anchor = link.partition("#")
            target = pages.get((path.parent / file).resolve() if file else path)
            if target is None or (anchor and anchor not in target.anchors):
                dead.append(f"{path.relative_to(folder.resolve())}: {link}")
    return sorted(dead)


def undocumented(modules: list[str]) -> list[str]:
    """Public names of the modules, and of their classes, that say nothing of themselves."""
    missing = []
    for name in modules:
        for thing in pdoc.doc.Module.from_name(name).members.values():
            inner = list(thing.members.values()) if isinstance(thing, pdoc.doc.Class) else []
            for one in [thing, *inner]:
                is_callable = isinstance(one, pdoc.doc.Function | pdoc.doc.Class)
                is_ours = one.taken_from[0].startswith("kvx") and not one.name.startswith("_")
                if is_callable and is_ours and not one.docstring:
                    missing.append(f"{name}: {one.qualname}")
    return sorted(set(missing))


def build(folder: Path, modules: list[str]) -> list[str]:
    """Writes the pages; returns what is wrong with them."""
    pdoc.docstrings.convert = markdown
    pdoc.render.configure(docformat="markdown", search=True, show_source=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pdoc.pdoc(*modules, output_directory=folder)
    problems = [f"warning: {warning.message}" for warning in caught]
    problems += [f"no docstring: {name}" for name in undocumented(modules)]
    return problems + [f"dead link: {link}" for link in dead_links(folder)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--with-torch", action="store_true", help="also kvx.hf and kvx.torch")
    options = parser.parse_args()
    folder = options.folder
    modules = MODULES + (NEED_TORCH if options.with_torch else [])
    problems = build(folder, modules)
    print(*problems, sep="\n", file=sys.stderr)
    if problems:
        sys.exit(f"{len(problems)} problems in the Python reference")
    print(f"{folder}/index.html: {', '.join(modules)}")


if __name__ == "__main__":
    main()
