"""LMDeploy with kvx in this process until a test ends."""

import os

import pytest

# LMDeploy compiles its portable operators, which takes longer than these tests.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
from steps import use_cpu  # noqa: E402

import kvx.lmdeploy  # noqa: E402
from kvx.lmdeploy.install import install, uninstall  # noqa: E402


@pytest.fixture(autouse=True)
def lmdeploy_as_it_was():
    yield
    kvx.lmdeploy.disable()
    uninstall()


@pytest.fixture
def stored_as(monkeypatch):
    """Call with a recipe: models that are made afterwards run on the CPU and store by it."""

    def choose(recipe):
        use_cpu(monkeypatch)
        monkeypatch.setenv(kvx.lmdeploy.RECIPE_VARIABLE, recipe)
        install()

    return choose
