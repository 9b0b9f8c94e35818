"""Connector `p2p`. Pull: the reader copies leased blocks out of the source's pool, all of them when
prefill has ended or each step's while it goes on. Push: the source writes them to a landing that
the reader lends (`connector.push`), and the reader copies them from there.

A copy may be used only with a proof (design 3.4): every block's digest equals the one in the offer
(then a dead source does not matter), or, without digests, the source's word after the copy that the
lease held throughout.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import xxhash

from splitserve.clock import Clock
from splitserve.connector.base import (
    Connector,
    Event,
    FetchDone,
    FetchJob,
    PushJob,
    SealDone,
    SealJob,
    Staging,
    Wake,
    WorkerSide,
)
from splitserve.connector.offers import P2PConfig, P2PScheduler, short_digest
from splitserve.connector.peers import Peer, Peers
from splitserve.connector.push import Pusher, Zone
from splitserve.connector.sidechannel import (
    SIDE_CHANNEL_VERSION,
    Begin,
    Begun,
    Confirm,
    Confirmed,
    Done,
    Ended,
    FromReader,
    PeerHello,
    Refused,
    SideChannel,
    SideChannelServer,
    Welcome,
)
from splitserve.errors import FormatMismatch, SplitserveError, TransferFailed
from splitserve.faults import Faults
from splitserve.kv.lease import LeaseTable
from splitserve.transport.base import Link, Transport
from splitserve.transport.segment import Segment
from splitserve.wire import Landing, Offer, Part

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 2.0


@dataclass(slots=True)
class _Request:
    """A request's jobs: told to end all at once."""

    cancelled: threading.Event = field(default_factory=threading.Event)
    num_jobs: int = 0


class P2PWorker(WorkerSide):
    """Threads: one answers readers and writers, one digests our leases, one copies for us, one
    writes to landings of others. zone: what we lend ourselves, if anything."""

    def __init__(
        self,
        config: P2PConfig,
        transport: Transport,
        segment: Segment,
        leases: LeaseTable,
        clock: Clock,
        wake: Wake,
        faults: Faults | None = None,
        staging: Staging | None = None,
        zone: Zone | None = None,
    ) -> None:
        self._config = config
        self._zone = zone
        self._transport = transport
        self._segment = segment
        self._leases = leases
        self._clock = clock
        self._wake = wake
        self._faults = faults or Faults()
        self._staging = staging
        self._done: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._requests: dict[str, _Request] = {}  # those with jobs
        self._peers = Peers(functools.partial(self._open, to_zone=False))  # the copying thread's
        self._export = transport.export()
        self._sealer = ThreadPoolExecutor(1, thread_name_prefix="kv-seal")
        self._fetcher = ThreadPoolExecutor(1, thread_name_prefix="kv-fetch")
        self._closing = threading.Event()
        name = f"splitserve/{config.worker_id}/{config.epoch}"
        self._zone_export = zone.transport.export(writable=True) if zone else None
        self._zone_link = zone.link_to(segment) if zone else None
        layer_bytes = config.kv_format.block_bytes // config.kv_format.num_layers
        zones = Peers(functools.partial(self._open, to_zone=True))  # the pushing thread's
        self._pusher = Pusher(
            zones, config.kv_format.block_bytes, layer_bytes, self._report, self._faults
        )
        self._server = SideChannelServer(
            name, self._answer, self._peer_closed, config.host, config.token
        )

    @property
    def address(self) -> str:
        return self._server.address

    # --- called by the engine thread

    def start_seal(self, job: SealJob) -> None:
        self._sealer.submit(self._seal, job)

    def start_fetch(self, job: FetchJob) -> None:
        request = self._requests.setdefault(job.request_id, _Request())
        request.num_jobs += 1
        self._fetcher.submit(self._fetch, job, request.cancelled)

    def cancel_fetch(self, request_id: str) -> None:
        request = self._requests.get(request_id)
        if request is not None:
            request.cancelled.set()

    def start_push(self, job: PushJob) -> None:
        self._pusher.start(job)

    def end_push(self, landing: Landing) -> None:
        self._pusher.end(landing)

    def lend(self, first: int, num_blocks: int) -> Landing | None:
        if self._zone is None:
            return None
        lent = self._zone.landings.lend(num_blocks)
        if lent is None:
            return None
        landing_id, blocks = lent
        config = self._config
        return Landing(landing_id, config.worker_id, config.epoch, self.address, first, blocks)

    def give_back(self, landing: Landing) -> None:
        assert self._zone is not None
        self._zone.landings.give_back(landing.landing_id)

    @property
    def num_quarantined(self) -> int:
        return 0 if self._zone is None else self._zone.landings.num_quarantined

    @property
    def is_settled(self) -> bool:
        return self._zone is None or self._zone.landings.is_settled

    def check(self) -> None:
        if self._zone is not None:
            self._zone.landings.check()

    def meet(self, worker_id: str, epoch: str, address: str) -> None:
        self._fetcher.submit(self._meet, worker_id, epoch, address)

    def end_lease(self, offer: Part | Offer) -> None:
        self._fetcher.submit(self._end_lease, offer)

    def poll(self) -> list[Event]:
        events: list[Event] = []
        while not self._done.empty():
            event = self._done.get()
            if isinstance(event, FetchDone):
                request = self._requests[event.request_id]
                request.num_jobs -= 1
                if not request.num_jobs:
                    del self._requests[event.request_id]
            events.append(event)
        return events

    def close(self) -> None:
        self._closing.set()
        for request in self._requests.values():
            request.cancelled.set()
        self._fetcher.shutdown(wait=True, cancel_futures=True)
        self._sealer.shutdown(wait=True, cancel_futures=True)
        self._pusher.close()
        self._server.close()
        self._peers.close()
        self._transport.close()
        if self._zone is not None:
            self._zone.transport.close()
            self._zone.segment.close()

    # --- the sealing thread

    def _seal(self, job: SealJob) -> None:
        start = self._clock.now()
        self._faults.hit("seal", self._closing)
        digests: list[bytes] = []
        reason = ""
        try:
            if self._staging is not None:
                self._staging.to_host(job.blocks)
            if self._config.digests == "full":
                digests = [xxhash.xxh3_128_digest(self._segment.blocks[b]) for b in job.blocks]
        except Exception as error:
            log.exception("seal of %s", job.lease_id)
            reason = f"The blocks could not be brought to the host: {error!r}"
        self._report(SealDone(job.lease_id, digests, self._clock.now() - start, reason))

    # --- the copying thread

    def _fetch(self, job: FetchJob, cancelled: threading.Event) -> None:
        start = self._clock.now()
        report = functools.partial(FetchDone, job.request_id)
        try:
            proof = self._copy(job, cancelled)
            if self._staging is not None:
                self._staging.to_device(job.target)
            num_bytes = len(job.target) * self._config.kv_format.block_bytes
            self._report(report(proof, self._clock.now() - start, num_bytes))
        except SplitserveError as error:
            self._report(report(None, self._clock.now() - start, 0, error.message))
        except Exception as error:
            log.exception("fetch of %s", job.request_id)
            self._report(report(None, self._clock.now() - start, 0, repr(error)))

    def _copy(self, job: FetchJob, cancelled: threading.Event) -> str:
        """Copy and prove; return the kind of proof or raise."""
        source = job.source
        self._faults.hit("fetch.begin", cancelled)
        if job.from_zone:  # whether the source still lives does not matter
            assert self._zone_link is not None
            assert job.digests, "push needs digests"
            return self._copy_from(self._zone_link, None, job, cancelled)
        peer = self._peers.get(source.worker_id, source.epoch, source.address)
        try:
            return self._copy_from(peer.link, peer.channel, job, cancelled)
        finally:
            if job.is_last:
                peer.channel.done(source.lease_id)

    def _copy_from(
        self, link: Link, channel: SideChannel | None, job: FetchJob, cancelled: threading.Event
    ) -> str:
        size = self._config.kv_format.block_bytes
        there = [block * size for block in job.block_ids]
        here = [block * size for block in job.target]
        with contextlib.closing(link.read(there, here, size, cancelled)) as pieces:
            self._faults.hit("fetch.block", cancelled)
            for i in pieces:
                block = self._segment.blocks[job.target[i]]
                if self._faults.flips("fetch.block"):
                    block[0] ^= 1
                if job.digests and xxhash.xxh3_128_digest(block) != job.digests[i]:
                    raise TransferFailed(f"Block {i} of the fetch has the wrong digest.")
                self._faults.hit("fetch.block", cancelled)
        self._faults.hit("fetch.verify", cancelled)
        if cancelled.is_set():
            raise TransferFailed("The request was cancelled.")
        if job.digests:
            return "digest"
        if channel is not None and channel.confirm(job.source.lease_id):
            return "lease"
        raise TransferFailed("The source did not confirm that its lease held.")

    def _open(self, epoch: str, address: str, *, to_zone: bool) -> Peer:
        """Shake hands and open the pool or the zone of the worker epoch at an address."""
        config = self._config
        hello = PeerHello(
            SIDE_CHANNEL_VERSION,
            epoch,
            self._transport.name,
            config.identity,
            config.kv_format,
            to_zone,
        )
        channel = SideChannel(address, hello, CONNECT_TIMEOUT_S, config.token)
        num_bytes = channel.num_blocks * config.kv_format.block_bytes
        try:
            link = self._transport.open(
                channel.card, channel.descriptors, num_bytes, writable=to_zone
            )
        except TransferFailed:
            channel.close()
            raise
        return Peer(channel, link)

    def _end_lease(self, offer: Part | Offer) -> None:
        try:
            peer = self._peers.get(offer.worker_id, offer.epoch, offer.address)
            peer.channel.done(offer.lease_id)
        except SplitserveError as error:
            log.info("lease %s could not be ended: %s", offer.lease_id, error.message)

    def _meet(self, worker_id: str, epoch: str, address: str) -> None:
        try:
            self._peers.get(worker_id, epoch, address)
        except SplitserveError as error:
            log.info("worker %s could not be met: %s", worker_id, error.message)

    def _report(self, event: Event) -> None:
        self._done.put(event)
        self._wake()

    # --- the side channel's thread

    def _answer(
        self, message: FromReader, peer: int
    ) -> tuple[Welcome | Refused | Confirmed | Begun | None, list[int]]:
        match message:
            case Confirm(lease_id):
                return Confirmed(self._leases.confirm(lease_id, self._clock.now())), []
            case Done(lease_id):
                self._leases.done(lease_id)
                self._wake()
                return None, []
            case Begin(landing_id):
                zone = self._zone
                return Begun(zone is not None and zone.landings.begin(landing_id, peer)), []
            case Ended(landing_id):
                if self._zone is not None:
                    self._zone.landings.end(landing_id, peer)
                self._wake()
                return None, []
            case PeerHello():
                reason = self._refusal(message)
                if reason:
                    return Refused(reason), []
                segment, export = self._segment, self._export
                if message.to_zone:
                    assert self._zone is not None
                    assert self._zone_export is not None
                    segment, export = self._zone.segment, self._zone_export
                return Welcome(len(segment.blocks), export.card), export.descriptors()

    def _peer_closed(self, peer: int) -> None:
        """Its process is gone, or its connection, on which it had leave to write."""
        if self._zone is not None:
            self._zone.landings.writer_gone(peer)
            self._wake()

    def _refusal(self, hello: PeerHello) -> str:
        """Why a reader is not welcome, naming both values; empty if it is."""
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
            ours.kv_format.require_equal(hello.format, "the reader")
        except FormatMismatch as error:
            return error.message
        return ""


def make_p2p(
    config: P2PConfig,
    transport: Transport,
    segment: Segment,
    leases: LeaseTable,
    clock: Clock,
    wake: Wake,
    faults: Faults | None = None,
    staging: Staging | None = None,
    zone: Zone | None = None,
) -> Connector:
    """The connector `p2p` over one transport."""
    worker = P2PWorker(config, transport, segment, leases, clock, wake, faults, staging, zone)
    scheduler = P2PScheduler(config, transport.name, worker.address, clock)
    return Connector("p2p", scheduler, worker, worker.address)
