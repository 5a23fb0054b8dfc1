"""Speculative decoding with trees of drafts, verified in one step of a kvx cache.

    python examples/python/draft_tree.py MODEL TEXT [--recipe int8] [--layers 2] [--tokens 64]

MODEL is a Llama model that transformers loads, a folder or a GGUF file. Its draft is made from it:
its first layers, and a linear map, fitted to TEXT, from what they compute to what the whole model
does before its head. TEXT's last words are the prompt. As in EAGLE a step goes like this:

    draft     a tree of likely continuations, level by level
    verify    all of its nodes at once: a tree mask shows each node its own branch
    accept    the longest path that the model itself would have said

A tree's nodes lie side by side in the cache, so they are all dropped (``end_step`` keeps what stands
before them), and the accepted path goes ahead of the next tree in the next step.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import kvx

WIDTHS = (4, 2, 1)  # children of a node: of the root, of its children, ...
FIT_TOKENS = 2048
PROMPT_TOKENS = 64


class Decoder:
    """The first layers of a Llama model, their keys and values in a kvx cache."""

    def __init__(self, model, num_layers, recipe, max_tokens):
        config = model.config
        self.model, self.layers = model.model, model.model.layers[:num_layers]
        self.head_dim = self.layers[0].self_attn.head_dim
        self.cache = kvx.Cache(
            num_layers=num_layers,
            num_kv_heads=config.num_key_value_heads,
            head_dim=self.head_dim,
            recipe=recipe,
            max_tokens=max_tokens,
        )
        self.sequence = self.cache.create_sequence()

    def states(self, ids, positions, tree_mask=None, kept=None):
        """What the layers compute for these tokens, [tokens, hidden]; the cache keeps the first
        ``kept`` of them, all when None."""
        hidden = self.model.embed_tokens(ids)
        rotary = self.model.rotary_emb(hidden[None], positions[None])
        self.cache.begin_step([(self.sequence, len(ids))])
        for index, layer in enumerate(self.layers):
            attention, normed = layer.self_attn, layer.input_layernorm(hidden)
            q, k, v = (
                project(normed).view(1, len(ids), -1, self.head_dim)
                for project in (attention.q_proj, attention.k_proj, attention.v_proj)
            )
            q, k = apply_rotary_pos_emb(q, k, *rotary, unsqueeze_dim=2)
            out = self.cache.append_and_attend(index, q[0], k[0], v[0], tree_mask=tree_mask)
            hidden = hidden + attention.o_proj(out.flatten(1))
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        self.cache.end_step(None if kept is None else [kept])
        return hidden


@dataclass
class Tree:
    """Tokens behind the sequence: ``chain`` follow each other, then come the nodes of a tree whose
    root is the chain's last token. parents: of each token, its place in ``tokens``; -1 for none."""

    tokens: list[int]
    parents: list[int]
    chain: int

    @classmethod
    def of_chain(cls, tokens):
        return cls(list(tokens), list(range(-1, len(tokens) - 1)), len(tokens))

    def add(self, token, parent):
        self.tokens.append(token)
        self.parents.append(parent)
        return len(self.tokens) - 1

    def mask(self):
        """uint8 [tokens, tokens]: each sees itself and what its parent sees."""
        mask = torch.eye(len(self.tokens), dtype=torch.uint8)
        for token, parent in enumerate(self.parents):
            if parent >= 0:
                mask[token] |= mask[parent]
        return mask

    def ids(self):
        return torch.tensor(self.tokens)

    def positions(self, start):
        return start + self.mask().sum(1, dtype=torch.int64) - 1

    def longest_path(self, said):
        """The nodes, from the root's child on, whose tokens are what the model said before them."""
        path, at = [], self.chain - 1
        while True:
            children = [
                node
                for node, parent in enumerate(self.parents)
                if parent == at and node >= self.chain and self.tokens[node] == said[at]
            ]
            if not children:
                return path
            at = children[0]
            path.append(at)


class Speculator:
    """A model and a draft of its first layers, each with a cache of its own."""

    def __init__(self, model, num_layers, recipe, max_tokens):
        self.model = model
        self.target = Decoder(model, len(model.model.layers), recipe, max_tokens)
        self.draft = Decoder(model, num_layers, recipe, max_tokens)
        self.map = None  # of the draft's states, and a one, to the states before the head

    def head(self, states):
        return self.model.lm_head(self.model.model.norm(states))

    def fit(self, ids):
        """Fits the draft's map by least squares, to what the model computes for ids."""
        positions = torch.arange(len(ids))
        found = [
            decoder.states(ids, positions, kept=0).float() for decoder in (self.draft, self.target)
        ]
        ones = torch.ones(len(ids), 1)
        features = torch.cat((found[0], ones), dim=1)
        ridge = 1e-3 * features.pow(2).mean() * len(ids)
        gram = features.T @ features + ridge * torch.eye(features.shape[1])
        self.map = torch.linalg.solve(gram, features.T @ found[1])

    def draft_logits(self, states):
        if self.map is None:
            return self.head(states)
        mapped = states.float() @ self.map[:-1] + self.map[-1]
        return self.head(mapped.to(states.dtype))

    def grow(self, chain, length):
        """A tree of drafts behind a chain of tokens that neither cache holds."""
        tree = Tree.of_chain(chain)
        level = [tree.chain - 1]
        for depth, width in enumerate(WIDTHS):
            # The first pass leaves the chain in the draft's cache; later ones drop all they add.
            kept = None if depth == 0 else 0
            first = 0 if depth == 0 else tree.chain
            mask = tree.mask()[first:, first:].contiguous()
            positions = tree.positions(length)[first:]
            states = self.draft.states(tree.ids()[first:], positions, mask, kept)
            best = self.draft_logits(states[[node - first for node in level]]).topk(width).indices
            level = [
                tree.add(token, node)
                for node, tokens in zip(level, best.tolist(), strict=True)
                for token in tokens
            ]
        return tree

    def generate(self, ids, max_new_tokens):
        """Greedy tokens, and how many steps of the model they took."""
        length = len(ids) - 1  # what both caches hold; the last token begins the first chain
        if length:
            for decoder in (self.target, self.draft):
                decoder.states(ids[:-1], torch.arange(length))
        chain, found, steps = ids[-1:].tolist(), [], 0
        while len(found) < max_new_tokens:
            tree = self.grow(chain, length)
            positions = tree.positions(length)
            states = self.target.states(tree.ids(), positions, tree.mask(), kept=tree.chain)
            said = self.head(states).argmax(-1).tolist()
            path = tree.longest_path(said)
            length += tree.chain
            chain = [tree.tokens[node] for node in path]
            chain.append(said[path[-1] if path else tree.chain - 1])
            found += chain
            steps += 1
        return found[:max_new_tokens], steps


def load(path):
    where = dict(pretrained_model_name_or_path=path)
    if path.suffix == ".gguf":
        where = dict(pretrained_model_name_or_path=path.parent, gguf_file=path.name)
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(**where)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--recipe", default="int8")
    parser.add_argument("--layers", type=int, default=2, help="of the draft")
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    model, tokenizer = load(options.model)
    text = options.text.read_text()
    ids = tokenizer(text, return_tensors="pt").input_ids[0]
    if len(ids) < 2 * PROMPT_TOKENS:
        parser.error(f"{options.text} has {len(ids)} tokens; {2 * PROMPT_TOKENS} are needed")
    prompt = ids[-PROMPT_TOKENS:]
    with torch.inference_mode():
        max_tokens = FIT_TOKENS + PROMPT_TOKENS + options.tokens + 64
        speculator = Speculator(model, options.layers, options.recipe, max_tokens)
        speculator.fit(ids[:-PROMPT_TOKENS][:FIT_TOKENS])
        tokens, steps = speculator.generate(prompt, options.tokens)
    print(tokenizer.decode(tokens))
    print(f"{len(tokens)} tokens in {steps} steps of the model: {len(tokens) / steps:.2f} a step")


if __name__ == "__main__":
    main()
