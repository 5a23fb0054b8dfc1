"""Cache files: reads what one holds, and checks that it is intact."""

import os
from dataclasses import dataclass

from kvx import _core
from kvx.arrays import described
from kvx.errors import Error
from kvx.types import Path


def path_bytes(path: Path, name: str = "path") -> bytes:
    """A path as the core takes it, from text, bytes or anything that os.fspath takes."""
    try:
        encoded = os.fsencode(path)
    except TypeError:
        raise TypeError(f"{name} is {described(path)}; expected a path") from None
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


def inspect(path: Path) -> CacheFile:
    """Reads a cache file's index, which is checked; its blocks are not read.

    Raises kvx.Error: no cache file, a damaged one, or one of a newer version.
    """
    fields = _core.inspect_file(path_bytes(path))
    return CacheFile(**{**fields, "kinds": [BlockCopyKind(**kind) for kind in fields["kinds"]]})


def verify(path: Path) -> int:
    """Reads every block of a cache file and checks it; returns how many block copies there are.

    Raises kvx.Error naming the first damaged block, or as inspect() does.
    """
    _core.check_file(path_bytes(path))
    return sum(kind.block_copies for kind in inspect(path).kinds)
