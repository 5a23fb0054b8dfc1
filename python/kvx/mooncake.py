"""Mooncake as a tier: a kvx.Store over Mooncake's own Python client.

    kvx.register_store("mooncake", kvx.mooncake.MooncakeStore("10.0.0.7:50051", segment_bytes=8 << 30))
    cache = kvx.Cache(..., tiers="host(8GiB), store(mooncake)")

It needs the wheel mooncake-transfer-engine, or mooncake-transfer-engine-non-cuda, and a
mooncake_master, which the wheel has too. The wheel has no C library to call from C.
"""

import importlib
from typing import Any

from kvx.errors import Error, UnsupportedError

__all__ = ["MooncakeStore"]

_NO_ROOM = -200  # Mooncake's NO_AVAILABLE_HANDLE


class MooncakeStore:
    """A client of a Mooncake store; close() ends it, and with it the memory that it lends.

    master:        host:port of the mooncake_master
    segment_bytes: of this process's memory that the store may fill with anybody's values; 0 in a
                   process that only uses others'
    host:          this machine's name or address, as the other clients reach it
    metadata:      Mooncake's metadata server; its peers find each other without one
    protocol:      ``"tcp"``, or ``"rdma"`` with rdma_devices
    buffer_bytes:  of memory that values pass through: at least the tier's 8 MiB of a batch, twice
    """

    def __init__(
        self,
        master: str,
        *,
        segment_bytes: int,
        host: str = "127.0.0.1",
        metadata: str = "P2PHANDSHAKE",
        protocol: str = "tcp",
        rdma_devices: str = "",
        buffer_bytes: int = 64 << 20,
    ) -> None:
        try:
            client: Any = importlib.import_module("mooncake.store")
        except ImportError as error:
            raise UnsupportedError(
                f"Mooncake's client cannot be imported ({error}); install the wheel "
                f"mooncake-transfer-engine-non-cuda or mooncake-transfer-engine, and Debian's "
                f"libibverbs1"
            ) from error
        self._client: Any = client.MooncakeDistributedStore()
        code = self._client.setup(
            host, metadata, segment_bytes, buffer_bytes, protocol, rdma_devices, master
        )
        if code != 0:
            raise Error(
                f"master is {master!r}, and Mooncake's client refuses it (error {code}); expected "
                f"the host:port of a mooncake_master that runs"
            )

    def close(self) -> None:
        """Leaves the store: values that lie in this process's memory are gone."""
        self._client.close()

    def put(self, keys: list[str], values: list[bytes]) -> list[bool] | None:
        code = self._client.put_batch(keys, values)
        if code == 0:
            return None
        if code == _NO_ROOM:
            return self.exists(keys)
        raise RuntimeError(f"Mooncake's put_batch failed with error {code}")

    def get(self, keys: list[str]) -> list[bytes | None]:
        return [value or None for value in self._client.get_batch(keys)]

    def exists(self, keys: list[str]) -> list[bool]:
        answers = self._client.batch_is_exist(keys)
        if any(answer < 0 for answer in answers):
            raise RuntimeError(f"Mooncake's batch_is_exist failed with error {min(answers)}")
        return [answer == 1 for answer in answers]

    def remove(self, keys: list[str]) -> None:
        # By force: a value that was read lately has a lease.
        present = [key for key, there in zip(keys, self.exists(keys)) if there]
        codes = self._client.batch_remove(present, True) if present else []
        if any(code < 0 for code in codes) and any(self.exists(present)):
            raise RuntimeError(f"Mooncake's batch_remove failed with error {min(codes)}")

    def remove_all(self, parts: str) -> None:
        code = self._client.remove_by_regex(f"^{parts.replace('.', '[.]')}/.*", True)
        if code < 0:
            raise RuntimeError(f"Mooncake's remove_by_regex failed with error {code}")
