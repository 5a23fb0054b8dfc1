"""What caches forget over long texts, on a transformers model of your own."""

import copy
import math
from dataclasses import dataclass
from functools import partial

import torch

from kvx import _core
from kvx.compare import Estimate
from kvx.errors import Error
from kvx.gates import Gates
from kvx.hf.cache import Cache
from kvx.hf.interface import enable, passed
from kvx.html import table
from kvx.progress import progress

_DRIFT_PARTS = 8
_FED_TOKENS = 64  # whose logits are held at once
_OF_ANSWERS = {"passkey", "needles", "entities", "nll"}  # gates that want texts with questions
_OPENING = "once upon a time there was"


@dataclass(frozen=True)
class RetrievalScore:
    """One cache's answers to the questions of one task at one length.

    task:          ``"passkey"``, ``"needles"`` or ``"entities"`` (docs/guard.md)
    length:        tokens of the text with a question and its answer, at most
    exact_percent: questions whose whole answer the model would write
    nll:           of the answers' tokens, nats a token
    nll_change:    against the base cache, paired token by token
    """

    cache: str
    task: str
    length: int
    num_questions: int
    exact_percent: Estimate
    nll: Estimate
    nll_change: Estimate


@dataclass(frozen=True)
class DriftPart:
    """Divergence from the base cache on tokens [first_token, first_token + num_tokens) of a text
    that the model wrote with it. kl: nats a token."""

    cache: str
    first_token: int
    num_tokens: int
    kl: Estimate
    same_top_percent: Estimate

    @property
    def _where(self):
        return f"from token {self.first_token} to {self.first_token + self.num_tokens - 1}"


@dataclass(frozen=True)
class StressReport:
    """retrieval: a RetrievalScore for each task, length and cache, the base cache first;
    drift: a DriftPart for each part of the text and each cache but the base;
    clipped: inputs that a static scale clipped, a cache;
    nonfinite: inputs that are no finite number and have no code, likewise"""

    retrieval: list[RetrievalScore]
    drift: list[DriftPart]
    clipped: dict[str, int]
    nonfinite: dict[str, int]

    _HEADER = ("cache", "task", "tokens", "questions", "exact %", "nll", "nll change")

    def _repr_html_(self):
        rows = [
            (s.cache, s.task, s.length, s.num_questions, *map(str, (s.exact_percent, s.nll, s.nll_change)))
            for s in self.retrieval
        ]
        return table(self._HEADER, rows)


def stress(
    model,
    tokenizer,
    recipes,
    *,
    lengths=(2048, 4096, 8192),
    samples=2,
    drift_tokens=1024,
    seed=1,
    base="bf16",
    fail_if=None,
    shows_progress=True,
) -> StressReport:
    """Retrieval, repeated entities and drift of caches beside the base cache, as ``kvx stress``.

    model:        any that kvx.hf.enable takes; it stays enabled
    tokenizer:    the model's; its special tokens are never written
    recipes:      ``["int8", "nvfp4:auto"]``; the base comes first, whether named or not
    lengths:      tokens of the retrieval texts
    samples:      texts for each task and length
    drift_tokens: of the text that the model writes; 0 for none
    fail_if:      ``"passkey<90%,drift>0.01"``: what no cache may lose (docs/guard.md)

    Raises kvx.Error: a length or drift_tokens that are out of range, a recipe that does not exist,
    a condition that is none; kvx.GateError, which carries the report: a condition that is true.
    """
    gates = Gates(fail_if, of_stress=True)
    if "drift" in gates.names and not drift_tokens:
        raise Error("fail_if has drift and drift_tokens is 0; expected tokens to measure it on")
    if not lengths and (named := sorted(_OF_ANSWERS.intersection(gates.names))):
        raise Error(f"fail_if has {named[0]} and lengths is empty; expected a length to ask at")
    context = getattr(model.config, "max_position_embeddings", None) or 1 << 20
    for length in lengths:
        if not 16 <= length <= context:
            raise Error(f"lengths has {length}; expected 16 to {context}, the model's context")
    if not 0 <= drift_tokens <= context - 64:
        raise Error(f"drift_tokens is {drift_tokens}; expected 0 to {context - 64}")
    if samples < 1:
        raise Error(f"samples is {samples}; expected at least 1")
    enable(model)
    recipes = [base, *(recipe for recipe in recipes if recipe != base)]
    run = _Stress(model, tokenizer, recipes, samples, seed)
    steps = [(task, length) for length in lengths for task in range(len(run.tasks))]
    retrieval = []
    for task, length in progress(steps, "texts", shows_progress):
        retrieval += run.retrieve(task, length)
    drift = run.drift(drift_tokens) if drift_tokens else []
    report = StressReport(retrieval, drift, run.clipped, run.nonfinite)
    gates.check_figures({name: partial(_figure, report, name) for name in recipes[1:]}, report)
    return report


def _figure(report, cache, name):
    """A gate's figure of a cache, (value, place), where it is worst; NaN where none is known."""
    if name in ("saturated", "nonfinite"):
        return float((report.clipped if name == "saturated" else report.nonfinite)[cache]), {}
    scores = [score for score in report.retrieval if score.cache == cache]
    if name == "drift":
        found = [(part.kl.value, part._where) for part in report.drift if part.cache == cache]
    elif name == "nll":
        found = [(s.nll_change.value, f"in {s.task} at {s.length} tokens") for s in scores]
    else:
        found = [(s.exact_percent.value, f"at {s.length} tokens") for s in scores if s.task == name]
    sign = 1 if name in ("drift", "nll") else -1  # of answers the fewest are the worst
    value, where = max(found, key=lambda one: math.inf if math.isnan(one[0]) else sign * one[0])
    return value, {"where": where}


class _Stress:
    def __init__(self, model, tokenizer, recipes, samples, seed):
        self.model = model
        self.tokenizer = tokenizer
        self.recipes = recipes
        self.samples = samples
        self.seed = seed
        self.tasks = _core.retrieval_tasks()
        self.clipped = dict.fromkeys(recipes, 0)
        self.nonfinite = dict.fromkeys(recipes, 0)
        bos = getattr(tokenizer, "bos_token_id", None)
        with_bos = getattr(tokenizer, "add_bos_token", False) and bos is not None
        self.prefix = [bos] if with_bos else []

    def encode(self, text):
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def forward(self, tokens, cache, count=1):
        """Logits of the last ``count`` tokens, float32 [count, vocabulary]."""
        with torch.inference_mode():
            ids = torch.tensor([tokens], device=self.model.device)
            options = passed(self.model, cache)
            return self.model(input_ids=ids, logits_to_keep=count, **options).logits[0].float()

    def add_counts(self, recipe, cache):
        for counts in (layer.cache.saturation() for layer in cache.layers):
            self.clipped[recipe] += counts.clipped
            self.nonfinite[recipe] += int(counts.k_nonfinite.sum() + counts.v_nonfinite.sum())

    # ---- retrieval

    def retrieve(self, task, length):
        sums = {recipe: ([], [], []) for recipe in self.recipes}  # exact, nll, change: a question
        for sample in range(self.samples):
            seed = self.seed * 1000003 + length * 101 + sample * 7 + task
            room = length - len(self.prefix)
            text, questions = _core.retrieval_text(
                task, seed, room, lambda text: len(self.encode(text))
            )
            asked = [(self.encode(question), self.encode(answer)) for question, answer, _ in questions]
            tokens = [*self.prefix, *self.encode(text)]
            base = None
            for recipe in self.recipes:
                nlls, exact = self.ask(recipe, tokens, asked, length)
                base = nlls if base is None else base
                exacts, sums_nll, changes = sums[recipe]
                exacts += [[100.0 * one] for one in exact]
                sums_nll += nlls
                changes += [
                    [x - y for x, y in zip(own, others)] for own, others in zip(nlls, base)
                ]
        name = self.tasks[task]
        return [
            RetrievalScore(recipe, name, length, len(found[0]), *map(_estimate, found))
            for recipe, found in sums.items()
        ]

    def ask(self, recipe, tokens, asked, length):
        """The nll of every answer's tokens, and whether all of them come first, a question."""
        cache = Cache(self.model.config, recipe, max_tokens=length)
        self.forward(tokens, cache)
        nlls, exact = [], []
        for question, answer in asked:
            fork = copy.deepcopy(cache)
            logits = self.forward([*question, *answer[:-1]], fork, len(answer))
            targets = torch.tensor(answer, device=logits.device)
            log = logits.double().log_softmax(-1)
            nlls.append((-log[range(len(answer)), targets]).tolist())
            exact.append(bool((logits.argmax(-1) == targets).all()))
        self.add_counts(recipe, cache)
        return nlls, exact

    # ---- drift

    def write(self, count):
        """What the model writes with the base cache: drawn, since the likeliest words soon repeat
        themselves, and never a special token."""
        tokens = [*self.prefix, *self.encode(_OPENING)]
        first = len(tokens)
        cache = Cache(self.model.config, self.recipes[0], max_tokens=first + count)
        draws = torch.Generator().manual_seed(self.seed)
        special = list(getattr(self.tokenizer, "all_special_ids", []))
        logits = self.forward(tokens, cache)
        while True:
            row = logits[-1].double().cpu()
            row[special] = -math.inf
            tokens.append(int(torch.multinomial(row.softmax(-1), 1, generator=draws)))
            if len(tokens) == first + count:
                return tokens, first
            logits = self.forward(tokens[-1:], cache)

    def drift(self, count):
        tokens, first = self.write(count)
        num_parts = min(_DRIFT_PARTS, count)
        edges = [count * part // num_parts for part in range(num_parts + 1)]
        caches = [Cache(self.model.config, r, max_tokens=first + count) for r in self.recipes]
        for cache in caches:
            if first > 1:
                self.forward(tokens[: first - 1], cache)
        parts = []
        for begin, end in zip(edges, edges[1:]):
            qualities = [_core.CacheQuality() for _ in self.recipes]
            for start in range(begin, end, _FED_TOKENS):
                stop = min(end, start + _FED_TOKENS)
                # The token before each one that was written predicts it.
                read = tokens[first + start - 1 : first + stop - 1]
                targets = tokens[first + start : first + stop]
                rows = [
                    self.forward(read, cache, len(read))[:, None].cpu().contiguous()
                    for cache in caches
                ]
                for row, quality in zip(rows, qualities):
                    quality.add_window(rows[0], row, targets)
            for recipe, quality in list(zip(self.recipes, qualities))[1:]:
                found = quality.figures()
                kl, same_top = (Estimate._of(*found[name]) for name in ("kl", "same_top_percent"))
                parts.append(DriftPart(recipe, begin, end - begin, kl, same_top))
        for recipe, cache in zip(self.recipes, caches):
            self.add_counts(recipe, cache)
        return parts


def _estimate(clusters):
    return Estimate._of(*_core.clustered_mean(clusters))
