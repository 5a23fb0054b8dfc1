"""What TurboMind's ProcessKV does with a step's keys and values: biases, RoPE, and the write."""

from importlib import import_module
from typing import Any

from kvx import _core
from kvx.arrays import checked_array
from kvx.engines.layer import Layer
from kvx.errors import Error
from kvx.refusals import in_words
from kvx.types import Array, Stream

_PAIRS = ("interleaved", "halves")


@in_words
def process_kv(
    layer: Layer,
    k: Array,
    v: Array,
    slots: Array,
    *,
    k_bias: Any = None,
    v_bias: Any = None,
    positions: Any = None,
    inv_freq: Any = None,
    pairs: str = "interleaved",
    stream: Stream = None,
) -> None:
    """Adds the biases, turns K by RoPE, and stores both, in one call.

    k, v:      [tokens, num_kv_heads, head_dim] as the projections give them; they stay as they are
    slots:     as in Layer.append
    k_bias, v_bias: [num_kv_heads, head_dim] of the rows' library and dtype; None: no bias
    positions: whole numbers [tokens], of each token in its sequence; needed by inv_freq
    inv_freq:  floats [at most head_dim / 2], the angle of each pair a token; None: K is turned
               already. Llama's are theta ** (-2 i / head_dim). Numbers behind the pairs stay
    pairs:     "interleaved" (2 i, 2 i + 1), as TurboMind's weights are permuted; "halves"
               (i, i + len(inv_freq)), as transformers'

    A sum is rounded to the rows' dtype, as in the engine; a turn is computed in float32 and rounded
    once, by kvx on the CPU and on a GPU. The library's own are copies of k and v, and the cosines
    and sines of each token.
    Raises kvx.Error naming what does not fit, TypeError: no array; nothing is written then.
    """
    if pairs not in _PAIRS:
        raise Error(f"pairs is {pairs!r}; expected one of {', '.join(_PAIRS)}")
    if (positions is None) != (inv_freq is None):
        given, missing = (
            ("inv_freq", "positions") if positions is None else ("positions", "inv_freq")
        )
        raise Error(f"{given} is given and {missing} is None; RoPE needs both")
    named = {"k_bias": k_bias, "v_bias": v_bias, "positions": positions, "inv_freq": inv_freq}
    library = _library_of(checked_array(k, "k"))
    for name, array in {"v": v, **{n: a for n, a in named.items() if a is not None}}.items():
        if _library_of(checked_array(array, name)) != library:
            raise Error(f"{name} is an array of {_library_of(array)}; expected {library}, k's own")
    _check_bias(k, k_bias, "k_bias")
    _check_bias(v, v_bias, "v_bias")
    if k_bias is None and v_bias is None and inv_freq is None:
        layer.append(k, v, slots, stream=stream)
        return
    table = order = None
    count = 0
    if inv_freq is not None:
        table, order = _turns(k, positions, inv_freq)
        count = inv_freq.shape[0]
    biases = [None if bias is None else _copy(bias)[None] for bias in (k_bias, v_bias)]
    _core.EngineLayer.process_kv(
        layer, _copy(k), _copy(v), slots, *biases, table, order, k.shape[0] if count else 0, count,
        pairs == "interleaved", stream,
    )  # fmt: skip


def _check_bias(rows: Any, bias: Any, name: str) -> None:
    if bias is None:
        return
    if tuple(bias.shape) != tuple(rows.shape[1:]) or bias.dtype != rows.dtype:
        raise Error(
            f"{name} is {bias.dtype} {list(bias.shape)}; expected {rows.dtype} "
            f"{list(rows.shape[1:])}, a row for each head"
        )


def _turns(k: Any, positions: Any, inv_freq: Any) -> tuple[Any, Any]:
    """Cosines and sines of each token's turns, float32 [tokens, 2, pairs], and which row of them is
    which token's."""
    tokens, _, head_dim = k.shape
    if len(inv_freq.shape) != 1 or not 1 <= inv_freq.shape[0] <= head_dim // 2:
        raise Error(f"inv_freq has shape {list(inv_freq.shape)}; expected [1 to {head_dim // 2}]")
    if tuple(positions.shape) != (tokens,):
        raise Error(f"positions has shape {list(positions.shape)}; expected [{tokens}]")
    library = import_module(_library_of(k))
    angles = _float32(positions)[:, None] * _float32(inv_freq)[None, :]
    table = library.stack((library.cos(angles), library.sin(angles)), 1)
    place = {"device": k.device} if _library_of(k) == "torch" else {}
    return table, library.arange(tokens, dtype=library.int64, **place)


def _copy(array: Any) -> Any:
    """Contiguous: the call changes it in place."""
    return array.clone().contiguous() if hasattr(array, "clone") else array.copy()


def _library_of(array: Any) -> str:
    return type(array).__module__.partition(".")[0]


def _float32(array: Any) -> Any:
    """A copy in float32."""
    if hasattr(array, "clone"):  # PyTorch
        return array.float().clone()
    return array.astype("float32")
