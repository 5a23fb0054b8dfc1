"""llama.cpp's quantised KV caches, run by llama.cpp itself, on the shootout's windows.

    python3.11 -m venv llamacpp && llamacpp/bin/pip install cyllama==0.2.18 numpy==2.4.6
    llamacpp/bin/python bench/quality/llamacpp.py MODEL.gguf TEXT... [--windows 2] [--first 0]
        [--types q8_0,q5_1] [--no-rotation] [--quantised-weights] [--threads 1]

A process and an environment of its own: kvx does not depend on llama.cpp. The package has
llama.cpp inside, compiled for CPUs (ggml 0.12.0). Every cache sees the windows of 2048 tokens that
shootout.py shows to its caches, in batches of 512. K and V are of one type; attention is
llama.cpp's flash attention, without which it does not quantise V. llama.cpp rotates K and V by a
Hadamard matrix before it quantises them; --no-rotation stores them as they are.

Weights become f32 first, in a file that is deleted. llama.cpp multiplies quantised ones by
activations in 8 bits, and what another cache changes there comes to a KL of 0.004: as much as q8_0.
--quantised-weights leaves them.

Printed, as shootout.py prints it: bits a number, and for each text the mean KL divergence of the
predictions of each window's second half from those with llama.cpp's own f32 cache in nats, the
change of perplexity in %, and how often both put the same token first. llama.cpp has no window of
tokens in full precision.
"""

import argparse
import math
import os
import tempfile
from pathlib import Path

import numpy as np
from cyllama.llama import llama_cpp

WINDOW, CHUNK = 2048, 512  # shootout.py's
F32, ALL_F32, FLASH_ATTENTION = 0, 0, 1  # ggml_type, llama_ftype, llama_flash_attn_type
TYPES = {  # ggml_type's number, and bits a number
    "bf16": (30, 16),
    "f16": (1, 16),
    "q8_0": (8, 8.5),
    "q5_1": (7, 6),
    "q5_0": (6, 5.5),
    "q4_1": (3, 5),
    "q4_0": (2, 4.5),
}


class Model(llama_cpp.LlamaModel):
    """With the attribute that LlamaContext.get_logits_ith reads and LlamaModel lacks."""

    @property
    def n_vocab(self):
        return self.get_vocab().n_vocab


def load(gguf: Path, has_f32_weights: bool) -> Model:
    llama_cpp.disable_logging()
    options = llama_cpp.LlamaModelParams()
    if has_f32_weights:
        with tempfile.TemporaryDirectory() as folder:
            f32 = str(Path(folder) / "f32.gguf")
            to_f32 = llama_cpp.LlamaModelQuantizeParams()
            to_f32.ftype, to_f32.allow_requantize = ALL_F32, True
            llama_cpp.model_quantize(str(gguf), f32, to_f32)
            return load(Path(f32), False)
    options.n_gpu_layers = 0
    return Model(path_model=str(gguf), params=options)


def context_of(model: Model, ggml_type: int, threads: int):
    options = llama_cpp.LlamaContextParams()
    options.n_ctx = options.n_batch = WINDOW
    options.n_ubatch = CHUNK
    options.n_threads = options.n_threads_batch = threads
    options.type_k = options.type_v = ggml_type
    options.flash_attn_type = FLASH_ATTENTION
    return llama_cpp.LlamaContext(model, options)


def logits_of(context, window: list[int]) -> np.ndarray:
    """[scored tokens, vocabulary]: of the second half's tokens that have a next one."""
    found = []
    for first in range(0, WINDOW, CHUNK):
        is_scored = first >= WINDOW // 2
        batch = llama_cpp.LlamaBatch(n_tokens=CHUNK, embd=0, n_seq_max=1)
        for i, token in enumerate(window[first : first + CHUNK]):
            batch.add(token, first + i, [0], is_scored)
        context.decode(batch)
        if is_scored:
            found += [np.array(context.get_logits_ith(i), np.float32) for i in range(CHUNK)]
    return np.stack(found[:-1])


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


class Score:
    """Sums over scored tokens of one cache beside f32."""

    def __init__(self):
        self.tokens = self.kl = self.loss = self.base_loss = self.same = 0

    def add(self, base: np.ndarray, found: np.ndarray, targets: np.ndarray) -> None:
        for first in range(0, len(targets), 128):
            part = slice(first, first + 128)
            right, other = log_softmax(base[part]), log_softmax(found[part])
            own = targets[part, None]
            self.kl += float((np.exp(right) * (right - other)).sum())
            self.loss -= float(np.take_along_axis(other, own, 1).sum())
            self.base_loss -= float(np.take_along_axis(right, own, 1).sum())
            self.same += int((right.argmax(-1) == other.argmax(-1)).sum())
            self.tokens += len(own)

    def columns(self) -> str:
        change = 100 * math.expm1((self.loss - self.base_loss) / self.tokens)
        return (
            f"{self.kl / self.tokens:.5f} | {change:+.2f} | {100 * self.same / self.tokens:.1f}"
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("gguf", type=Path)
    parser.add_argument("texts", type=Path, nargs="+")
    parser.add_argument("--windows", type=int, default=2)
    parser.add_argument("--first", type=int, default=0, help="the first window of a text")
    parser.add_argument("--types", default=",".join(TYPES))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--no-rotation", action="store_true")
    parser.add_argument("--quantised-weights", action="store_true")
    options = parser.parse_args()
    if options.no_rotation:
        os.environ["LLAMA_ATTN_ROT_DISABLE"] = "1"
    types = options.types.split(",")
    if unknown := [name for name in types if name not in TYPES]:
        parser.error(f"--types has {', '.join(unknown)}; expected some of {', '.join(TYPES)}")
    model = load(options.gguf, not options.quantised_weights)
    vocabulary = model.get_vocab()
    scores = {name: [Score() for _ in options.texts] for name in types}
    for t, text in enumerate(options.texts):
        ids = vocabulary.tokenize(text.read_text(), False, True)
        end = (options.first + options.windows) * WINDOW
        if options.windows < 1 or options.first < 0 or len(ids) < end:
            parser.error(f"{text} has {len(ids)} tokens; windows {options.first} to "
                         f"{options.first + options.windows - 1} need {end}")
        for first in range(options.first * WINDOW, end, WINDOW):
            window = ids[first : first + WINDOW]
            targets = np.array(window[WINDOW // 2 + 1 :])
            base = logits_of(context_of(model, F32, options.threads), window)
            for name in types:
                context = context_of(model, TYPES[name][0], options.threads)
                scores[name][t].add(base, logits_of(context, window), targets)
    titles = [f"{text.stem}: KL | perplexity, % | top-1, %" for text in options.texts]
    print(f"llama.cpp with ggml {llama_cpp.ggml_version()} ({llama_cpp.ggml_commit()})")
    print("| cache | bits |", " | ".join(titles), "|")
    print("|---|---:|" + "---:|" * (3 * len(options.texts)))
    for name in types:
        columns = " | ".join(score.columns() for score in scores[name])
        print(f"| {name} | {TYPES[name][1]:.2f} | {columns} |")


if __name__ == "__main__":
    main()
