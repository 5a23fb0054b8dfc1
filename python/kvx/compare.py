"""compare: what caches cost and what they lose, on a model and a text."""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from kvx.errors import Error
from kvx.gates import Gates, HeadErrors
from kvx.html import table
from kvx.progress import percent_bar
from kvx.types import Device

_PROGRESS = re.compile(r"\[[#.]+\] +(\d+) %  (.*)")  # a line of the tool's


@dataclass(frozen=True)
class Estimate:
    """A number with its standard error (None where there are too few tokens to estimate it)."""

    value: float
    standard_error: float | None

    @classmethod
    def _of(cls, value: float, standard_error: float) -> "Estimate":
        """From the module, where an error that is not known is NaN."""
        return cls(value, None if standard_error != standard_error else standard_error)

    def __str__(self) -> str:
        error = "" if self.standard_error is None else f" +- {self.standard_error:.2g}"
        return f"{self.value:.4g}{error}"


@dataclass(frozen=True)
class CacheFigures:
    """What one cache costs and loses beside the base cache, the first of the list.

    change_percent:   of perplexity, paired token by token
    kl:               nats a token
    same_top_percent: tokens where both caches put the same token first
    outputs, logits:  errors of attention's outputs, and of its logits before the softmax, by layer
                      and KV head; None where they were not measured
    saturated_inputs: numbers that a static scale clipped
    nonfinite_inputs: NaN or infinite numbers without a code
    """

    name: str
    bits_per_value: float
    bytes_per_token: float
    tokens_per_gib: int
    perplexity: Estimate
    change_percent: Estimate
    kl: Estimate
    same_top_percent: Estimate
    outputs: HeadErrors | None = None
    logits: HeadErrors | None = None
    saturated_inputs: int | None = None
    nonfinite_inputs: int | None = None


class Comparison(list[CacheFigures]):
    """CacheFigures, the base cache's first; a table where it is printed."""

    _HEADER = ("cache", "bits", "bytes/token", "perplexity", "change %", "KL", "same top %")

    def _table(self) -> list[tuple[str | float, ...]]:
        return [
            (
                cache.name,
                cache.bits_per_value,
                cache.bytes_per_token,
                *(str(getattr(cache, name)) for name in ESTIMATES),
            )
            for cache in self
        ]

    def __str__(self) -> str:
        rows = [self._HEADER, *(tuple(map(_text, row)) for row in self._table())]
        widths = [max(map(len, column)) for column in zip(*rows)]
        return "\n".join(
            "  ".join(
                cell.rjust(width) if i else cell.ljust(width)
                for i, (cell, width) in enumerate(zip(row, widths))
            ).rstrip()
            for row in rows
        )

    def _repr_html_(self) -> str:
        return table(self._HEADER, self._table())


ESTIMATES = ("perplexity", "change_percent", "kl", "same_top_percent")
_PLAIN = ("name", "bits_per_value", "bytes_per_token", "tokens_per_gib")


def compare(
    model: str | PathLike[str],
    text: str | PathLike[str],
    recipes: Sequence[str],
    *,
    context: int = 2048,
    windows: int = 4,
    threads: int = 0,
    device: Device = "cpu",
    attention: bool = False,
    fail_if: str | None = None,
    shows_progress: bool = True,
) -> Comparison:
    """Measures caches as ``kvx compare`` does: perplexity and KL divergence against a bf16 cache.

    model:   a GGUF file of the Llama family; kvx.hf.compare takes a transformers model instead
    text:    a UTF-8 file of at least context * windows tokens
    recipes: ``["int8", "nvfp4:auto"]``; bf16 comes first, whether named or not
    context: tokens of a window; its second half is scored
    device:  ``"cpu"``, or ``"cuda"``: where the caches lie and attend, and the model multiplies if
             cuBLAS is found
    attention: measures attention's logits too, which takes longer
    fail_if: ``"ppl>0.2%,kl>0.01,cosine<0.999"``: what no cache may lose (docs/guard.md)
    shows_progress: where tqdm is installed

    The command line tool measures, in a process of its own.
    Raises kvx.GateError, which carries all figures, where a condition of fail_if is true of a
    cache; kvx.Error with the tool's message.
    """
    gates = Gates(fail_if)
    if isinstance(recipes, str) or not recipes:
        raise Error(f"recipes is {recipes!r}; expected a list such as ['int8', 'nvfp4:auto']")
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        options = {
            "--model": model,
            "--text": text,
            "--formats": ",".join(recipes),
            "--ctx": context,
            "--chunks": windows,
            "--threads": threads,
            "--device": device,
            "--json": report,
        }
        words = [str(word) for option in options.items() for word in option]
        if attention or gates.need_logits:
            words.append("--attention")
        _run_tool([sys.executable, "-m", "kvx", "compare", *words], shows_progress)
        caches = json.loads(report.read_text())["caches"]
        comparison = Comparison(_figures_of(cache) for cache in caches)
    gates.check(comparison)
    return comparison


def _run_tool(command: list[str], shows_progress: bool) -> None:
    """Raises kvx.Error with the last thing that the tool said."""
    said = ""
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as tool:
        assert tool.stderr is not None
        try:
            with percent_bar("kvx compare", shows_progress) as show:
                for line in tool.stderr:
                    progress = _PROGRESS.match(line)
                    if progress:
                        show(float(progress[1]), progress[2])
                    else:
                        said = line.strip() or said
        except BaseException:  # Ctrl-C
            tool.kill()
            raise
    if tool.returncode != 0:
        problem = said.removeprefix("kvx: ")
        raise Error(problem or f"the tool kvx ended with exit code {tool.returncode}")


def _figures_of(cache: dict[str, Any]) -> CacheFigures:
    plain: dict[str, Any] = {name: cache[name] for name in _PLAIN}
    estimates: dict[str, Any] = {name: Estimate(**cache[name]) for name in ESTIMATES}
    return CacheFigures(
        **plain,
        **estimates,
        outputs=_errors_of(cache["attention_by_head"]),
        logits=_errors_of(cache["logits_by_head"]),
        saturated_inputs=cache["saturated_inputs"],
        nonfinite_inputs=cache["nonfinite_inputs"],
    )


def _errors_of(layers: list[list[dict[str, float | None]]] | None) -> HeadErrors | None:
    """[layers][kv_heads] of the report; a number that is not finite is null there."""
    if layers is None:
        return None
    kinds = ("cosine_similarity", "relative_error")
    return HeadErrors(
        *(np.array([[head[kind] for head in row] for row in layers], np.float64) for kind in kinds)
    )


def _text(cell: str | float) -> str:
    return f"{cell:.6g}" if isinstance(cell, float) else str(cell)
