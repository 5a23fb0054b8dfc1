"""The example of a long chat, on a tiny model with a tokenizer of bytes."""

import re
import runpy
import sys
from pathlib import Path

import pytest
from conftest import tiny_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

EXAMPLES = Path(__file__).parents[2] / "examples" / "python"
TEMPLATE = (
    "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)


@pytest.fixture
def model_folder(tmp_path):
    model = tiny_model("llama", vocab_size=256, max_position_embeddings=4096)
    model.generation_config.eos_token_id = None
    model.save_pretrained(tmp_path)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=TEMPLATE)
    fast.save_pretrained(tmp_path)
    return str(tmp_path)


def test_a_long_chat_takes_a_quarter_of_the_memory(model_folder, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["long_chat.py", model_folder, "6", "150"])
    names = runpy.run_path(str(EXAMPLES / "long_chat.py"))
    out = capsys.readouterr().out
    lines = re.findall(r"^ *(\d+) tokens .* ([\d.]+)$", out, re.MULTILINE)
    assert len(lines) == 6 and [int(tokens) for tokens, _ in lines] == sorted(
        int(tokens) for tokens, _ in lines
    )
    tokens, share = int(lines[-1][0]), float(lines[-1][1])
    assert tokens == names["cache"].get_seq_length() > 900
    assert share < 0.5  # 80 full-precision tokens weigh on a short chat
    costs = [names[which].cost(32768).bytes_per_token for which in ("cache", "full_precision")]
    assert costs[0] / costs[1] < 0.29
