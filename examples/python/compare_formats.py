# What formats cost and lose on your own model. The lines "# %%" begin the cells of a notebook, in
# Jupyter (jupytext), VS Code or PyCharm; python runs it as well:
#
#     python compare_formats.py MODEL.gguf TEXT.txt [CONTEXT] [WINDOWS]

# %% A GGUF file of the Llama family, and a text that the model should know how to go on with.
import sys

import numpy as np

import kvx

model, text = sys.argv[1:3]
context, windows = (int(word) for word in (*sys.argv[3:5], "1024", "4")[:2])
recipes = ["int8", "int4", "nvfp4", "nvfp4:auto"]

# %% The formats that there are, and what each stores.
kvx.formats()

# %% Perplexity and KL divergence against a cache of bf16, token by token on the same windows. For a
# transformers model: kvx.hf.compare(model, tokens, recipes).
figures = kvx.compare(model, text, recipes, context=context, windows=windows)
print(figures)

# %% The same as a picture: the lower left is where one wants to be.
import kvx.plot

axes = kvx.plot.comparison(figures)

# %% What a sequence of this model's takes in memory (SmolLM2-135M's sizes; write yours).
sizes = dict(num_layers=30, num_kv_heads=3, head_dim=64)
axes = kvx.plot.memory(["bf16", *recipes], **sizes)

# %% Where the loss comes from: how far single numbers are from what they were. Keys have channels
# much larger than the others, which share a scale with them; a rotation ("hadamard") spreads them.
keys = np.random.default_rng(0).standard_normal((4096, 64)).astype(np.float32)
keys[:, 5] *= 20
axes = kvx.plot.errors(keys, ["int4", "int4:hadamard", "nvfp4", "nvfp4:search"])
