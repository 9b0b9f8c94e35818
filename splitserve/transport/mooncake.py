"""Transport `mooncake`: Mooncake's transfer engine over its tcp, peers found by their address.

Each export and each link has an engine of its own. The owner's serves without our threads; a link's
reads and writes by calls that block, batch by batch.

What the library does not do, and what is done instead:

  - A transfer can't be cancelled, or waited for with a shorter timeout than 5 s. A read or write
    that is broken off has at most one batch under way, because each call waits for its own. If a
    call fails, the engine is destroyed before we say so, which closes its sockets and joins its
    thread; the next transfer makes another. That takes up to a second.
  - A `write` that was broken off may have bytes in the socket buffer of a peer that was frozen and
    puts them into its zone later: a zone's blocks need their digests (decision 0013).
  - Nothing is protected. Its ports are open on all interfaces, and whoever reaches them is told
    what is registered and may read and write it. That a pool isn't written rests on the card's
    flag, which links check. Only for networks of which every host is trusted. A link registers
    nothing.
  - An engine reads whatever has the address and port that it was told. The card has a secret that
    lies in the owner's memory too, where a link that opens reads it: so a dead owner's successor
    isn't taken for it.
  - Every piece is a request of its own, answered before the next on the same of four sockets: small
    pieces are slow. The waiting call burns a core, without Python's lock.
"""

from __future__ import annotations

import hmac
import os
import secrets
import struct
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from mooncake.engine import TransferEngine

from splitserve.errors import ConfigError, TransferFailed
from splitserve.transport.base import IO_TIMEOUT_S, Export, Link, Pieces, Transport, check_pieces
from splitserve.transport.segment import Segment

BATCH_BYTES = 8 << 20
"""Of one call, if its pieces are smaller: what a cancellation waits for."""
MAX_PIECES = 256
"""Of one call. The engine refuses what it would have to queue beyond 1024."""
_SETTINGS = {
    "MC_FORCE_TCP": "1",  # else it takes RDMA where there is some, which is not tried here
    "MC_TRANSFER_TIMEOUT": f"{IO_TIMEOUT_S:.0f}",
    "MC_TCP_STATUS_TIMEOUT_SEC": f"{IO_TIMEOUT_S:.0f}",
    "MC_LOG_LEVEL": "ERROR",
}
"""Environment variables that the library reads; what is set already is kept."""
_MAGIC = b"SSM1"
_SECRET_BYTES = 32
_CARD = struct.Struct(f"!4s?QQQ{_SECRET_BYTES}s")
_READ, _WRITE = "batch_transfer_sync_read", "batch_transfer_sync_write"


def _make_engine(host: str) -> Any:
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    engine = TransferEngine()
    if engine.initialize(host, "P2PHANDSHAKE", "tcp", ""):
        raise ConfigError(f"Mooncake's transfer engine doesn't start on {host}.")
    return engine


def _address(array: npt.NDArray[np.uint8]) -> int:
    return int(array.ctypes.data)


class _MooncakeExport(Export):
    def __init__(self, region: npt.NDArray[np.uint8], host: str, *, writable: bool) -> None:
        secret = secrets.token_bytes(_SECRET_BYTES)
        self._secret = np.frombuffer(secret, np.uint8).copy()
        self._engine: Any = _make_engine(host)
        for array in (region, self._secret):
            if self._engine.register_memory(_address(array), array.nbytes):
                raise ConfigError("Mooncake can't register the KV pool.")
        places = (_address(region), region.nbytes, _address(self._secret))
        self._card = _CARD.pack(_MAGIC, writable, *places, secret)
        self._card += f"{host}:{self._engine.get_rpc_port()}".encode()

    @property
    def card(self) -> bytes:
        return self._card

    def descriptors(self) -> list[int]:
        return []

    def close(self) -> None:
        self._engine = None


class MooncakeTransport(Transport):
    """Between hosts, over tcp."""

    name = "mooncake"

    def __init__(self, segment: Segment, host: str = "127.0.0.1") -> None:
        """host: our address as peers reach it."""
        if host in ("", "0.0.0.0", "::"):
            raise ConfigError(
                f"The mooncake transport can't tell its peers to reach it at {host!r}.",
                advice="Name the address of one network interface.",
            )
        self.region = segment.blocks.reshape(-1)
        self.host = host
        self.links: set[_MooncakeLink] = set()
        self._export: Export | None = None

    def export(self, *, writable: bool = False) -> Export:
        assert self._export is None, "a segment is exported once"
        self._export = _MooncakeExport(self.region, self.host, writable=writable)
        return self._export

    def open(
        self, card: bytes, descriptors: list[int], num_bytes: int, *, writable: bool = False
    ) -> Link:
        for fd in descriptors:
            os.close(fd)
        if len(card) <= _CARD.size or not card.startswith(_MAGIC):
            raise TransferFailed("The peer's card is not one of mooncake.")
        _, may_write, base, their_bytes, secret_at, secret = _CARD.unpack_from(card)
        if their_bytes != num_bytes:
            raise TransferFailed(
                f"The peer's region has {their_bytes} bytes, its format says {num_bytes}."
            )
        if writable and not may_write:
            raise TransferFailed("The peer's region is not to be written.")
        peer = card[_CARD.size :].decode(errors="replace")
        link = _MooncakeLink(peer, base, num_bytes, writable, (secret_at, secret), self)
        link.connect()
        self.links.add(link)
        return link

    def close(self) -> None:
        for link in list(self.links):
            link.close()
        if self._export is not None:
            self._export.close()


class _MooncakeLink(Link):
    def __init__(
        self,
        peer: str,
        base: int,
        num_bytes: int,
        writable: bool,
        secret: tuple[int, bytes],
        transport: MooncakeTransport,
    ) -> None:
        self._peer = peer
        self._base = base
        self._num_bytes = num_bytes
        self._writable = writable
        self._secret = secret
        self._transport = transport
        self._ours = transport.region
        self._closed = False
        self._engine: Any = None

    def connect(self) -> None:
        """Make an engine, and see that the peer is the one that the card is of."""
        self._engine = _make_engine(self._transport.host)
        place, expected = self._secret
        got = np.zeros(_SECRET_BYTES, np.uint8)
        self._call(_READ, [_address(got)], [place], _SECRET_BYTES)
        if not hmac.compare_digest(got.tobytes(), expected):
            self._break()
            raise TransferFailed("The peer is not the one that was introduced.")

    def read(
        self, there: Sequence[int], here: Sequence[int], size: int, cancelled: threading.Event
    ) -> Pieces:
        check_pieces(there, here, size, self._num_bytes, len(self._ours))
        return self._transfer(_READ, there, here, size, cancelled)

    def write(
        self, there: Sequence[int], here: Sequence[int], size: int, cancelled: threading.Event
    ) -> Pieces:
        if not self._writable:
            raise TransferFailed("The peer's region was not opened for writing.")
        check_pieces(there, here, size, self._num_bytes, len(self._ours))
        return self._transfer(_WRITE, there, here, size, cancelled)

    def close(self) -> None:
        self._closed = True
        self._break()
        self._transport.links.discard(self)

    def _transfer(
        self,
        operation: str,
        there: Sequence[int],
        here: Sequence[int],
        size: int,
        cancelled: threading.Event,
    ) -> Pieces:
        if self._closed:
            raise TransferFailed("The link is closed.")
        if there and self._engine is None:
            self.connect()
        at_once = min(max(BATCH_BYTES // size, 1), MAX_PIECES)
        ours = _address(self._ours)
        for start in range(0, len(there), at_once):
            end = min(start + at_once, len(there))
            _check(cancelled)
            sources = [ours + offset for offset in here[start:end]]
            targets = [self._base + offset for offset in there[start:end]]
            self._call(operation, sources, targets, size)
            for i in range(start, end):
                yield i
                _check(cancelled)

    def _call(self, operation: str, here: list[int], there: list[int], size: int) -> None:
        """One blocking call; break the link if it fails."""
        if getattr(self._engine, operation)(self._peer, here, there, [size] * len(here)):
            self._break()
            raise TransferFailed(f"Mooncake lost the peer, or it made no progress: {self._peer}.")

    def _break(self) -> None:
        """Destroy the engine: after that nothing of it can touch our memory."""
        self._engine = None


def _check(cancelled: threading.Event) -> None:
    if cancelled.is_set():
        raise TransferFailed("The transfer was cancelled.")
