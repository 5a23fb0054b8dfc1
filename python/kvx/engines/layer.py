"""Layer: the verbs of kvx over one layer of an engine's own tensors, in the engine's own layout."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvx import _core
from kvx.arrays import new_numbers, new_output
from kvx.engines.table import Table
from kvx.errors import Error
from kvx.refusals import in_words
from kvx.types import Array, ArrayT, Stream

PREFIX_OF_K = 1
SCATTERED_BLOCKS = 4
Q4_0_BLOCKS = 8


@dataclass(frozen=True)
class Memory:
    """The memory of an array: where its first element lies, and its strides in bytes."""

    array: Any
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    device: str

    @property
    def nbytes(self) -> int:
        """Bytes from the first element to the end of the last one."""
        if 0 in self.shape:
            return 0
        return self.itemsize + sum(
            (n - 1) * s for n, s in zip(self.shape, self.strides, strict=True)
        )


def memory_of(array: Any, name: str) -> Memory:
    """Where an array of NumPy, PyTorch or CuPy lies.

    Raises kvx.Error: no such array, one that may not be written, or a negative stride.
    """
    if hasattr(array, "data_ptr"):  # PyTorch
        item = array.element_size()
        device = "cpu" if array.device.type == "cpu" else f"cuda:{array.device.index or 0}"
        strides = tuple(s * item for s in array.stride())
        found = Memory(array, array.data_ptr(), tuple(array.shape), strides, item, device)
    elif hasattr(array, "__cuda_array_interface__"):  # CuPy
        pointer = array.__cuda_array_interface__["data"][0]
        device = f"cuda:{array.device.id}"
        found = Memory(array, pointer, array.shape, array.strides, array.itemsize, device)
    elif isinstance(array, np.ndarray):
        if not array.flags.writeable:
            raise Error(f"{name} is read-only; expected an array that may be written")
        address = array.__array_interface__["data"][0]
        found = Memory(array, address, array.shape, array.strides, array.itemsize, "cpu")
    else:
        raise Error(
            f"{name} is a {type(array).__name__}; expected an array of NumPy, PyTorch or CuPy"
        )
    if any(stride < 0 for stride in found.strides):
        raise Error(f"{name} has strides of {found.strides} bytes; expected none below 0")
    return found


@dataclass(frozen=True)
class Rows:
    """K or V of a layer: where the row of (block, token, head) begins, in bytes.

    format:   a format with its options, "fp8_e4m3:source=given", as recipes name it
    codes:    offset + block, token and head times code_strides into ``memory``
    fragment: (bytes, stride) of the pieces of a row that do not follow each other; None: they do
    scales, scale_offset, scale_strides: likewise of (block, token, head, group); None: no scales
    tensor_scales: float32 [num_kv_heads] in the same memory, for nvfp4; None: 1
    """

    format: str
    head_dim: int
    memory: Memory
    offset: int
    code_strides: tuple[int, int, int]
    fragment: tuple[int, int] | None = None
    scales: Memory | None = None
    scale_offset: int = 0
    scale_strides: tuple[int, int, int, int] = (0, 0, 0, 0)
    tensor_scales: Any = None
    flags: int = 0


@dataclass(frozen=True)
class Shape:
    """Blocks, tokens of a block and KV heads of a layer."""

    num_blocks: int
    block_size: int
    num_kv_heads: int


def _end_of(extents: Sequence[int], strides: Sequence[int], last_bytes: int) -> int:
    return sum((n - 1) * s for n, s in zip(extents, strides, strict=True)) + last_bytes


def _check_inside(name: str, memory: Memory, offset: int, end: int) -> None:
    if offset < 0 or offset + end > memory.nbytes:
        raise Error(
            f"{name} reaches byte {offset + end} of an array of {memory.nbytes} bytes; expected "
            f"a layout that lies inside it"
        )


def _side(name: str, rows: Rows, shape: Shape) -> Any:
    """Checks that the rows lie inside their arrays and describes them to the core."""
    facts = _core.format_bytes(rows.format, rows.head_dim)
    extents = (shape.num_blocks, shape.block_size, shape.num_kv_heads)
    if min(extents) < 1 or rows.head_dim < 1:
        raise Error(f"{name} has shape {shape} and head_dim {rows.head_dim}; expected 1 or more")
    fragment_bytes, fragment_stride = rows.fragment or (facts["code_bytes"], 0)
    if fragment_bytes < 1 or facts["code_bytes"] % fragment_bytes:
        raise Error(f"{name}'s fragments have {fragment_bytes} bytes; expected a divisor of a row")
    num_fragments = facts["code_bytes"] // fragment_bytes
    scattered = bool(rows.flags & SCATTERED_BLOCKS)
    if not scattered:
        end = _end_of((*extents, num_fragments), (*rows.code_strides, fragment_stride),
                      fragment_bytes)
        _check_inside(name, rows.memory, rows.offset, end)
    side = _core.EngineSide()
    side.recipe = rows.format
    side.head_dim = rows.head_dim
    side.codes = rows.memory.address + rows.offset
    side.code_strides = list(rows.code_strides)
    if rows.fragment is not None:
        side.fragments = list(rows.fragment)
    side.flags = rows.flags
    if rows.scales is not None:
        end = _end_of((*extents, facts["num_groups"]), rows.scale_strides, facts["group_bytes"])
        if not scattered:
            _check_inside(f"{name}'s scales", rows.scales, rows.scale_offset, end)
        side.scales = rows.scales.address + rows.scale_offset
        side.scale_strides = list(rows.scale_strides)
    if rows.tensor_scales is not None:
        found = memory_of(rows.tensor_scales, f"{name}'s tensor_scales")
        if found.itemsize != 4 or found.nbytes != 4 * shape.num_kv_heads:
            raise Error(f"{name}'s tensor_scales is no contiguous float32 [{shape.num_kv_heads}]")
        side.tensor_scales = found.address
    return side


class Layer(_core.EngineLayer):
    """One layer of an engine's cache. kvx.engines' modules make it from an engine's tensors.

    All arrays of all calls lie where the engine's tensors do. On a GPU calls are launched on the
    current stream of their arrays' library, or on ``stream``, and skip what is out of range; on the
    CPU that raises kvx.OutOfRangeError and nothing is written.
    """

    def __init__(self, shape: Shape, k: Rows, v: Rows, k_rest: Rows | None = None) -> None:
        """k_rest: the numbers of K's rows behind k's, as the rotary ones of a latent row."""
        self.shape = shape
        self.k = k
        self.v = v
        self.k_rest = k_rest
        sides = [k, v] if k_rest is None else [k, v, k_rest]
        devices = {side.memory.device for side in sides}
        devices |= {side.scales.device for side in sides if side.scales is not None}
        if len(devices) > 1:
            raise Error(f"the layer's arrays lie on {sorted(devices)}; expected one device")
        owners = [(s.memory.array, s.scales and s.scales.array, s.tensor_scales) for s in sides]
        super().__init__(
            shape.num_blocks,
            shape.block_size,
            shape.num_kv_heads,
            _side("k", k, shape),
            _side("v", v, shape),
            None if k_rest is None else _side("k_rest", k_rest, shape),
            devices.pop(),
            owners,
        )

    @property
    def key_dim(self) -> int:
        """Numbers of a row of K, in both segments of a row that has two."""
        return self.k.head_dim + (0 if self.k_rest is None else self.k_rest.head_dim)

    @in_words
    def append(  # type: ignore[override]
        self, k: Array, v: Array | None, slots: Array, *, stream: Stream = None
    ) -> None:
        """Stores tokens: k [tokens, num_kv_heads, key_dim] and v after RoPE.

        v:     None where it is the beginning of k's rows, as in a latent layer
        slots: int64 or int32 [tokens], block * block_size + offset; a negative one skips its token
        """
        super().append(k, v, slots, stream)

    @in_words
    def attend(  # type: ignore[override]
        self,
        q: ArrayT,
        table: Table,
        q_starts: Array,
        *,
        out: ArrayT | None = None,
        softmax_scale: float = 0.0,
        softcap: float = 0.0,
        window: int = 0,
        max_tokens: int = 0,
        max_q_len: int = 0,
        stream: Stream = None,
    ) -> ArrayT:
        """Causal attention of a ragged batch, straight from the engine's bytes.

        q:        [tokens, num_q_heads, key_dim]; q_starts: int32 [sequences + 1], as in
                  kvx.PagedLayer.attend
        softmax_scale: 0: 1 / sqrt(key_dim)
        max_tokens, max_q_len: on a GPU the most tokens and queries of a sequence; 0: what the table
                  and q hold
        """
        if out is None:
            out = new_output(q, (*q.shape[:2], self.v.head_dim), self.device, "out is None and q")
        super().attend(
            q,
            out,
            table.core(),
            q_starts,
            softmax_scale,
            softcap,
            window,
            max_tokens,
            max_q_len,
            stream,
        )
        return out

    @in_words
    def flatten(
        self,
        table: Table,
        ranges: Sequence[tuple[int, int, int]],
        *,
        like: Any = None,
        stream: Stream = None,
    ) -> tuple[Any, Any]:
        """Decodes token ranges to (k, v), each [ranges, num_kv_heads, longest range, numbers of a
        row].

        ranges: (sequence, first token, number of tokens); what a shorter range leaves is 0
        like:   an array whose library and dtype the result has; needed on a GPU
        """
        if not ranges or any(min(one) < 0 for one in ranges):
            raise Error(f"ranges is {list(ranges)}; expected some, of numbers that are 0 or more")
        length = max(1, *(num_tokens for _, _, num_tokens in ranges))
        heads = self.shape.num_kv_heads
        outputs = []
        for dim in (self.key_dim, self.v.head_dim):
            out = new_output(
                like, (len(ranges) * heads * length, 1, dim), self.device, "like"
            )
            out[...] = 0
            outputs.append(out)
        columns = [np.array(column, np.int64) for column in zip(*ranges, strict=True)]
        columns.append(np.arange(len(ranges), dtype=np.int64) * (heads * length))
        columns[0] = columns[0].astype(np.int32)
        if self.device != "cpu":
            kinds = ("int32", "int64", "int64", "int64")
            columns = [
                new_numbers(like, numbers, kind)
                for numbers, kind in zip(columns, kinds, strict=True)
            ]
        super().gather(table.core(), *columns, *outputs, 1, length, stream)
        k, v = (
            out.reshape((len(ranges), heads, length, out.shape[-1])) for out in outputs
        )
        return k, v

    @in_words
    def copy_blocks(  # type: ignore[override]
        self, to: "Layer", from_blocks: Array, to_blocks: Array, *, stream: Stream = None
    ) -> None:
        """Copies whole blocks, int64 [copies] each; bytes where both layers have one format."""
        super().copy_blocks(to, from_blocks, to_blocks, stream)


@in_words
def transcode(
    source: Layer, target: Layer, from_slots: Array, to_slots: Array, *, stream: Stream = None
) -> None:
    """Copies tokens from one engine's layer to another's, in any format and layout.

    from_slots, to_slots: int64 [tokens]; a negative slot in either is skipped
    Raises kvx.Error: the layers share memory, or have other heads or head_dims.
    """
    _core.EngineLayer.transcode(source, target, from_slots, to_slots, stream)


def byte_strides(memory: Memory, name: str, *shape: int | None) -> tuple[int, ...]:
    """The array's strides, after a check of its shape; None allows any size."""
    fits = len(memory.shape) == len(shape) and all(
        want is None or want == found for want, found in zip(shape, memory.shape, strict=True)
    )
    if not fits:
        wanted = ", ".join("n" if n is None else str(n) for n in shape)
        raise Error(f"{name} has shape {list(memory.shape)}; expected [{wanted}]")
    return memory.strides


def check_innermost(memory: Memory, name: str) -> None:
    """Raises kvx.Error unless the last dimension is contiguous."""
    if memory.shape[-1] > 1 and memory.strides[-1] != memory.itemsize:
        raise Error(f"{name}'s last dimension has a stride of {memory.strides[-1]} bytes; "
                    f"expected {memory.itemsize}")


def check_itemsize(memory: Memory, name: str, format: str) -> None:
    """Raises kvx.Error unless an element of the array is one number of the format, or a byte."""
    bits = {"f32": 32, "f16": 16, "bf16": 16}.get(format.partition(":")[0], 8)
    if memory.itemsize != bits // 8:
        raise Error(f"{name} has elements of {memory.itemsize} bytes; {format} has {bits // 8}")
