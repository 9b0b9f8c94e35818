"""The transport contract: bytes between two pools. It knows blocks, not requests.

The source exports its pool once; a reader opens it with what the source's welcome carried.
"""

from __future__ import annotations

import abc

from splitserve.kv.format import KVFormat


class Export(abc.ABC):
    """The source's side: how peers reach our pool."""

    name: str

    @abc.abstractmethod
    def descriptors(self) -> list[int]:
        """File descriptors to pass with the welcome; the exporter keeps its own."""

    @abc.abstractmethod
    def close(self) -> None:
        """Peers that have opened the pool keep what they mapped."""


class Reader(abc.ABC):
    """One opened peer. Used by one thread at a time."""

    @abc.abstractmethod
    def read(self, source: int, target: int) -> None:
        """Copy the peer's block `source` to our block `target`; raise TransferFailed."""

    @abc.abstractmethod
    def close(self) -> None:
        """Drop the peer's pool."""


class Transport(abc.ABC):
    """One way to move bytes, by its registered name."""

    name: str

    @abc.abstractmethod
    def export(self) -> Export:
        """Called once, when the worker starts."""

    @abc.abstractmethod
    def open(self, descriptors: list[int], num_blocks: int, kv_format: KVFormat) -> Reader:
        """Called at the handshake with a peer; takes over the descriptors."""
