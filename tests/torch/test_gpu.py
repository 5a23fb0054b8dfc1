"""gpu_smoke.py's checks, one test each: where torch sees no GPU each skips by name and is counted."""

import gpu
import gpu_smoke
import pytest


@pytest.mark.parametrize("name", gpu_smoke.CHECKS)
def test_on_a_gpu(name):
    gpu.library("torch")
    function, *arguments = gpu_smoke.CHECKS[name]
    function(*arguments)
