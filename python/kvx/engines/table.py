"""Table: block tables as engines have them, for kvx.engines.Layer."""

from dataclasses import dataclass
from typing import Any

from kvx import _core
from kvx.errors import Error

_PACKED, _RAGGED, _KV_OFFSETS = 1, 2, 3
_KVCACHEINDEX, _RAGGED_PAGES = 1, 2


@dataclass(frozen=True)
class Table:
    """Which blocks hold which tokens of a batch, and its lengths. One of the functions below makes
    it; arrays are int32 or int64, contiguous, and lie where the layer does."""

    format: int
    indices: Any
    indptr: Any
    seq_lens: Any
    seq_count: int
    beam_width: int
    max_blocks: int
    flags: int

    def core(self) -> Any:
        """The core's table over the same arrays."""
        return _core.EngineTable(
            self.format,
            self.indices,
            self.indptr,
            self.seq_lens,
            self.seq_count,
            self.beam_width,
            self.max_blocks,
            self.flags,
        )


def _shape(array: Any, name: str, num_dimensions: int) -> tuple[int, ...]:
    shape = tuple(getattr(array, "shape", ()))
    if len(shape) != num_dimensions:
        raise Error(f"{name} has {len(shape)} dimensions; expected {num_dimensions}")
    return shape


def packed(block_table: Any, seq_lens: Any) -> Table:
    """block_table [sequences, blocks], contiguous; vLLM, TGI and llama.cpp.

    Raises kvx.Error: another number of dimensions.
    """
    sequences, blocks = _shape(block_table, "block_table", 2)
    return Table(
        _PACKED, block_table.reshape(-1), None, seq_lens, sequences, 1, blocks, 0
    )


def pages(indptr: Any, indices: Any, seq_lens: Any, *, max_blocks: int = 0) -> Table:
    """The pages of sequence s are indices[indptr[s] : indptr[s + 1]]; FlashInfer.

    max_blocks: on a GPU the most pages of a sequence; the CPU reads them. int32 indptr
    """
    (entries,) = _shape(indptr, "indptr", 1)
    (count,) = _shape(indices, "indices", 1)
    return Table(
        _RAGGED, indices, indptr, seq_lens, entries - 1, 1, max_blocks or count, _RAGGED_PAGES
    )


def tokens(indptr: Any, slots: Any, seq_lens: Any, *, max_tokens: int = 0) -> Table:
    """The slots of sequence s, one a token, are slots[indptr[s] : indptr[s + 1]]: of layers whose
    block_size is 1, as SGLang's and TGI's with FlashInfer."""
    (entries,) = _shape(indptr, "indptr", 1)
    (count,) = _shape(slots, "slots", 1)
    return Table(_RAGGED, slots, indptr, seq_lens, entries - 1, 1, max_tokens or count, 0)


def kv_offsets(offsets: Any, seq_lens: Any) -> Table:
    """int32 [sequences, beams, 2 (K, V), blocks], bit 31 the secondary pool; TensorRT-LLM.

    seq_lens: [sequences], which all beams share
    """
    sequences, beams, sides, blocks = _shape(offsets, "offsets", 4)
    if sides != 2:
        raise Error(f"offsets has {sides} sides; expected 2, K and V")
    return Table(
        _KV_OFFSETS,
        offsets.reshape(-1),
        None,
        seq_lens,
        sequences,
        beams,
        blocks,
        _KVCACHEINDEX,
    )
