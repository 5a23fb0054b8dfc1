"""The documentation's blocks for PyTorch run, and everything public of kvx.torch is documented."""

import inspect

from pages import run_blocks

import kvx.torch


def test_every_block_of_the_python_page_for_torch_runs():
    assert run_blocks("docs/python.md", " torch") >= 3
    kvx.torch.unregister_layer("layer0")


def test_everything_public_has_a_docstring():
    things = [(name, getattr(kvx.torch, name)) for name in kvx.torch.__all__]
    for name, thing in list(things):
        if inspect.isclass(thing):
            things += [(f"{name}.{n}", getattr(thing, n)) for n in dir(thing) if n[0] != "_"]
    assert not [name for name, thing in things if not (inspect.getdoc(thing) or "").strip()]
