"""How far quantised latent rows (MLA) are from exact ones, in rows and in attention's output.

    python bench/quality/latent_rows.py MODEL.gguf TEXT [--recipes int8+bf16,nvfp4+bf16] [--kl]

No model with latent attention has weights small enough for this machine, so rows are recorded from
two stand-ins:

- smollm2: a token's keys (before RoPE) and values of three neighbouring layers of the GGUF model on
  the text, 1152 numbers, brought to 512 by their principal components and to unit size by RMSNorm,
  as a DeepSeek layer does; behind them one head's keys after RoPE, 64 numbers. Queries are the
  model's own, absorbed by the same components.
- random: a DeepSeek-V3 model of the real row's size with random weights, on random tokens: what its
  layers hand to their cache, with its own absorbed queries.

Printed for each recipe: bits a number, the error of the latent numbers and of the rotary ones, and
the error of causal attention's output beside float64 on the exact rows, all relative, in percent;
means over layers. --kl adds the mean KL divergence of the random model's next-token distributions
from those with an f32 cache, in nats.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
import transformers

import kvx
import kvx.hf
from kvx.hf.layer import Layer

LATENT, ROTARY, BLOCK = 512, 64, 64
FITTED = 2048  # tokens that principal components are fitted to
RECIPES = (
    "bf16,fp8_e4m3:source=computed,fp8_e4m3+bf16:source=computed,int8,int8+bf16,nvfp4,nvfp4+bf16,"
    "nvfp4+bf16:4over6,mxfp4,mxfp4+bf16,int4,int4+bf16,int4+bf16:hadamard"
)


def smollm2_rows(gguf, text, tokens):
    """[(rows, queries, scale)] of groups of three layers; rows [tokens, 576], queries [tokens,
    heads, 576]."""
    source = dict(pretrained_model_name_or_path=gguf.parent, gguf_file=gguf.name)
    model = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
    ids = tokenizer(Path(text).read_text()[: 8 * FITTED], return_tensors="pt").input_ids
    recorded = record_projections(model, ids[:, :FITTED])
    config = model.config
    dim = config.head_dim
    cos, sin = model.model.rotary_emb(torch.zeros(1), torch.arange(FITTED)[None])
    return [
        smollm2_group(recorded[first : first + 3], dim, cos[0], sin[0], tokens)
        for first in range(0, len(recorded) - 2, 9)
    ]


def record_projections(model, ids):
    """A dict a layer: q_proj, k_proj and v_proj's outputs, [tokens, numbers], before RoPE."""
    recorded, hooks = [], []
    for layer in model.model.layers:
        recorded.append({})
        for name in ("q_proj", "k_proj", "v_proj"):
            module = getattr(layer.self_attn, name)
            hooks.append(module.register_forward_hook(_recorder(recorded[-1], name)))
    with torch.no_grad():
        model(ids)
    for hook in hooks:
        hook.remove()
    return recorded


def _recorder(into, name):
    def record(module, inputs, output):
        into[name] = output[0].double()

    return record


def smollm2_group(layers, dim, cos, sin, tokens):
    """One latent layer of three layers' keys and values: its first tokens."""
    sides = [layer[side] for layer in layers for side in ("k_proj", "v_proj")]
    wide = torch.cat(sides, dim=1)
    _, _, components = torch.linalg.svd(wide, full_matrices=False)
    basis = components[:LATENT].T  # [1152, 512]
    latent = wide @ basis
    size = latent.square().mean(dim=1, keepdim=True).sqrt()
    latent = latent / size
    k_heads = layers[0]["k_proj"].unflatten(1, (-1, dim))
    q_heads = layers[0]["q_proj"].unflatten(1, (-1, dim))
    group = q_heads.shape[1] // k_heads.shape[1]
    absorbed = [
        q_heads[:, head] @ basis[(head // group) * dim : (head // group + 1) * dim]
        for head in range(q_heads.shape[1])
    ]
    queries = torch.cat((torch.stack(absorbed, dim=1), rotated(q_heads, cos, sin)), dim=2)
    rows = torch.cat((latent, rotated(k_heads[:, :1], cos, sin)[:, 0]), dim=1)
    # RMSNorm takes a token's size away, which weights give back to all alike.
    queries[..., :LATENT] *= size.mean()
    return rows[:tokens], queries[:tokens], dim**-0.5 / 2**0.5


def rotated(heads, cos, sin):
    first, second = heads.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return heads * cos[:, None].double() + turned * sin[:, None].double()


def random_model(layers=4):
    torch.manual_seed(5)
    config = transformers.DeepseekV3Config(
        vocab_size=2048,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=layers,
        first_k_dense_replace=layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        q_lora_rank=192,
        kv_lora_rank=LATENT,
        qk_rope_head_dim=ROTARY,
        qk_nope_head_dim=128,
        v_head_dim=128,
        max_position_embeddings=4096,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    kvx.hf.enable(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "embed_tokens" not in name:
                parameter.mul_(4)  # else attention is nearly uniform, and says nothing of keys
    return model


def random_rows(model, ids):
    """[(rows, queries, scale)], a layer: what absorbed attention stores and asks."""
    found, stock = [], Layer.attend

    def record(layer, query, rows, value, mask, scaling, *options):
        found.append((rows[0, 0].double(), query[0].transpose(0, 1).double(), scaling))
        return stock(layer, query, rows, value, mask, scaling, *options)

    Layer.attend = record
    try:
        next_token_log_probabilities(model, ids, "f32")
    finally:
        Layer.attend = stock
    return found


def next_token_log_probabilities(model, ids, recipe):
    cache = kvx.hf.Cache(model.config, recipe, max_tokens=ids.shape[1] + 1)
    with torch.no_grad():
        return model(ids, past_key_values=cache).logits[0].double().log_softmax(-1)


def kl_divergence(model, ids, recipe):
    exact = next_token_log_probabilities(model, ids, "f32")
    found = next_token_log_probabilities(model, ids, recipe)
    return float((exact.exp() * (exact - found)).sum(-1).mean())


def errors_of(recipe, rows, queries, scale):
    """Bits a number, and relative errors of latent numbers, rotary ones and attention's output."""
    tokens = len(rows)
    layer = kvx.PagedLayer(
        recipe, num_kv_heads=1, head_dim=LATENT + ROTARY, v_head_dim=LATENT, latent=True,
        block_size=BLOCK,
    )  # fmt: skip
    count = -(-tokens // BLOCK)
    pages = np.zeros((count, layer.page_bytes), np.uint8)
    given = rows.float().numpy()[:, None]
    layer.append(pages, given, None, np.arange(tokens))
    stored, _ = layer.gather(pages, list(range(count)), tokens)
    found = layer.attend(
        pages,
        queries.float().numpy(),
        np.arange(count, dtype=np.int32)[None],
        np.array([tokens], np.int32),
        np.array([0, tokens], np.int32),
        softmax_scale=scale,
    )
    exact = exact_attention(rows, queries, scale)
    bits = layer.page_bytes * 8 / BLOCK / (LATENT + ROTARY)
    return (
        bits,
        relative_error(stored[:, 0, :LATENT], given[:, 0, :LATENT]),
        relative_error(stored[:, 0, LATENT:], given[:, 0, LATENT:]),
        relative_error(found, exact.numpy()),
    )


def exact_attention(rows, queries, scale):
    scores = torch.einsum("qhd,kd->hqk", queries, rows) * scale
    later = torch.ones(len(rows), len(rows), dtype=torch.bool).triu(1)
    weights = scores.masked_fill(later, -torch.inf).softmax(-1)
    return torch.einsum("hqk,kd->qhd", weights, rows[:, :LATENT])


def relative_error(found, expected):
    difference = np.asarray(found, np.float64) - expected
    return float(np.linalg.norm(difference) / np.linalg.norm(expected))


def tokens_read(layers):
    """How many tokens a query reads: e to the entropy of its weights, the mean of all."""
    worth = []
    for rows, queries, scale in layers:
        scores = torch.einsum("qhd,kd->hqk", queries[-64:], rows) * scale
        later = torch.arange(len(rows))[None] > torch.arange(len(rows) - 64, len(rows))[:, None]
        weights = scores.masked_fill(later, -torch.inf).softmax(-1)
        worth.append(float(torch.special.entr(weights).sum(-1).exp().mean()))
    return sum(worth) / len(worth)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("gguf", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--recipes", default=RECIPES)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--kl", action="store_true")
    options = parser.parse_args()
    model = random_model()
    ids = torch.randint(1, 2048, (1, options.tokens), generator=torch.Generator().manual_seed(3))
    sources = {
        "smollm2": smollm2_rows(options.gguf, options.text, options.tokens),
        "random": random_rows(model, ids),
    }
    for name, layers in sources.items():
        print(f"{name}: {len(layers)} layers, a query reads {tokens_read(layers):.0f} tokens")
    columns = [f"{name}: {what}" for name in sources for what in ("latent", "rotary", "output")]
    print("| recipe | bits |", " | ".join(columns + ["KL"] * options.kl), "|")
    print("|---|" + "---:|" * (1 + len(columns) + options.kl))
    for recipe in options.recipes.split(","):
        values = []
        for layers in sources.values():
            bits, *errors = np.mean([errors_of(recipe, *layer) for layer in layers], axis=0)
            values += [f"{100 * error:.3g}" for error in errors]
        if options.kl:
            values.append(f"{kl_divergence(model, ids, recipe):.3g}")
        print(f"| `{recipe}` | {bits:.2f} |", " | ".join(values), "|", flush=True)


if __name__ == "__main__":
    main()
