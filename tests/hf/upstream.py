"""Runs transformers' own cache and generation tests with kvx.hf.Cache in DynamicCache's place.

    python tests/hf/upstream.py CHECKOUT [--models llama,mistral] [--stock] [-- PYTEST OPTIONS]

CHECKOUT is a clone of transformers at the tag of the version that is installed; its tests are not
in the wheel, nor in the sdist. The models compute with the attention implementation "kvx", and
generate() makes f32 kvx caches where it would make DynamicCaches, so tokens must be equal. What kvx
refuses by design (kvx.UnsupportedError; docs/transformers.md has the table) counts apart from
failures. The last line counts all; the exit code is 1 where anything else failed or nothing passed.

--stock runs the same tests without kvx: what fails there as well is no failure of kvx's.
"""

import argparse
import importlib.metadata
import re
import sys
from collections import Counter
from pathlib import Path

import pytest

CHOSEN = "generat or cache or Cache or beam or greedy or sample or assisted"


class Swap:
    """The pytest plugin: swaps the class, and tells refusals from failures."""

    def __init__(self, is_stock):
        self.is_stock = is_stock
        self.counts, self.refusals, self.failures = Counter(), Counter(), []

    def pytest_configure(self):
        if self.is_stock:
            return
        import transformers
        from transformers.generation import utils

        import kvx.hf

        dynamic = transformers.DynamicCache

        def cache_of(*args, config=None, **options):
            """What generate() calls. Without a config there is nothing to make a kvx cache from."""
            is_kvx = getattr(config, "_attn_implementation", None) == kvx.hf.NAME
            if args or not is_kvx:
                return dynamic(*args, config=config, **options)
            return kvx.hf.Cache(config, "f32")

        utils.DynamicCache = cache_of
        init = transformers.PreTrainedModel.__init__

        def init_with_kvx(model, config, *args, **options):
            config._attn_implementation = kvx.hf.NAME
            init(model, config, *args, **options)

        transformers.PreTrainedModel.__init__ = init_with_kvx

    def pytest_runtest_logreport(self, report):
        if report.when != "call" and not (report.when == "setup" and report.outcome != "passed"):
            return
        outcome = report.outcome
        if outcome == "failed":
            refused = re.search(r"UnsupportedError: (.*)", report.longreprtext)
            if refused:
                outcome = "refused"
                self.refusals[refused[1]] += 1
            else:
                self.failures.append(report.nodeid)
        self.counts[outcome] += 1


def tests_of(parser, checkout, models):
    """The test files of a checkout. Ends with a message: another version, or no clone."""
    tests = [checkout / "tests" / "utils" / "test_cache_utils.py"]
    tests += [
        checkout / "tests" / "models" / model / f"test_modeling_{model}.py" for model in models
    ]
    missing = [str(test) for test in tests if not test.exists()]
    if missing:
        parser.error(f"{missing[0]} is not there; expected a clone of transformers' repository")
    installed = importlib.metadata.version("transformers")
    if f'"{installed}"' not in (checkout / "src" / "transformers" / "__init__.py").read_text():
        parser.error(f"{checkout} is not of transformers {installed}, which is installed")
    return tests


def _split(arguments):
    """The arguments before "--", and those behind it, which are pytest's."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:end], arguments[end + 1 :]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--models", default="llama,mistral")
    parser.add_argument("--stock", action="store_true", help="without kvx")
    arguments, pytest_options = _split(sys.argv[1:])
    options = parser.parse_args(arguments)
    checkout = options.checkout.resolve()
    tests = tests_of(parser, checkout, options.models.split(","))
    sys.path.insert(0, str(checkout))
    swap = Swap(options.stock)
    pytest.main(
        ["-q", "--rootdir", str(checkout), "-p", "no:cacheprovider", "-k", CHOSEN]
        + [*map(str, tests), *pytest_options],
        plugins=[swap],
    )
    for reason, count in swap.refusals.most_common():
        print(f"refused {count:3}: {reason}")
    for name in swap.failures:
        print(f"failed: {name}")
    print(", ".join(f"{count} {outcome}" for outcome, count in sorted(swap.counts.items())))
    return 1 if swap.failures or not swap.counts["passed"] else 0


if __name__ == "__main__":
    sys.exit(main())
