"""Makes vLLM find kvx's entry point: the package is not installed here but built. What several files'
tests begin with is here, too."""

import os
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests/python"))  # real_model.py


@pytest.fixture(scope="session", autouse=True)
def installed(tmp_path_factory):
    """A dist-info folder with pyproject.toml's entry points, on the path of every process."""
    site = tmp_path_factory.mktemp("site")
    info = site / "kvx-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvx\nVersion: 0\n")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {target}" for name, target in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    sys.path.append(str(site))
    os.environ["PYTHONPATH"] = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(site)])
    return site


@pytest.fixture
def in_this_process(monkeypatch):
    """vLLM's engine core beside the test, which may look into it."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with a tiny random Llama."""
    from engines import save_model  # imports vLLM, which wants `installed` first

    return save_model("llama", tmp_path_factory.mktemp("llama"))
