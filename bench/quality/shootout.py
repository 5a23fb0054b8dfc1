"""kvx's formats of few bits beside published rules: one model, the same texts, one frame.

    python bench/quality/shootout.py MODEL.gguf TEXT... [--windows 2] [--first 0] [--block 64]
        [--calibration TEXT] [--only WORDS]

Every cache sees the same windows of 2048 tokens. kvx's run for real, through kvx.hf.Cache; the
others are the rules of published_rules.py on the rows of the same model, block by block. In the
common frame all keep what kvx's `auto` keeps in full precision: the first block, and at least 64
tokens before every query, in whole blocks. llama.cpp has no such window: its formats are also shown
with every token quantised ("no window").

Printed: bits a number with all scales and zeros (not the window), and for each text the mean KL
divergence of the predictions of each window's second half from those with exact rows in nats, the
change of perplexity in %, and how often both put the same token first. --calibration adds kvx's
dual-scale formats with K's error feedback, calibrated on that text.
"""

import argparse
import math
import tempfile
from pathlib import Path

import published_rules
import torch
import transformers
from torch.nn.functional import cross_entropy

import kvx
import kvx.hf
from kvx.hf.interface import passed

WINDOW, RECENT, CHUNK = 2048, 64, 512
RECIPES = (
    "int8:auto",
    "nvfp4:auto",
    "int4:auto",
    "int4_dual/int3_dual:auto",
    "int3_dual:auto",
    "int3_dual/int2_dual:auto",
    "int2_dual:auto",
)
CALIBRATED = ("int3_dual:auto", "int3_dual/int2_dual:auto", "int2_dual:auto")
NAME = "shootout"  # of the attention function below


class Frame:
    """The rule that attention reads through, and which blocks it leaves exact."""

    def __init__(self, block):
        self.block = block
        self.rule = None  # none: exact rows
        self.has_window = True

    def quantised(self, x, rule):
        """x: [heads, tokens, head_dim] of whole blocks."""
        return rule(x.unflatten(1, (-1, self.block))).flatten(1, 2)

    def attend(self, module, query, key, value, mask, scaling, **options):
        """One window without a cache: query [1, q_heads, tokens, head_dim], causal."""
        query, key, value = query[0], key[0], value[0]
        tokens = query.shape[1]
        exact = (key, value)
        packed = exact
        if self.rule is not None:
            packed = (
                self.quantised(key, self.rule.quantise_k),
                self.quantised(value, self.rule.quantise_v),
            )
        out = torch.empty_like(query)
        # A query's own block is open: queries of one block read the same rows.
        for first in range(0, tokens, self.block):
            end = first + self.block
            rows = [self.mixed(e, p, first, end) for e, p in zip(exact, packed)]
            out[:, first:end] = causal(query[:, first:end], *rows, first, scaling)
        return out.transpose(0, 1)[None], None

    def mixed(self, exact, packed, first_query, end):
        """Rows that queries from first_query on read: all but the window's are quantised."""
        if not self.has_window:
            return packed[:, :end]
        low = self.block
        high = max(low, (first_query - RECENT) // self.block * self.block)
        return torch.cat([exact[:, :low], packed[:, low:high], exact[:, high:end]], 1)


def causal(query, key, value, first, scaling):
    repeats = query.shape[0] // key.shape[0]
    key, value = key.repeat_interleave(repeats, 0), value.repeat_interleave(repeats, 0)
    scores = query @ key.transpose(1, 2) * scaling
    positions = torch.arange(key.shape[1])
    hidden = positions[None] > first + torch.arange(query.shape[1])[:, None]
    return scores.masked_fill(hidden, float("-inf")).softmax(-1) @ value


class Score:
    """Sums over scored tokens of one cache beside exact rows."""

    def __init__(self):
        self.tokens = self.kl = self.loss = self.base_loss = self.same = 0

    def add(self, base, found, targets):
        for right, other, target in zip(base.split(128), found.split(128), targets.split(128)):
            right, other = right.log_softmax(-1), other.log_softmax(-1)
            self.kl += float((right.exp() * (right - other)).sum())
            self.loss += float(cross_entropy(other, target, reduction="sum"))
            self.base_loss += float(cross_entropy(right, target, reduction="sum"))
            self.same += int((right.argmax(-1) == other.argmax(-1)).sum())
            self.tokens += len(target)

    def columns(self):
        change = 100 * math.expm1((self.loss - self.base_loss) / self.tokens)
        return (
            f"{self.kl / self.tokens:.5f} | {change:+.2f} | {100 * self.same / self.tokens:.1f}"
        )


class Shootout:
    def __init__(self, model, texts, block):
        """texts: of each its windows."""
        self.model, self.texts, self.block = model, texts, block
        self.frame = Frame(block)
        transformers.AttentionInterface.register(NAME, self.frame.attend)
        transformers.AttentionMaskInterface.register(NAME, lambda *args, **options: None)
        model.set_attn_implementation(NAME)
        self.bases = [[self.states(window) for window in windows] for windows in texts]

    def states(self, window, cache=None):
        """The last states of the second half's tokens that have a next token."""
        parts = window[None].split(CHUNK if cache is not None else WINDOW, dim=1)
        options = passed(self.model, cache) if cache is not None else {"use_cache": False}
        found = [self.model.model(input_ids=part, **options).last_hidden_state[0] for part in parts]
        return torch.cat(found)[WINDOW // 2 : -1]

    def by_rule(self, rule, has_window):
        """(bits, a Score for each text)."""
        self.frame.rule, self.frame.has_window = rule, has_window
        self.model.set_attn_implementation(NAME)
        return rule.bits(self.model.config.head_dim, self.block), self.scores(self.states)

    def by_kvx(self, recipe):
        """(bits, a Score for each text)."""
        kvx.hf.enable(self.model)
        bits = []

        def run(window):
            cache = kvx.hf.Cache(
                self.model.config, recipe, max_tokens=WINDOW, block_size=self.block
            )
            states = self.states(window, cache)
            bits[:] = [cache.cost(WINDOW).bits_per_value]
            return states

        scores = self.scores(run)
        return bits[0], scores

    def scores(self, run):
        scores = []
        for windows, bases in zip(self.texts, self.bases):
            scores.append(Score())
            for window, base in zip(windows, bases):
                head = self.model.lm_head
                scores[-1].add(head(base), head(run(window)), window[WINDOW // 2 + 1 :])
        return scores


def calibrated(model, tokenizer, text, recipe, block, folder):
    tokens = tokenizer(text, return_tensors="pt").input_ids[0].tolist()
    out = str(Path(folder) / f"{recipe.split(':')[0].replace('/', '-')}.kvxtune")
    kvx.hf.tune(
        model,
        tokens,
        out,
        recipe=recipe,
        num_prompts=2,
        tables=("k_feedback",),
        block_size=block,
        shows_progress=False,
    )
    return f"tuned:{out}"


def contenders(options, model, tokenizer, shootout, folder):
    """(name, what measures it), kvx's first."""
    for recipe in RECIPES:
        yield recipe, lambda recipe=recipe: shootout.by_kvx(recipe)
    for recipe in CALIBRATED if options.calibration else ():

        def with_feedback(recipe=recipe):
            text = options.calibration.read_text()
            return shootout.by_kvx(
                calibrated(model, tokenizer, text, recipe, options.block, folder)
            )

        yield f"{recipe}, K's error feedback", with_feedback
    for rule in published_rules.RULES:
        yield rule.name, lambda rule=rule: shootout.by_rule(rule, True)
        if rule.name.startswith("llama.cpp"):
            yield f"{rule.name}, no window", lambda rule=rule: shootout.by_rule(rule, False)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("gguf", type=Path)
    parser.add_argument("texts", type=Path, nargs="+")
    parser.add_argument("--windows", type=int, default=2)
    parser.add_argument("--first", type=int, default=0, help="the first window of a text")
    parser.add_argument("--block", type=int, default=64, choices=(64, 128))
    parser.add_argument("--calibration", type=Path, help="a text that is none of TEXT")
    parser.add_argument("--only", default="", help="parts of names, separated by semicolons")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    if options.windows < 1 or options.first < 0:
        parser.error(f"--windows is {options.windows} and --first {options.first}; expected at "
                     f"least 1 and 0")
    torch.set_num_threads(options.threads)
    kvx.set_num_threads(options.threads)
    source = dict(
        pretrained_model_name_or_path=options.gguf.parent, gguf_file=options.gguf.name
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
    texts = []
    for text in options.texts:
        ids = tokenizer(text.read_text(), return_tensors="pt").input_ids[0]
        texts.append(ids.split(WINDOW)[options.first : options.first + options.windows])
        if len(texts[-1]) < options.windows or len(texts[-1][-1]) < WINDOW:
            parser.error(f"{text} has {len(ids)} tokens; the windows asked for need more")
    with torch.inference_mode(), tempfile.TemporaryDirectory() as folder:
        shootout = Shootout(model, texts, options.block)
        titles = [f"{text.stem}: KL | perplexity, % | top-1, %" for text in options.texts]
        print("| cache | bits |", " | ".join(titles), "|")
        print("|---|---:|" + "---:|" * (3 * len(texts)))
        for name, measure in contenders(options, model, tokenizer, shootout, folder):
            if any(word in name for word in options.only.split(";")):
                bits, scores = measure()
                columns = " | ".join(score.columns() for score in scores)
                print(f"| {name} | {bits:.2f} | {columns} |", flush=True)


if __name__ == "__main__":
    main()
