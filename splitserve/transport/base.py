"""The transport contract: bytes between two regions of memory. It knows offsets, not requests.

A region is a `Segment`: a worker's KV pool, or a landing zone that it lends to writers. Its owner
exports it once; a peer opens it with what the side channel's welcome carried (`card` and
descriptors) and then reads from it or, if it was exported for that, writes to it. Either way the
other end of each copy is the peer's own segment.

What every transport promises, and the contract suite asserts:

  - a piece's index is yielded once, after all its bytes are in place (for `write`: at the peer);
  - when the iterator has ended, has raised or was closed, nothing touches the pieces any more
    (design 3.5): a transport that can't cancel waits, or breaks the link and waits for that;
  - a region that was not exported writable is never written by a peer that keeps to this code;
  - what goes wrong is a TransferFailed, within IO_TIMEOUT_S of the last progress.
"""

from __future__ import annotations

import abc
import threading
from collections.abc import Generator, Sequence

from splitserve.errors import TransferFailed

Pieces = Generator[int, None, None]
"""Indices of pieces as they are in place. Closing it ends the transfer."""

IO_TIMEOUT_S = 5.0
"""A peer that makes no progress for so long has failed. Every transport has it as its default."""


class Export(abc.ABC):
    """The owner's side: how peers reach our region."""

    @property
    @abc.abstractmethod
    def card(self) -> bytes:
        """What a peer needs to open the region, opaque to all but this transport."""

    @abc.abstractmethod
    def descriptors(self) -> list[int]:
        """File descriptors to pass with the card; the exporter keeps its own. Empty for transports
        that cross hosts."""

    @abc.abstractmethod
    def close(self) -> None:
        """Serve no one any more. A peer that has mapped the memory keeps the mapping."""


class Link(abc.ABC):
    """One opened region of a peer. Used by one thread at a time."""

    @abc.abstractmethod
    def read(
        self, there: Sequence[int], here: Sequence[int], size: int, cancelled: threading.Event
    ) -> Pieces:
        """Copy `size` bytes from offset there[i] of the peer's region to offset here[i] of ours.

        Yields each i when its piece is in place, in any order. Raise TransferFailed for an offset
        beyond either region, a lost peer, a timeout, or once `cancelled` is set.
        """

    @abc.abstractmethod
    def write(
        self, there: Sequence[int], here: Sequence[int], size: int, cancelled: threading.Event
    ) -> Pieces:
        """The other way: from offset here[i] of ours to offset there[i] of the peer's.

        The bytes are in the peer's memory before the index is yielded. Raise TransferFailed also
        if the region was not opened writable.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Drop the peer's region. Idempotent."""


class Transport(abc.ABC):
    """One way to move bytes from and to one segment of ours, by its registered name."""

    name: str

    @abc.abstractmethod
    def export(self, *, writable: bool = False) -> Export:
        """Let peers read our segment, or also write it. At most once."""

    @abc.abstractmethod
    def open(
        self, card: bytes, descriptors: list[int], num_bytes: int, *, writable: bool = False
    ) -> Link:
        """Open a peer's region of `num_bytes`; takes over the descriptors. Raise TransferFailed
        if the card is unreadable, the peer is gone, or its region has another size."""

    @abc.abstractmethod
    def close(self) -> None:
        """End what this transport started (threads, agents), links and export included."""


def check_pieces(
    there: Sequence[int], here: Sequence[int], size: int, their_bytes: int, our_bytes: int
) -> None:
    """Raise TransferFailed if a piece lies outside its region, before anything moves."""
    if size <= 0 or len(there) != len(here):
        raise TransferFailed(f"{len(there)} pieces for {len(here)} of {size} bytes.")
    for whose, offsets, limit in (("the peer's", there, their_bytes), ("our", here, our_bytes)):
        if offsets and not (min(offsets) >= 0 and max(offsets) + size <= limit):
            raise TransferFailed(f"A piece lies outside {whose} region of {limit} bytes.")
