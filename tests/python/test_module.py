"""The compiled module beside other libraries of its process."""

import ctypes

import pytest

from kvx import _core

# A unique symbol of the standard library's templates, which the dynamic linker shares with every
# library of the process: a PyTorch of another compiler, imported later, ended the process by it. And
# a name of a library that is linked in.
NAMES = ["_ZZNSt19_Sp_make_shared_tag5_S_tiEvE5__tag", "sdsempty"]


@pytest.mark.parametrize("name", NAMES)
def test_shows_no_name_that_others_could_find(name):
    assert not hasattr(ctypes.CDLL(_core.__file__), name)
    assert hasattr(ctypes.CDLL(_core.__file__), "PyInit__core")
