"""The verbs on torch's OpenMP threads."""

import numpy as np
import pytest
import torch

import kvx
from kvx.threads import use_torch_threads


@pytest.fixture
def openmp():
    use_torch_threads()
    yield
    kvx.set_num_threads(0)


def test_results_are_those_of_kvxs_own_threads(openmp):
    x = np.random.default_rng(5).standard_normal((3000, 128)).astype(np.float32)
    torch.ones(1000, 1000) @ torch.ones(1000, 1000)
    by_torch = kvx.quantize(x, "nvfp4:search")
    kvx.set_num_threads(3)
    by_kvx = kvx.quantize(x, "nvfp4:search")
    assert by_torch.codes.tobytes() == by_kvx.codes.tobytes()
    assert by_torch.scales.tobytes() == by_kvx.scales.tobytes()


def test_a_library_that_is_not_there_is_refused():
    with pytest.raises(kvx.Error, match="'libgomp.so.999'; it is not loaded"):
        kvx.use_openmp("libgomp.so.999")
    with pytest.raises(kvx.Error, match="no OpenMP library with GOMP_parallel"):
        kvx.use_openmp("libc.so.6")
