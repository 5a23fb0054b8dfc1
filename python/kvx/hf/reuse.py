"""What a kvx.hf.Cache finds again by its tokens: prefixes in the cache, its host tier, and files.

A layer's keys and values lie in a cache of their own, so each layer finds its own blocks; a prefix
is as long as the shortest that all layers have. A saved cache is a folder of cache files
(docs/cache-file.md), one a layer and row: ``layer-007-row-000.kvx``.
"""

import os
import re
import shutil
import tempfile
from pathlib import Path

import torch

from kvx.errors import Error, UnsupportedError

_FILE = re.compile(r"layer-(\d{3,})-row-(\d{3,})\.kvx")


def record(cache, ids):
    """kvx.hf.Cache.record."""
    rows = _checked_rows(cache, ids, "record()")
    length = cache.get_seq_length()
    if cache._columns is not None:
        raise UnsupportedError(
            "the cache was given an attention_mask that hides tokens; only rows without padding "
            "can be found again by their tokens"
        )
    if len(rows) != cache.layers[0].batch_size or len(rows[0]) < length:
        raise Error(
            f"ids has the shape [{len(rows)}, {len(rows[0])}]; expected "
            f"[{cache.layers[0].batch_size}, {length}] or longer, the tokens that the cache holds"
        )
    for layer in cache.layers:
        for b, sequence in enumerate(layer.sequences):
            tokens, recorded = rows[b][:length], layer.cache.recorded_tokens(sequence)
            if recorded != tokens[: len(recorded)]:
                at = next(i for i, token in enumerate(recorded) if token != tokens[i])
                raise Error(
                    f"ids[{b}, {at}] is {tokens[at]}; {recorded[at]} was recorded there earlier"
                )
            layer.cache.record_tokens(sequence, tokens[len(recorded) :])


def begin(cache, ids, device):
    """kvx.hf.Cache.begin."""
    rows = _checked_rows(cache, ids, "begin()")
    _initialize(cache, len(rows), device)
    found = [layer.begin(rows) for layer in cache.layers]
    shortest = min(min(counts) for counts in found)
    if any(count != shortest for counts in found for count in counts):
        shortest -= shortest % cache.block_size
    try:
        for layer in cache.layers:
            layer.keep(shortest)
    except Error:  # a sliding window no longer has what a shorter one reads
        cache.reset()
        return 0
    cache.forget_masks()
    return shortest


def save(cache, folder, ids, zstd_level):
    """kvx.hf.Cache.save."""
    _need_prefixes(cache, "save()")
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or _others(folder)):
        raise Error(
            f"folder is {str(folder)!r}, which is there; expected a new name, or a saved cache"
        )
    if cache.get_seq_length() == 0:
        raise Error("the cache is empty; there is nothing to save")
    record(cache, ids)
    folder.parent.mkdir(parents=True, exist_ok=True)
    written = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        for layer in cache.layers:
            for b, sequence in enumerate(layer.sequences):
                path = written / f"layer-{layer.index:03}-row-{b:03}.kvx"
                layer.cache.save_sequence(sequence, path, zstd_level=zstd_level)
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(written, folder)
    finally:
        shutil.rmtree(written, ignore_errors=True)


def load(cache, folder, device):
    """kvx.hf.Cache.load."""
    _need_prefixes(cache, "load()")
    folder = Path(folder)
    files = _files(folder)
    num_rows = 1 + max((row for _, row in files), default=-1)
    missing = [
        (layer, row)
        for layer in range(len(cache.layers))
        for row in range(max(num_rows, 1))
        if (layer, row) not in files
    ]
    if missing or len(files) != len(cache.layers) * num_rows:
        raise Error(
            f"folder is {str(folder)!r}, which holds files of "
            f"{len({layer for layer, _ in files})} layers; expected a cache that was saved with "
            f"the model's {len(cache.layers)}"
        )
    _initialize(cache, num_rows, device)
    loaded = []
    try:
        for layer in cache.layers:
            loaded.append([])
            for row in range(num_rows):
                loaded[-1].append(layer.cache.load_sequence(folder / files[layer.index, row]))
        rows = [cache.layers[0].cache.recorded_tokens(sequence) for sequence in loaded[0]]
        for layer, sequences in zip(cache.layers, loaded):
            if [layer.cache.recorded_tokens(s) for s in sequences] != rows:
                raise Error(
                    f"layer {layer.index} of {str(folder)!r} holds other tokens than layer 0"
                )
        if len({len(row) for row in rows}) > 1:
            raise Error(f"rows of {str(folder)!r} differ in length")
    except BaseException:
        for layer, sequences in zip(cache.layers, loaded):
            for sequence in sequences:
                layer.cache.free_sequence(sequence)
        raise
    for layer, sequences in zip(cache.layers, loaded):
        layer.take(sequences, len(rows[0]))
    cache.forget_masks()
    return torch.tensor(rows, device=device)


def _checked_rows(cache, ids, call):
    _need_prefixes(cache, call)
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or ids.is_floating_point():
        shape = list(ids.shape) if isinstance(ids, torch.Tensor) else type(ids).__name__
        raise Error(f"ids is {shape}; expected a tensor of token numbers, [rows, tokens]")
    return ids.tolist()


def _need_prefixes(cache, call):
    if cache.prefix_model is None:
        raise UnsupportedError(
            f"{call} needs a name for what computes keys and values, such as the model's; make "
            f"the cache by kvx.hf.Cache(..., prefix_model=...)"
        )


def _initialize(cache, num_rows, device):
    """Makes the layers' caches, whose sizes are the config's."""
    for layer in cache.layers:
        if not layer.is_initialized:
            layer.initialize_for(num_rows, torch.device(device))
    if cache.layers[0].batch_size != num_rows:
        raise Error(
            f"there are {num_rows} rows; the cache was made for {cache.layers[0].batch_size} "
            f"(make another cache)"
        )


def _files(folder):
    """Names by (layer, row). Raises kvx.Error: no such folder."""
    if not folder.is_dir():
        raise Error(f"folder is {str(folder)!r}; expected a folder that kvx.hf.Cache.save wrote")
    matches = [_FILE.fullmatch(name) for name in os.listdir(folder)]
    return {(int(m[1]), int(m[2])): m[0] for m in matches if m}


def _others(folder):
    return [name for name in os.listdir(folder) if not _FILE.fullmatch(name)]
