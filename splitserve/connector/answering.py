"""What a worker answers to others: who may open its pool or its zone, which leases hold, which
blocks it has. One thread, the side channel's, also in the middle of an engine step."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable

from splitserve.clock import Clock
from splitserve.connector.convert import find_converter
from splitserve.connector.jobs import Asked
from splitserve.connector.offers import P2PConfig, short_digest
from splitserve.connector.push import Zone
from splitserve.connector.sidechannel import (
    SIDE_CHANNEL_VERSION,
    Begin,
    Begun,
    Confirm,
    Confirmed,
    Done,
    Ended,
    Find,
    FoundHere,
    FromReader,
    FromSource,
    PeerHello,
    Refused,
    SideChannelServer,
    Welcome,
)
from splitserve.errors import FormatMismatch
from splitserve.kv.lease import LeaseTable
from splitserve.transport.base import Transport
from splitserve.transport.segment import Segment
from splitserve.wire import Part


class Answerer:
    """The source's end of all side channels of one worker epoch."""

    def __init__(
        self,
        config: P2PConfig,
        transport: Transport,
        segment: Segment,
        leases: LeaseTable,
        clock: Clock,
        zone: Zone | None,
        wake: Callable[[], None],
        ask: Callable[[Asked], None],
    ) -> None:
        self._config = config
        self._transport = transport
        self._segment = segment
        self._leases = leases
        self._clock = clock
        self._zone = zone
        self._wake = wake
        self._ask = ask
        self._export = transport.export()
        self._zone_export = zone.transport.export(writable=True) if zone else None
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._lent: dict[str, int] = {}  # lease id: the connection that it was answered on
        self._asking: dict[int, tuple[int, int]] = {}  # ask id: connection, its own number
        name = f"splitserve/{config.worker_id}/{config.epoch}"
        self._server = SideChannelServer(
            name, self._answer, self._peer_closed, config.host, config.token
        )

    @property
    def address(self) -> str:
        return self._server.address

    def answer(self, ask_id: int, part: Part | None) -> bool:
        """Any thread. False if who asked has gone away."""
        with self._lock:
            asking = self._asking.pop(ask_id, None)
        if asking is None:
            return False
        peer, number = asking
        if part is not None:
            with self._lock:
                self._lent[part.lease_id] = peer
        return self._server.send(peer, FoundHere(number, part))

    def close(self) -> None:
        self._server.close()

    # --- the side channel's thread

    def _answer(self, message: FromReader, peer: int) -> tuple[FromSource | None, list[int]]:
        match message:
            case Confirm(lease_id):
                return Confirmed(self._leases.confirm(lease_id, self._clock.now())), []
            case Done(lease_id):
                with self._lock:
                    self._lent.pop(lease_id, None)
                self._leases.done(lease_id)
                self._wake()
            case Begin(landing_id):
                zone = self._zone
                return Begun(zone is not None and zone.landings.begin(landing_id, peer)), []
            case Ended(landing_id):
                if self._zone is not None:
                    self._zone.landings.end(landing_id, peer)
                self._wake()
            case Find(number, keys, first):
                with self._lock:
                    ask_id = next(self._numbers)
                    self._asking[ask_id] = peer, number
                self._ask(Asked(ask_id, keys, first))
            case PeerHello():
                return self._welcome(message)
        return None, []

    def _welcome(self, hello: PeerHello) -> tuple[FromSource, list[int]]:
        reason = self._refusal(hello)
        if reason:
            return Refused(reason), []
        segment, export = self._segment, self._export
        if hello.to_zone:
            assert self._zone is not None
            assert self._zone_export is not None
            segment, export = self._zone.segment, self._zone_export
        card, descriptors = export.card, export.descriptors()
        if hello.is_question:
            card, descriptors = b"", []
        return Welcome(len(segment.blocks), card, self._config.kv_format), descriptors

    def _peer_closed(self, peer: int) -> None:
        """Its process is gone, or its connection, on which it had leave to write."""
        with self._lock:
            for ask_id in [x for x, asking in self._asking.items() if asking[0] == peer]:
                del self._asking[ask_id]
            left = [x for x, lent in self._lent.items() if lent == peer]
            for lease_id in left:
                del self._lent[lease_id]
        for lease_id in left:  # should it live and still read: digests prove what it read
            self._leases.done(lease_id)
        if self._zone is not None:
            self._zone.landings.writer_gone(peer)
            self._wake()

    def _refusal(self, hello: PeerHello) -> str:
        """Why a peer is not welcome, naming both values; empty if it is."""
        ours = self._config
        if hello.version != SIDE_CHANNEL_VERSION:
            return f"side channel version {SIDE_CHANNEL_VERSION} here, {hello.version} there."
        if hello.to_zone and self._zone is None:
            return "there is no landing zone here."
        if hello.epoch != ours.epoch:
            return f"epoch {ours.epoch} here, {hello.epoch} asked."
        if hello.transport != self._transport.name:
            return f"transport {self._transport.name} here, {hello.transport} there."
        if hello.identity != ours.identity:
            here, there = short_digest(ours.identity), short_digest(hello.identity)
            return f"model identity {here} here, {there} there."
        try:
            if hello.to_zone or hello.is_question:
                ours.kv_format.require_equal(hello.format, "the peer")
            else:
                find_converter(ours.kv_format, hello.format, "the reader")
        except FormatMismatch as error:
            return error.message
        return ""
