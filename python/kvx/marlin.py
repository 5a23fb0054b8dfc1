"""metal-marlin's Python API over kvx: caches of a fixed size, [batch, heads, tokens, dim], in the
host's memory or a GPU's."""

import time
from dataclasses import dataclass
from typing import Any, NoReturn, overload

import numpy as np
from numpy.typing import NDArray

from kvx import _core
from kvx.arrays import checked_array, described, empty_like, new_output
from kvx.errors import Error, OutOfRangeError, UnsupportedError
from kvx.refusals import in_words
from kvx.types import Array, ArrayT

_DTYPES = {"float16": "f16", "bfloat16": "bf16", "float32": "f32"}
# 4-bit rows are uint32 words of eight with one float16 scale a row: amax / 6 for E2M1, amax / 7
# for integers. 8-bit rows have a scale as well, so that nothing needs calibration.
_QUANTIZED = {
    "fp4": "fp4_row",
    "int4": "int4_row",
    "int8": "int8",
    "fp8": "fp8_e4m3:source=computed",
}
_MIB = 1 << 20


@dataclass(frozen=True)
class CacheConfig:
    """What a cache is made for.

    num_heads, num_kv_heads: query heads, a multiple of the KV heads
    max_seq_len: tokens of a sequence; past it update() raises, unless evict
    dtype:    how numbers are stored when nothing is quantised: "float16", "bfloat16", "float32",
              or a dtype of NumPy, torch or JAX that has such a name
    quantize: False, True or "fp4" (E2M1), "int4", "int8", "fp8" (E4M3)
    window:   a sliding window in tokens, kept in a ring of window + max_append - 1; 0 for none
    evict:    past max_seq_len the oldest tokens leave instead of an error
    max_append: with a window, tokens of one update() that attention() must serve

    Raises kvx.Error naming the field.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_seq_len: int
    dtype: object = "float16"
    quantize: bool | str = False
    window: int = 0
    evict: bool = False
    max_append: int = 1

    def __post_init__(self) -> None:
        if _name_of(self.dtype) not in _DTYPES:
            raise Error(f"dtype is {self.dtype!r}; expected one of {', '.join(_DTYPES)}")
        if not isinstance(self.quantize, bool) and self.quantize not in _QUANTIZED:
            raise Error(
                f"quantize is {self.quantize!r}; expected False, True or one of "
                f"{', '.join(_QUANTIZED)}"
            )
        if self.num_kv_heads > 0 and (self.num_heads < 1 or self.num_heads % self.num_kv_heads):
            raise Error(
                f"num_heads is {self.num_heads}; expected a multiple of num_kv_heads, "
                f"{self.num_kv_heads}"
            )
        if self.window < 0:
            raise Error(f"window is {self.window}; expected 0 or more")
        if self.window and self.evict:
            raise Error(f"evict is True and window is {self.window}; a window evicts by itself")

    @property
    def recipe(self) -> str:
        """The kvx recipe that this configuration means."""
        if self.quantize is False:
            return _DTYPES[_name_of(self.dtype)]
        return _QUANTIZED["fp4" if self.quantize is True else self.quantize]


def _name_of(dtype: object) -> str:
    """``float16`` for np.float16, np.dtype("float16"), torch.float16, and for itself."""
    if isinstance(dtype, str):
        return dtype
    name = getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or str(dtype)
    return str(name).rpartition(".")[2]


class KVCache:
    """Keys and values of ``batch_size`` sequences of one length.

    device: "cpu", "cuda" or "cuda:N". Arrays of calls lie there: torch tensors or CuPy arrays on a
    GPU, whose current streams the calls are in the order of.

    Every layer's update(), then one advance(). Raises kvx.Error, kvx.OutOfRangeError past
    max_seq_len (nothing is written then).
    """

    @in_words
    def __init__(self, config: CacheConfig, batch_size: int = 1, *, device: str = "cpu") -> None:
        if not isinstance(config, CacheConfig):
            raise TypeError(f"config is {described(config)}; expected a kvx.marlin.CacheConfig")
        self.config = config
        self.batch_size = batch_size
        self.device = str(device)
        self._seconds = 0.0  # of the calls since the last advance()
        self._last_step_seconds = 0.0
        self._cache = _core.ContiguousCache(
            config.num_layers,
            config.num_kv_heads,
            config.num_heads,
            config.head_dim,
            [config.window] * config.num_layers if config.window else [],
            config.recipe,
            batch_size,
            config.max_seq_len,
            config.evict,
            config.max_append,
            self.device,
        )

    def __reduce__(self) -> NoReturn:
        """Refuses pickle and copy: the bytes belong to this process."""
        raise UnsupportedError(
            "a kvx.marlin.KVCache cannot be pickled or copied: its bytes belong to this process. "
            "Pickle its config, and make another"
        )

    def __repr__(self) -> str:
        config = self.config
        place = "" if self.device == "cpu" else f", on {self.device}"
        return (
            f"kvx.marlin.KVCache({config.recipe!r}, batch of {self.batch_size}, "
            f"{config.num_layers} layers, {config.num_kv_heads} KV heads of {config.head_dim}, "
            f"{self.seq_len} of {config.max_seq_len} tokens{place})"
        )

    @property
    def seq_len(self) -> int:
        """Tokens that advance() has counted."""
        return self._cache.seq_len

    @in_words
    def append(self, layer_idx: int, k_new: Array, v_new: Array) -> None:
        """Stores new tokens of a layer: [batch, num_kv_heads, tokens, head_dim]; what attention()
        over the packed bytes needs, without update()'s decoded copy."""
        tokens = _shape_of(k_new, "k_new")[2]
        expected = (self.batch_size, self.config.num_kv_heads, tokens, self.config.head_dim)
        _check_shape(k_new, "k_new", expected)
        _check_shape(v_new, "v_new", expected)
        start = time.perf_counter()
        self._cache.append(layer_idx, tokens, _token_rows(k_new), _token_rows(v_new))
        self._seconds += time.perf_counter() - start

    @in_words
    def update(self, layer_idx: int, k_new: ArrayT, v_new: Array) -> tuple[ArrayT, ArrayT]:
        """Stores new tokens of a layer and returns all of its keys and values, the new included.

        k_new, v_new: [batch, num_kv_heads, tokens, head_dim]
        Returns (k, v): [batch, num_kv_heads, tokens held, head_dim], decoded, of k_new's library
        and dtype. The position stays until advance().
        """
        self.append(layer_idx, k_new, v_new)
        return self.get_kv(layer_idx, like=k_new)

    @overload
    def get_kv(
        self, layer_idx: int, *, like: None = None
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]: ...
    @overload
    def get_kv(self, layer_idx: int, *, like: ArrayT) -> tuple[ArrayT, ArrayT]: ...
    @in_words
    def get_kv(self, layer_idx: int, *, like: Array | None = None) -> tuple[Any, Any]:
        """A layer's keys and values, decoded: [batch, num_kv_heads, tokens held, head_dim].
        like: an array whose library and dtype the result has; a GPU's cache needs one."""
        held = self._cache.num_held(layer_idx)
        heads, dim = self.config.num_kv_heads, self.config.head_dim
        k = new_output(like, (self.batch_size * held, heads, dim), self.device, "like")
        v = empty_like(like, (self.batch_size * held, heads, dim))
        self._cache.gather(layer_idx, k, v)
        shape = (self.batch_size, held, heads, dim)
        return k.reshape(shape).swapaxes(1, 2), v.reshape(shape).swapaxes(1, 2)

    @in_words
    def attention(
        self, layer_idx: int, q: ArrayT, *, scale: float | None = None, causal: bool = True
    ) -> ArrayT:
        """Attention of the last tokens over the packed bytes.

        q: [batch, num_heads, tokens, head_dim]; scale: 1 / sqrt(head_dim) when None
        causal: False lets every query see all tokens, those behind it too
        Returns [batch, num_heads, tokens, head_dim] of q's library and dtype.
        """
        tokens = _shape_of(q, "q")[2]
        batch, heads, dim = self.batch_size, self.config.num_heads, self.config.head_dim
        _check_shape(q, "q", (batch, heads, tokens, dim))
        rows = _token_rows(q)
        out = new_output(q, (batch * tokens, heads, dim), self.device, "q")
        start = time.perf_counter()
        self._cache.attend(
            layer_idx, tokens, rows, out, dim**-0.5 if scale is None else scale, causal
        )
        self._seconds += time.perf_counter() - start
        result: ArrayT = out.reshape((batch, tokens, heads, dim)).swapaxes(1, 2)
        return result

    @in_words
    def advance(self, num_tokens: int = 1) -> None:
        """Makes the tokens that every layer has stored part of the sequences.
        Raises kvx.Error: a layer has not stored just num_tokens."""
        self._cache.advance(num_tokens)
        self._last_step_seconds, self._seconds = self._seconds, 0.0

    def reset(self) -> None:
        """Forgets all tokens; the memory stays."""
        self._cache.reset()
        self._seconds = self._last_step_seconds = 0.0

    @property
    def k_packed(self) -> list[Any]:
        """Each layer's codes of keys where they lie; [batch, num_kv_heads, max_seq_len, numbers]
        or, with a window, as many tokens as its ring has.

        fp4 and int4: uint32, head_dim / 8 of them, number d in bits 4 * (d % 8) of word d / 8.
        int8: int8, fp8: uint8, head_dim of them. Nothing quantised: the numbers themselves,
        bfloat16 as uint16 in NumPy's arrays.
        On the CPU NumPy's arrays, read-only; on a GPU arrays that DLPack shares
        (torch.from_dlpack).
        """
        return [self._cache.codes(layer, False) for layer in range(self.config.num_layers)]

    @property
    def v_packed(self) -> list[Any]:
        """Those of values; see k_packed."""
        return [self._cache.codes(layer, True) for layer in range(self.config.num_layers)]

    @property
    def k_scales(self) -> list[Any]:
        """Each layer's scales of keys, [batch, num_kv_heads, max_seq_len, groups]: float16 (fp8:
        float32), one group a row for fp4 and int4; None where nothing is quantised. A number is its
        code's value times its group's scale. Arrays as k_packed's."""
        return [self._cache.scales(layer, False) for layer in range(self.config.num_layers)]

    @property
    def v_scales(self) -> list[Any]:
        """Those of values; see k_scales."""
        return [self._cache.scales(layer, True) for layer in range(self.config.num_layers)]

    def memory_usage_mb(self) -> float:
        """MiB that the tokens held take, all layers, keys and values, scales included."""
        return self._cache.used_bytes() / _MIB

    def memory_allocated_mb(self) -> float:
        """MiB that max_seq_len tokens (or the window) take."""
        return self._cache.allocated_bytes() / _MIB

    def read_mb_per_step(self) -> float:
        """MiB of keys and values that attention of one new token reads."""
        return self._cache.read_bytes_per_step() / _MIB

    def read_ms_per_step(self, gb_per_s: float) -> float:
        """Milliseconds that these reads take at a memory's bandwidth, in 10^9 bytes a second: the
        least that a step of one new token can take. Raises kvx.Error: not more than 0."""
        if not gb_per_s > 0:
            raise Error(f"gb_per_s is {gb_per_s}; expected more than 0")
        return self._cache.read_bytes_per_step() / (gb_per_s * 1e6)

    def last_step_ms(self) -> float:
        """Milliseconds that append(), update() and attention() of the last step took, up to its
        advance(). On a GPU this is what the calls took on the host: they return before the work is
        done."""
        return self._last_step_seconds * 1e3


def _check_shape(array: Array, name: str, expected: tuple[int, ...]) -> None:
    shape = _shape_of(array, name)
    if shape != expected:
        raise Error(f"{name} has the shape {list(shape)}; expected {list(expected)}")


def _shape_of(array: Array, name: str) -> tuple[int, ...]:
    shape = tuple(checked_array(array, name).shape)
    if len(shape) != 4:
        raise Error(
            f"{name} has the shape {list(shape)}; expected [batch, heads, tokens, head_dim]"
        )
    return shape


def _token_rows(array: Any) -> Any:
    """[batch, heads, tokens, dim] as [batch * tokens, heads, dim]: a view for one sequence or one
    token, else a copy."""
    batch, heads, tokens, dim = array.shape
    return array.swapaxes(1, 2).reshape((batch * tokens, heads, dim))


__all__ = ["CacheConfig", "Error", "KVCache", "OutOfRangeError"]
