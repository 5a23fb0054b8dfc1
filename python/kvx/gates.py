"""Gates: limits on what a cache may lose, and the error that names those that were not kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvx import _core

if TYPE_CHECKING:
    from kvx.compare import CacheFigures

_Floats = NDArray[np.float64]
_Fields = dict[str, Any]  # fields of GateFailure: where a figure is worst


@dataclass(frozen=True, eq=False)
class HeadErrors:
    """Attention beside the base cache's, of every layer and KV head, float64 [layers, kv_heads].

    cosine: cosine similarity
    error:  relative error
    """

    cosine: NDArray[np.float64]
    error: NDArray[np.float64]

    @property
    def worst(self) -> tuple[int, int]:
        """(layer, KV head) with the largest error."""
        return _place(self.error, np.argmax)


@dataclass(frozen=True)
class GateFailure:
    """A gate that a cache did not keep.

    cache:          the recipe
    gate:           as it was written, ``"cosine<0.999"``
    figure:         ``"cosine"``
    value:          what was measured
    layer, kv_head: where it is worst; None for a figure of the whole model
    where:          the length or part of a long text where it is worst, ``"at 2048 tokens"``
    """

    cache: str
    gate: str
    figure: str
    value: float
    layer: int | None = None
    kv_head: int | None = None
    where: str | None = None

    def __str__(self) -> str:
        place = "" if self.layer is None else f" in layer {self.layer}, KV head {self.kv_head}"
        place += "" if self.where is None else f" {self.where}"
        return f"{self.cache}: {self.figure} is {self.value:.6g}{place}, not allowed by {self.gate}"


class GateError(Exception):
    """A cache loses more than ``fail_if`` allows.

    failures:   a kvx.GateFailure each
    comparison: the kvx.Comparison with all figures, of kvx.hf.stress its StressReport
    """

    def __init__(self, failures: Sequence[GateFailure], comparison: Any) -> None:
        super().__init__("; ".join(map(str, failures)))
        self.failures = failures
        self.comparison = comparison


class Gates:
    """The conditions of ``fail_if``. Raises kvx.Error naming one that is none."""

    def __init__(self, text: str | None, of_stress: bool = False) -> None:
        self._gates: list[Any] = _core.parse_gates(text, of_stress) if text else []

    @property
    def names(self) -> list[str]:
        return [name for name, *_ in self._gates]

    @property
    def need_attention(self) -> bool:
        return any(name in _OF_HEADS for name, *_ in self._gates)

    @property
    def need_logits(self) -> bool:
        return any(name.startswith("logit_") for name, *_ in self._gates)

    def check(self, comparison: Sequence[CacheFigures]) -> None:
        """Raises kvx.GateError where a cache but the first does not keep a gate."""
        figures = {cache.name: partial(_figure, cache) for cache in comparison[1:]}
        self.check_figures(figures, comparison)

    def check_figures(
        self, figures: Mapping[str, Callable[[str], tuple[float, _Fields]]], report: Any
    ) -> None:
        """Raises kvx.GateError, which carries the report, where a cache does not keep a gate.

        figures: of each cache's name what finds (value, place) by a gate's name
        """
        failures = []
        for cache, figure_of in figures.items():
            for name, text, _, _, fails in self._gates:
                value, place = figure_of(name)
                if fails(value):
                    failures.append(GateFailure(cache, text, name, value, **place))
        if failures:
            raise GateError(failures, report)


# Which figures of CacheFigures a gate of heads looks at, and what finds the worst.
_OF_HEADS: dict[str, tuple[str, str, Callable[[_Floats], Any]]] = {
    "cosine": ("outputs", "cosine", np.argmin),
    "error": ("outputs", "error", np.argmax),
    "logit_cosine": ("logits", "cosine", np.argmin),
    "logit_error": ("logits", "error", np.argmax),
}
_ESTIMATES = {"ppl": "change_percent", "kl": "kl", "top1": "same_top_percent"}
_COUNTS = {"saturated": "saturated_inputs", "nonfinite": "nonfinite_inputs"}


def _figure(cache: CacheFigures, name: str) -> tuple[float, _Fields]:
    """A value that is not known is NaN, which keeps no gate."""
    if name in _ESTIMATES:
        estimate = getattr(cache, _ESTIMATES[name])
        return float(estimate.value), {}
    if name in _COUNTS:
        count = getattr(cache, _COUNTS[name])
        return float("nan") if count is None else float(count), {}
    heads, kind, worst_of = _OF_HEADS[name]
    errors = getattr(cache, heads)
    if errors is None:
        return float("nan"), {}
    numbers = getattr(errors, kind)
    layer, head = _place(numbers, worst_of)
    return float(numbers[layer, head]), {"layer": layer, "kv_head": head}


def _place(numbers: _Floats, worst_of: Callable[[_Floats], Any]) -> tuple[int, int]:
    """The index of the worst; a NaN is worse than any number."""
    is_nan = np.isnan(numbers)
    index = np.argmax(is_nan) if is_nan.any() else worst_of(numbers)
    layer, head = np.unravel_index(index, numbers.shape)
    return int(layer), int(head)
