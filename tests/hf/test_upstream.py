"""The script that runs transformers' own tests with the class swapped, on a checkout of three tests:
it tells what passes, what kvx refuses by design and what fails."""

import importlib.metadata
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent / "upstream.py"
TESTS = '''
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
import kvx.hf

def model():
    torch.manual_seed(7)
    sizes = dict(hidden_size=32, intermediate_size=32, num_attention_heads=2, vocab_size=32)
    sizes["eos_token_id"] = None  # else random weights may end a text early
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, **sizes)).eval()

def generated(**options):
    ids = torch.tensor([[1, 2, 3]])
    return model().generate(
        ids, max_new_tokens=3, return_dict_in_generate=True, pad_token_id=0, **options
    )

def test_generate_makes_kvx_caches():
    found = generated()
    caches = [value for value in found.values() if isinstance(value, kvx.hf.Cache)]
    assert len(caches) == 1 and caches[0].get_seq_length() == 5

def test_generate_with_attentions():
    generated(output_attentions=True)

def test_cache_that_fails():
    assert DynamicCache is None
'''


def run(checkout, *options):
    return subprocess.run(
        [sys.executable, SCRIPT, checkout, "--models", "llama", *options],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_passed_refused_and_failed_are_told_apart(tmp_path):
    for file in ("tests/utils/test_cache_utils.py", "tests/models/llama/test_modeling_llama.py"):
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).write_text("")
    (tmp_path / "tests/utils/test_cache_utils.py").write_text(TESTS)
    version = tmp_path / "src/transformers/__init__.py"
    version.parent.mkdir(parents=True)
    version.write_text(f'__version__ = "{importlib.metadata.version("transformers")}"\n')
    done = run(tmp_path)
    last = done.stdout.splitlines()
    assert last[-1] == "1 failed, 1 passed, 1 refused", done.stdout + done.stderr
    assert last[-2].endswith("::test_cache_that_fails") and done.returncode == 1
    assert any(line.startswith("refused   1: output_attentions is True;") for line in last)
    stock = run(tmp_path, "--stock").stdout.splitlines()
    assert stock[-1] == "2 failed, 1 passed", stock  # its caches are not kvx's


def test_another_version_and_what_is_no_checkout_are_refused(tmp_path):
    assert "expected a clone of transformers' repository" in run(tmp_path).stderr
