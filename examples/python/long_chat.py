# A long chat in a quarter of the memory. The lines "# %%" begin the cells of a notebook, in Jupyter
# (jupytext), VS Code or PyCharm; python runs it as well:
#
#     python long_chat.py [MODEL] [TURNS] [TOKENS A TURN]

# %% Any decoder of transformers with full or sliding-window attention, and its own cache's price.
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvx.hf

defaults = ["HuggingFaceTB/SmolLM2-135M-Instruct", "12", "200"]
name, turns, reply = sys.argv[1:] + defaults[len(sys.argv) - 1 :]
tokenizer = AutoTokenizer.from_pretrained(name)
model = kvx.hf.enable(AutoModelForCausalLM.from_pretrained(name, dtype="auto").eval())
cache = kvx.hf.Cache(model.config, "nvfp4:auto")
full_precision = kvx.hf.Cache(model.config, "bf16")  # stays empty but for a token: it says what bf16 costs
with torch.no_grad():
    model(torch.tensor([[0]]), cache=full_precision)


# %% One cache for the whole chat: a turn computes its own tokens alone. The text of an answer may
# have other tokens than those that were said; from there on they are taken back, in whole blocks.
def say(messages):
    text = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
    ids = tokenizer.apply_chat_template(messages, **text)["input_ids"]
    known = said[: cache.get_seq_length()]
    same = next((i for i, (a, b) in enumerate(zip(known, ids[0])) if a != b), len(known))
    if same < len(known):
        cache.crop(same - same % cache.block_size - len(known))
    whole = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        cache=cache,
        max_new_tokens=int(reply),
        do_sample=False,
    )
    return whole[0], tokenizer.decode(whole[0, ids.shape[1] :], skip_special_tokens=True)


# %% The chat. Every line: tokens so far, and what they take.
questions = [
    "Tell me about the city of Lisbon.",
    "What should I see there first?",
    "And what would I eat on the way?",
    "Sum up what you said so far.",
]
messages, said = [], torch.tensor([], dtype=torch.long)
for turn in range(int(turns)):
    messages.append({"role": "user", "content": questions[turn % len(questions)]})
    said, answer = say(messages)
    messages.append({"role": "assistant", "content": answer})
    tokens = cache.get_seq_length()
    packed, full = cache.memory() / 2**20, full_precision.cost(tokens).bytes_per_token * tokens / 2**20
    print(f"{tokens:6} tokens  {packed:7.2f} MiB of {full:7.2f}, {packed / full:.2f}")

# %% The last answer, and what the same memory would hold.
print(messages[-1]["content"])
print(cache.cost(32768).tokens_per_gib, "tokens in a GiB;", full_precision.cost(32768).tokens_per_gib, "bf16")
