"""What a user of torch and transformers writes; test_types.py reads it, as tests/python's does."""

import torch
from transformers import AutoModelForCausalLM

import kvx
import kvx.hf
import kvx.torch

x = torch.zeros(4, 64)
rows = kvx.quantize(x, "int8")
decoded: torch.Tensor = rows.dequantize(torch.bfloat16) + kvx.dequantize(rows, torch.float16)
cache = kvx.Cache(
    num_layers=1,
    num_kv_heads=2,
    head_dim=64,
    recipe="int8",
    max_tokens=64,
    device=torch.device("cpu"),
)
q = torch.zeros(1, 2, 64)
out: torch.Tensor = cache.append_and_attend(0, q, q, q)
keys, values = cache.gather(0, 0, like=q)
total = keys.sum().item() + values.norm().item()

model = kvx.hf.enable(AutoModelForCausalLM.from_pretrained("a model"))
chat = kvx.hf.Cache(model.config, "nvfp4:auto", layer_recipes={0: "bf16"})
used: int = chat.memory() + chat.cost(4096).tokens_per_gib
chat.crop(-5)
figures = kvx.hf.compare(model, [1, 2, 3], ["int8"])[0].kl.value + 1.0
attended: torch.Tensor = kvx.torch.attention(x, x, x, recipe="int8")
codes, scales = kvx.torch.quantize(x, "int8")

cache.append_and_attend(0, q, [q], q)  # error: "append_and_attend" of "Cache" has incompatible type
kvx.hf.Cache(model.config)  # error: Missing positional argument "recipe"
kvx.hf.Cache(model.config, 8)  # error: "Cache" has incompatible type "int"; expected "str"
chat.crop("5")  # error: "crop" of "Cache" has incompatible type "str"; expected "int"
kvx.torch.attention(x, x, x)  # error: Missing named argument "recipe"
kvx.torch.quantize(codes, 8)  # error: "quantize" has incompatible type "int"; expected "str"
