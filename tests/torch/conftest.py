"""Settings of the torch tests, which share tests/python's plain attention."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "python"))


@pytest.fixture(autouse=True)
def seeded():
    """The same random numbers at every run."""
    torch.manual_seed(0)
