"""Sequences from one process to another by NIXL or by Mooncake's Transfer Engine, whose networks
(RDMA, UCX, TCP) read the exporter's memory without its processor.

    offer = kvx.transports.offer_sequence(cache, sequence, kvx.transports.Nixl())
    text = offer.description  # for the importer, by any way

    sequence = kvx.transports.take_sequence(cache, text, kvx.transports.Nixl())

What travels is a cache file (docs/cache-file.md) in shared memory, as with Cache.export_sequence():
packed bytes with checksums, which the importer checks. Wheels: nixl-cu12 or nixl-cu13, or
mooncake-transfer-engine(-non-cuda) with Debian's libibverbs1.
"""

import base64
import importlib
import json
import mmap
import os
import tempfile
import time
import uuid
from types import TracebackType
from typing import Any, Protocol

import numpy as np

from kvx.cache import Cache
from kvx.errors import Error, UnsupportedError

__all__ = ["MooncakeEngine", "Nixl", "Offer", "Transport", "offer_sequence", "take_sequence"]

_VERSION = 1
_MOST_BYTES = 1 << 40
_SHARED_MEMORY = "/dev/shm"


class Transport(Protocol):
    """What a network has to do. Addresses are of this process, or of the peer's."""

    name: str

    def peer(self) -> bytes:
        """What the other side needs to reach this one. After register()."""

    def register(self, address: int, num_bytes: int) -> object: ...

    def unregister(self, memory: object) -> None: ...

    def read(self, peer: bytes, there: int, here: int, num_bytes: int, seconds: float) -> None:
        """Reads the peer's memory. Raises kvx.Error: it cannot."""


class Nixl:
    """A NIXL agent. backend: NIXL's, ``"UCX"`` for RDMA, shared memory and TCP."""

    name = "nixl"

    def __init__(self, backend: str = "UCX") -> None:
        api: Any = _imported(
            ("nixl_cu13._api", "nixl_cu12._api"), "NIXL", "nixl-cu12 or nixl-cu13"
        )
        config = api.nixl_agent_config(backends=[backend])
        self._agent: Any = api.nixl_agent(f"kvx-{uuid.uuid4().hex}", config)

    def peer(self) -> bytes:
        return bytes(self._agent.get_agent_metadata())

    def register(self, address: int, num_bytes: int) -> object:
        return self._agent.register_memory([(address, num_bytes, 0, "")], "DRAM")

    def unregister(self, memory: object) -> None:
        self._agent.deregister_memory(memory)

    def read(self, peer: bytes, there: int, here: int, num_bytes: int, seconds: float) -> None:
        try:
            name = self._agent.add_remote_agent(peer)
        except Exception as error:
            raise Error(f"NIXL does not know the exporter: {error}") from error
        try:
            self._read(name, there, here, num_bytes, seconds)
        finally:
            self._agent.remove_remote_agent(name)

    def _read(self, name: str, there: int, here: int, num_bytes: int, seconds: float) -> None:
        of = self._agent.get_xfer_descs
        until = time.monotonic() + seconds
        try:
            job = self._agent.initialize_xfer(
                "READ",
                of([(here, num_bytes, 0)], "DRAM"),
                of([(there, num_bytes, 0)], "DRAM"),
                name,
            )
        except Exception as error:
            raise Error(f"NIXL cannot read the exporter's memory: {error}") from error
        try:
            state = self._agent.transfer(job)
            while state not in ("DONE", "ERR") and time.monotonic() < until:
                time.sleep(0.0002)
                state = self._agent.check_xfer_state(job)
        except Exception as error:
            raise Error(f"NIXL cannot read the exporter's memory: {error}") from error
        finally:
            self._agent.release_xfer_handle(job)
        if state != "DONE":
            raise Error(f"NIXL's read of {num_bytes} bytes is {state} after {seconds:.0f} s")


class MooncakeEngine:
    """Mooncake's Transfer Engine. host: this machine's address, as the other side reaches it;
    protocol: ``"tcp"``, or ``"rdma"`` with devices."""

    name = "mooncake"

    def __init__(self, host: str = "127.0.0.1", protocol: str = "tcp", devices: str = "") -> None:
        module: Any = _imported(
            ("mooncake.engine",),
            "Mooncake's Transfer Engine",
            "mooncake-transfer-engine-non-cuda or mooncake-transfer-engine, and Debian's libibverbs1",
        )
        self._engine: Any = module.TransferEngine()
        code = self._engine.initialize(host, "P2PHANDSHAKE", protocol, devices)
        if code != 0:
            raise Error(
                f"host is {host!r} and protocol {protocol!r}, and Mooncake's engine refuses them "
                f"(error {code}); expected this machine's address, and tcp or rdma"
            )
        self._peer = f"{host}:{self._engine.get_rpc_port()}"

    def peer(self) -> bytes:
        return self._peer.encode()

    def register(self, address: int, num_bytes: int) -> object:
        code = self._engine.register_memory(address, num_bytes)
        if code != 0:
            raise Error(f"Mooncake's engine does not register {num_bytes} bytes (error {code})")
        return address

    def unregister(self, memory: object) -> None:
        self._engine.unregister_memory(memory)

    def read(self, peer: bytes, there: int, here: int, num_bytes: int, seconds: float) -> None:
        """Mooncake has its own time limit (MC_TRANSFER_TIMEOUT)."""
        code = self._engine.transfer_sync_read(
            peer.decode(errors="replace"), here, there, num_bytes
        )
        if code != 0:
            raise Error(f"Mooncake's engine cannot read the exporter's memory (error {code})")


class _SharedFile:
    """A nameless end: a file in shared memory that a transport reads or writes."""

    def __init__(self) -> None:
        descriptor, self.path = tempfile.mkstemp(prefix="kvx-", dir=_SHARED_MEMORY)
        os.close(descriptor)
        self._map: mmap.mmap | None = None

    def map(self, num_bytes: int | None = None) -> tuple[int, int]:
        """(address, bytes); num_bytes: makes it so long first."""
        with open(self.path, "r+b") as file:
            if num_bytes is not None:
                file.truncate(num_bytes)
            self._map = mmap.mmap(file.fileno(), 0)
        array = np.frombuffer(self._map, np.uint8)
        return array.ctypes.data, array.nbytes

    def close(self) -> None:
        self._map = None  # unmapped with its last user
        if os.path.exists(self.path):
            os.unlink(self.path)


class Offer:
    """A sequence that others may read until close(). description: what take_sequence() needs."""

    def __init__(self, file: _SharedFile, transport: Transport) -> None:
        self._file: _SharedFile | None = file
        self._transport = transport
        address, self.num_bytes = file.map()
        self._memory = transport.register(address, self.num_bytes)
        self.description = json.dumps(
            {
                "kvx_offer": _VERSION,
                "transport": transport.name,
                "peer": base64.b64encode(transport.peer()).decode(),
                "address": address,
                "bytes": self.num_bytes,
            }
        )

    def close(self) -> None:
        if self._file is not None:
            self._transport.unregister(self._memory)
            self._file.close()
            self._file = None

    def __enter__(self) -> "Offer":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def offer_sequence(cache: Cache, sequence: int, transport: Transport) -> Offer:
    """Copies the sequence's bytes to shared memory that the transport's peers may read; the sequence
    may be freed afterwards. Errors as Cache.save_sequence."""
    file = _SharedFile()
    try:
        cache.save_sequence(sequence, file.path)
        return Offer(file, transport)
    except BaseException:
        file.close()
        raise


def take_sequence(
    cache: Cache, description: str, transport: Transport, *, seconds: float = 30.0
) -> int:
    """A new sequence as another process offered it. All or nothing.

    Raises kvx.Error: no description of this version or transport, memory that cannot be read, and
    as Cache.load_sequence: another cache's sequence (the message names the difference), damaged
    bytes; kvx.OutOfRangeError: no room.
    """
    peer, address, num_bytes = _parsed(description, transport)
    file = _SharedFile()
    try:
        here, _ = file.map(num_bytes)
        memory = transport.register(here, num_bytes)
        try:
            transport.read(peer, address, here, num_bytes, seconds)
        finally:
            transport.unregister(memory)
        return cache.load_sequence(file.path)
    finally:
        file.close()


def _parsed(description: str, transport: Transport) -> tuple[bytes, int, int]:
    try:
        facts = json.loads(description)
        version = facts["kvx_offer"]
        name, peer = facts["transport"], base64.b64decode(facts["peer"], validate=True)
        address, num_bytes = facts["address"], facts["bytes"]
    except (ValueError, KeyError, TypeError) as error:
        raise Error(f"description is none of an offer ({error!r})") from None
    if version != _VERSION:
        raise Error(f"the offer has version {version!r}; expected {_VERSION}")
    if name != transport.name:
        raise Error(f"the offer is of the transport {name!r}; expected {transport.name!r}")
    is_place = type(address) is int and 0 < address < 1 << 63
    if not is_place or type(num_bytes) is not int or not 1 <= num_bytes <= _MOST_BYTES:
        raise Error(f"the offer has {num_bytes!r} bytes at {address!r}; expected 1 to {_MOST_BYTES}")
    return peer, address, num_bytes


def _imported(modules: tuple[str, ...], what: str, wheels: str) -> object:
    problems = []
    for module in modules:
        try:
            return importlib.import_module(module)
        except ImportError as error:
            problems.append(str(error))
    raise UnsupportedError(
        f"{what} cannot be imported ({'; '.join(problems)}); install the wheel {wheels}"
    )
