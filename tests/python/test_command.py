"""python -m kvx, and what importing the package does and does not need."""

import subprocess
import sys

import kvx


def run(*arguments):
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=300, check=False
    )


def test_python_m_kvx_is_the_command_line_tool():
    assert run("-m", "kvx", "--version").stdout.split()[1] == kvx.__version__
    formats = run("-m", "kvx", "formats")
    assert formats.returncode == 0 and "nvfp4" in formats.stdout
    assert run("-m", "kvx", "formats", "--colour").returncode == 2


def test_kvx_needs_neither_torch_nor_transformers():
    program = "import sys, kvx; print('torch' in sys.modules or 'transformers' in sys.modules)"
    assert run("-c", program).stdout.strip() == "False"


def test_without_transformers_kvx_hf_says_what_is_missing():
    absent = "import sys; sys.modules['transformers'] = None"
    failed = run("-c", f"{absent}; import kvx.hf")
    assert failed.returncode == 1 and "pip install 'kvx[hf]'" in failed.stderr
