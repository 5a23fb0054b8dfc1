"""The documentation's code runs, and everything public is documented."""

import inspect
import os

import matplotlib
from pages import run_blocks

import kvx
import kvx.engines
import kvx.marlin
import kvx.plot
import kvx.turbomind


matplotlib.use("Agg")


def test_every_block_of_the_python_page_runs():
    assert run_blocks("docs/python.md") >= 5


def test_every_block_of_the_tiers_page_runs():
    # A machine may stall for longer than an answer may take there.
    patient = [("folder({folder})", "folder({folder}, timeout=60s)"), ("=500ms", "=60s")]
    assert run_blocks("docs/tiers.md", replaced=patient) == 5


def test_every_block_of_the_windows_page_runs():
    assert run_blocks("docs/full-precision-window.md") == 1


def test_every_block_of_the_engines_page_runs():
    assert run_blocks("docs/engines.md") == 2


def test_each_engine_is_shown_in_a_few_lines():
    assert run_blocks("docs/engines-by-example.md") == 12


def test_every_block_of_the_guard_page_runs():
    names = dict(model=os.environ["KVX_TEST_MODEL"], text=os.environ["KVX_TEST_TEXT"])
    assert run_blocks("docs/guard.md", **names) == 2


def test_everything_public_has_a_docstring():
    modules = [kvx, kvx.engines, kvx.marlin, kvx.plot, kvx.turbomind]
    things = [(name, getattr(module, name)) for module in modules for name in module.__all__]
    for name, thing in list(things):
        if inspect.isclass(thing):
            things += [(f"{name}.{n}", getattr(thing, n)) for n in dir(thing) if n[0] != "_"]
    missing = [
        name
        for name, thing in things
        if callable(thing) and not (inspect.getdoc(thing) or "").strip()
    ]
    assert not missing


def test_the_page_on_kv_events():
    assert run_blocks("docs/kv-events.md") == 1


def test_the_page_on_metrics():
    assert run_blocks("docs/metrics.md") == 1


def test_every_block_of_the_page_on_transfers_runs():
    assert run_blocks("docs/transfer.md") == 4
