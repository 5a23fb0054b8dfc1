"""Cache files: reads what one holds, and checks that it is intact."""

import os
from dataclasses import dataclass

from kvx import _core
from kvx.errors import Error


def path_bytes(path, name="path") -> bytes:
    """A path as the core takes it, from text, bytes or anything that os.fspath takes."""
    encoded = os.fsencode(path)
    if b"\0" in encoded:
        raise Error(f"{name} is {os.fsdecode(encoded)!r}; expected no null character")
    return encoded


@dataclass(frozen=True)
class BlockCopyKind:
    """Blocks of one layer group, packed or full-precision (16 bits): how many, and their bytes in
    memory and in the file."""

    layer_group: int
    is_full_precision: bool
    block_copies: int
    bytes: int
    stored_bytes: int


@dataclass(frozen=True)
class CacheFile:
    """What a cache file holds. ``sequences`` are the token numbers of each saved sequence."""

    version: int
    file_bytes: int
    fingerprint: str
    block_size: int
    blocks: int
    sequences: list[list[int]]
    kinds: list[BlockCopyKind]


def inspect(path) -> CacheFile:
    """Reads a cache file's index, which is checked; its blocks are not read.

    Raises kvx.Error: no cache file, a damaged one, or one of a newer version.
    """
    fields = _core.inspect_file(path_bytes(path))
    return CacheFile(**{**fields, "kinds": [BlockCopyKind(**kind) for kind in fields["kinds"]]})


def verify(path) -> int:
    """Reads every block of a cache file and checks it; returns how many block copies there are.

    Raises kvx.Error naming the first damaged block, or as inspect() does.
    """
    _core.check_file(path_bytes(path))
    return sum(kind.block_copies for kind in inspect(path).kinds)
