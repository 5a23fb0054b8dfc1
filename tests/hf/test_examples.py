"""The example of a long chat, on a tiny model with a tokenizer of bytes."""

import re
import runpy
import sys
from pathlib import Path

from conftest import for_this_transformers, save_tiny_model

EXAMPLES = Path(__file__).parents[2] / "examples" / "python"


def test_a_long_chat_takes_a_quarter_of_the_memory(tmp_path, monkeypatch, capsys):
    folder = save_tiny_model(tmp_path / "model", "llama")
    monkeypatch.setattr(sys, "argv", ["long_chat.py", folder, "6", "150"])
    example = tmp_path / "long_chat.py"
    example.write_text(for_this_transformers((EXAMPLES / "long_chat.py").read_text()))
    names = runpy.run_path(str(example))
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
