"""Settings of all Python tests: the same examples at every run, none judged by its time."""

import numpy as np
import pytest
from hypothesis import settings

settings.register_profile("kvx", derandomize=True, deadline=None, max_examples=60, database=None)
settings.load_profile("kvx")


@pytest.fixture(autouse=True)
def seeded():
    """What pages draw without a seed of their own."""
    np.random.seed(0)
