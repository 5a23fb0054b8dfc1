"""The types of kvx.hf and kvx.torch, and those of kvx with tensors: as tests/python/test_types.py."""

import importlib.util
from pathlib import Path


def test_a_users_script_is_told_what_is_wrong_and_nothing_else():
    path = Path(__file__).parents[1] / "python" / "test_types.py"
    spec = importlib.util.spec_from_file_location("types_of_python", path)
    types = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(types)
    types.check_script(Path(__file__).parent / "user_script.py")
