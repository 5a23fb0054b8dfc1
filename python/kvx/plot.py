"""Pictures of what caches cost and lose. Each function draws on ``axes``, or on a new figure's, and
returns them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvx.cache import Cache
from kvx.compare import CacheFigures
from kvx.rows import quantize
from kvx.types import Array

try:
    from matplotlib import pyplot
except ImportError as error:
    raise ImportError(f"kvx.plot needs matplotlib: pip install 'kvx[plot]' ({error})") from error

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def comparison(figures: Sequence[CacheFigures], axes: "Axes | None" = None) -> "Axes":
    """Bits a value against KL divergence, with its standard error, a point a cache.

    figures: what kvx.compare or kvx.hf.compare returned; the base cache, which loses nothing, is
             left out
    """
    axes = _axes(axes)
    for cache in figures[1:]:
        error = cache.kl.standard_error or 0.0
        axes.errorbar(cache.bits_per_value, cache.kl.value, yerr=error, fmt="o", capsize=3)
        axes.annotate(
            cache.name,
            (cache.bits_per_value, cache.kl.value),
            xytext=(5, 5),
            textcoords="offset points",
        )
    axes.set_yscale("log")
    axes.set_xlabel("bits a value")
    axes.set_ylabel(f"KL divergence from {figures[0].name}, nats a token")
    return axes


def memory(
    recipes: Sequence[str],
    *,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    max_tokens: int = 32768,
    axes: "Axes | None" = None,
) -> "Axes":
    """A sequence's bytes against its length, a line a recipe. A full-precision window bends the line
    at its beginning.

    recipes: ``["bf16", "int8", "nvfp4:auto"]``; the sizes are the model's
    Raises kvx.Error as kvx.Cache does.
    """
    axes = _axes(axes)
    lengths = np.unique(np.geomspace(1, max_tokens, 60).astype(int))
    for recipe in recipes:
        cache = Cache(
            num_layers=num_layers,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            recipe=recipe,
            max_tokens=max_tokens,
        )
        costs = [cache.cost(int(length)).bytes_per_token * length / 2**20 for length in lengths]
        cache.close()
        axes.plot(lengths, costs, label=recipe)
    axes.set_xlabel("tokens")
    axes.set_ylabel("MiB")
    axes.legend()
    return axes


def errors(x: Array, formats: Sequence[str], axes: "Axes | None" = None) -> "Axes":
    """How often rows come back how far from what they were, a line a format.

    x:       float32 [..., head_dim], such as a layer's keys
    formats: ``["int8", "nvfp4:search"]``
    Raises kvx.Error as kvx.quantize does.
    """
    axes = _axes(axes)
    numbers: Any = x
    found = {name: np.abs(quantize(x, name).dequantize() - numbers).ravel() for name in formats}
    edges = np.linspace(0, max(float(error.max()) for error in found.values()) or 1.0, 60)
    for name, error in found.items():
        counts, _ = np.histogram(error, edges)
        label = f"{name}, mean square {np.square(error).mean():.2g}"
        axes.step(edges[:-1], counts / error.size, where="post", label=label)
    axes.set_xlabel("absolute error")
    axes.set_ylabel("share of the numbers")
    axes.set_yscale("log")
    axes.legend()
    return axes


def _axes(axes: "Axes | None") -> "Axes":
    return pyplot.subplots(layout="constrained")[1] if axes is None else axes


__all__ = ["comparison", "errors", "memory"]
