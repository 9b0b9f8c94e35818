"""Opened regions of other workers: their pools, that we read, or their zones, that we write."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from splitserve.connector.convert import Converter
from splitserve.connector.sidechannel import SideChannel
from splitserve.transport.base import Link, Transport
from splitserve.transport.segment import Segment

OpenPeer = Callable[[str, str], "Peer"]
"""From epoch and address; raises TransferFailed, FormatMismatch."""


@dataclass(frozen=True, slots=True)
class Scratch:
    """Where blocks of another format are put before they are converted."""

    segment: Segment
    transport: Transport
    converter: Converter

    def close(self) -> None:
        self.transport.close()
        self.segment.close()


@dataclass(frozen=True, slots=True)
class Peer:
    """A worker epoch's region, and the side channel by which it was opened."""

    channel: SideChannel
    link: Link
    scratch: Scratch | None = None  # the link reads into it, as the peer's format is another

    def close(self) -> None:
        self.channel.close()
        self.link.close()
        if self.scratch is not None:
            self.scratch.close()


class Peers:
    """By worker epoch; each is opened when first needed. For one thread."""

    def __init__(self, open_peer: OpenPeer) -> None:
        self._open = open_peer
        self._peers: dict[tuple[str, str], Peer] = {}

    def get(self, worker_id: str, epoch: str, address: str) -> Peer:
        """Open it, unless it is; closes those that are gone on the way. Raises as `open_peer`.

        One that is gone but was asked for is kept: memory that is mapped outlives its owner.
        """
        key = (worker_id, epoch)
        for known, peer in list(self._peers.items()):
            if peer.channel.is_broken or (known != key and not peer.channel.is_open):
                peer.close()
                del self._peers[known]
        if key not in self._peers:
            self._peers[key] = self._open(epoch, address)
        return self._peers[key]

    def known(self, worker_id: str, epoch: str) -> Peer | None:
        """The one that is open."""
        return self._peers.get((worker_id, epoch))

    def close(self) -> None:
        for peer in self._peers.values():
            peer.close()
        self._peers.clear()
