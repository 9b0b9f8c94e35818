"""Transport `shm`: the peer's sealed memfd, mapped; a piece is one copy.

A pool is mapped read-only. A landing zone is mapped writable, by those who were told that they may.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from splitserve.errors import TransferFailed
from splitserve.transport.base import Export, Link, Pieces, Transport, check_pieces
from splitserve.transport.segment import Segment


class _ShmExport(Export):
    def __init__(self, segment: Segment, *, writable: bool) -> None:
        # A descriptor opened read-only can't be mapped writable, whatever the peer's code does.
        flags = os.O_RDWR if writable else os.O_RDONLY
        self._fd = os.open(f"/proc/self/fd/{segment.fd}", flags | os.O_CLOEXEC)
        self._card = b"rw" if writable else b"r"

    @property
    def card(self) -> bytes:
        return self._card

    def descriptors(self) -> list[int]:
        return [self._fd]

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class _ShmLink(Link):
    def __init__(self, theirs: Segment, ours: Segment, *, writable: bool) -> None:
        self._theirs = theirs
        self._their_bytes = theirs.blocks.reshape(-1)
        self._our_bytes = ours.blocks.reshape(-1)
        self._writable = writable

    def read(
        self, there: Sequence[int], here: Sequence[int], size: int, cancelled: threading.Event
    ) -> Pieces:
        check_pieces(there, here, size, len(self._their_bytes), len(self._our_bytes))
        return _copy(self._their_bytes, there, self._our_bytes, here, size, cancelled)

    def write(
        self, there: Sequence[int], here: Sequence[int], size: int, cancelled: threading.Event
    ) -> Pieces:
        if not self._writable:
            raise TransferFailed("The peer's region was not opened for writing.")
        check_pieces(there, here, size, len(self._their_bytes), len(self._our_bytes))
        return _copy(self._our_bytes, here, self._their_bytes, there, size, cancelled)

    def close(self) -> None:
        self._theirs.close()


def _copy(
    source: npt.NDArray[np.uint8],
    source_at: Sequence[int],
    target: npt.NDArray[np.uint8],
    target_at: Sequence[int],
    size: int,
    cancelled: threading.Event,
) -> Pieces:
    for i, (a, b) in enumerate(zip(source_at, target_at, strict=True)):
        if cancelled.is_set():
            raise TransferFailed("The transfer was cancelled.")
        np.copyto(target[b : b + size], source[a : a + size])
        yield i


def link_here(theirs: Segment, ours: Segment) -> Link:
    """Between two segments of this process; closing it closes neither."""
    return _HereLink(theirs, ours, writable=False)


class _HereLink(_ShmLink):
    def close(self) -> None:
        pass


class ShmTransport(Transport):
    """Between regions on one host, whoever owns them."""

    name = "shm"

    def __init__(self, segment: Segment, host: str = "") -> None:
        self._segment = segment
        self._export: Export | None = None

    def export(self, *, writable: bool = False) -> Export:
        assert self._export is None, "a segment is exported once"
        self._export = _ShmExport(self._segment, writable=writable)
        return self._export

    def open(
        self, card: bytes, descriptors: list[int], num_bytes: int, *, writable: bool = False
    ) -> Link:
        if len(descriptors) != 1:
            for fd in descriptors:
                os.close(fd)
            raise TransferFailed(f"shm expects 1 descriptor, the peer sent {len(descriptors)}.")
        theirs = Segment.attach(descriptors[0], 1, num_bytes, writable=writable)
        return _ShmLink(theirs, self._segment, writable=writable)

    def close(self) -> None:
        if self._export is not None:
            self._export.close()
