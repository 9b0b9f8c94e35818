"""Connector `p2p`, pull: the reader copies leased blocks out of the source's pool, all of them when
prefill has ended or each step's while it goes on.

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
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import xxhash

from splitserve.clock import Clock
from splitserve.connector.base import (
    Connector,
    FetchDone,
    FetchJob,
    HandoffState,
    SchedulerSide,
    SealDone,
    SealJob,
    Staging,
    Wake,
    WorkerSide,
)
from splitserve.connector.sidechannel import (
    SIDE_CHANNEL_VERSION,
    Confirm,
    Confirmed,
    Done,
    PeerHello,
    Refused,
    SideChannel,
    SideChannelServer,
    Welcome,
)
from splitserve.errors import FormatMismatch, SplitserveError, TransferFailed
from splitserve.faults import Faults
from splitserve.kv.format import KVFormat
from splitserve.kv.lease import Lease, LeaseTable
from splitserve.transport.base import Link, Transport
from splitserve.transport.segment import Segment
from splitserve.wire import Offer, Part

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class P2PConfig:
    """digests: `full` (every block carries one) or `lease` (the source's word is the proof)."""

    worker_id: str
    epoch: str
    identity: bytes
    kv_format: KVFormat
    digests: str = "full"

    @property
    def address(self) -> str:
        return f"splitserve/{self.worker_id}/{self.epoch}"


class P2PScheduler(SchedulerSide):
    """Makes offers of our leases and judges those of others."""

    def __init__(self, config: P2PConfig, transport: str, clock: Clock) -> None:
        self._config = config
        self._transport = transport
        self._clock = clock

    def make_offer(self, lease: Lease, state: HandoffState, digests: list[bytes]) -> Offer:
        return Offer(
            lease_id=lease.lease_id,
            lease_s=lease.deadline_s - self._clock.now(),
            worker_id=self._config.worker_id,
            epoch=self._config.epoch,
            transport=self._transport,
            address=self._config.address,
            identity=self._config.identity,
            format=self._config.kv_format,
            num_tokens=state.num_tokens,
            num_prompt_tokens=state.num_prompt_tokens,
            output_ids=state.output_ids,
            sampling=state.sampling,
            block_ids=lease.blocks,
            keys=state.keys,
            digests=digests,
        )

    def make_part(self, lease: Lease, first: int, blocks: list[int], digests: list[bytes]) -> Part:
        config = self._config
        return Part(
            lease_id=lease.lease_id,
            lease_s=lease.deadline_s - self._clock.now(),
            worker_id=config.worker_id,
            epoch=config.epoch,
            address=config.address,
            first=first,
            block_ids=blocks,
            digests=digests,
        )

    def check_offer(self, offer: Offer, keys: Sequence[bytes], num_tokens: int) -> None:
        config = self._config
        if offer.identity != config.identity:
            raise FormatMismatch(
                f"Model identity {_short(config.identity)} here, {_short(offer.identity)} there."
            )
        if offer.transport != self._transport:
            raise FormatMismatch(f"Transport {self._transport} here, {offer.transport} there.")
        config.kv_format.require_equal(offer.format, f"worker {offer.worker_id}")
        if offer.num_tokens != num_tokens:
            raise TransferFailed(f"The offer covers {offer.num_tokens} tokens, not {num_tokens}.")
        if offer.keys != list(keys):
            raise TransferFailed("The offer's keys are not those of this request's tokens.")
        num_blocks = -(-num_tokens // config.kv_format.block_size)
        if len(offer.block_ids) != num_blocks or len(offer.digests) not in (0, num_blocks):
            raise TransferFailed(
                f"The offer has {len(offer.block_ids)} blocks and {len(offer.digests)} digests, "
                f"{num_tokens} tokens need {num_blocks}."
            )


@dataclass(slots=True)
class _Peer:
    channel: SideChannel
    link: Link

    def close(self) -> None:
        self.channel.close()
        self.link.close()


@dataclass(slots=True)
class _Request:
    """A request's jobs: told to end all at once."""

    cancelled: threading.Event = field(default_factory=threading.Event)
    num_jobs: int = 0


class P2PWorker(WorkerSide):
    """Threads: one answers readers, one digests our leases, one copies for us."""

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
    ) -> None:
        self._config = config
        self._transport = transport
        self._segment = segment
        self._leases = leases
        self._clock = clock
        self._wake = wake
        self._faults = faults or Faults()
        self._staging = staging
        self._done: queue.SimpleQueue[SealDone | FetchDone] = queue.SimpleQueue()
        self._requests: dict[str, _Request] = {}  # those with jobs
        self._peers: dict[tuple[str, str], _Peer] = {}  # only the copying thread's
        self._export = transport.export()
        self._sealer = ThreadPoolExecutor(1, thread_name_prefix="kv-seal")
        self._fetcher = ThreadPoolExecutor(1, thread_name_prefix="kv-fetch")
        self._closing = threading.Event()
        self._server = SideChannelServer(config.address, self._answer)

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

    def meet(self, worker_id: str, epoch: str, address: str) -> None:
        self._fetcher.submit(self._meet, worker_id, epoch, address)

    def end_lease(self, offer: Part | Offer) -> None:
        self._fetcher.submit(self._end_lease, offer)

    def poll(self) -> list[SealDone | FetchDone]:
        events = []
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
        self._server.close()
        for peer in self._peers.values():
            peer.close()
        self._peers.clear()
        self._transport.close()

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
        peer = self._peer(source.worker_id, source.epoch, source.address)
        try:
            size = self._config.kv_format.block_bytes
            there = [block * size for block in job.block_ids]
            here = [block * size for block in job.target]
            with contextlib.closing(peer.link.read(there, here, size, cancelled)) as pieces:
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
            if peer.channel.confirm(source.lease_id):
                return "lease"
            raise TransferFailed("The source did not confirm that its lease held.")
        finally:
            if job.is_last:
                peer.channel.done(source.lease_id)

    def _peer(self, worker_id: str, epoch: str, address: str) -> _Peer:
        """The opened pool of a worker epoch; closes those that are gone on the way."""
        key = (worker_id, epoch)
        for known, peer in list(self._peers.items()):
            if peer.channel.is_broken or (known != key and not peer.channel.is_open):
                peer.close()
                del self._peers[known]
        if key not in self._peers:
            hello = PeerHello(
                SIDE_CHANNEL_VERSION,
                epoch,
                self._transport.name,
                self._config.identity,
                self._config.kv_format,
            )
            channel = SideChannel(address, hello, CONNECT_TIMEOUT_S)
            try:
                num_bytes = channel.num_blocks * self._config.kv_format.block_bytes
                link = self._transport.open(channel.card, channel.descriptors, num_bytes)
            except TransferFailed:
                channel.close()
                raise
            self._peers[key] = _Peer(channel, link)
        return self._peers[key]

    def _end_lease(self, offer: Part | Offer) -> None:
        try:
            peer = self._peer(offer.worker_id, offer.epoch, offer.address)
            peer.channel.done(offer.lease_id)
        except SplitserveError as error:
            log.info("lease %s could not be ended: %s", offer.lease_id, error.message)

    def _meet(self, worker_id: str, epoch: str, address: str) -> None:
        try:
            self._peer(worker_id, epoch, address)
        except SplitserveError as error:
            log.info("worker %s could not be met: %s", worker_id, error.message)

    def _report(self, event: SealDone | FetchDone) -> None:
        self._done.put(event)
        self._wake()

    # --- the side channel's thread

    def _answer(
        self, message: PeerHello | Confirm | Done
    ) -> tuple[Welcome | Refused | Confirmed | None, list[int]]:
        match message:
            case Confirm(lease_id):
                return Confirmed(self._leases.confirm(lease_id, self._clock.now())), []
            case Done(lease_id):
                self._leases.done(lease_id)
                self._wake()
                return None, []
            case PeerHello():
                reason = self._refusal(message)
                if reason:
                    return Refused(reason), []
                welcome = Welcome(len(self._segment.blocks), self._export.card)
                return welcome, self._export.descriptors()

    def _refusal(self, hello: PeerHello) -> str:
        """Why a reader is not welcome, naming both values; empty if it is."""
        ours = self._config
        if hello.version != SIDE_CHANNEL_VERSION:
            return f"side channel version {SIDE_CHANNEL_VERSION} here, {hello.version} there."
        if hello.epoch != ours.epoch:
            return f"epoch {ours.epoch} here, {hello.epoch} asked."
        if hello.transport != self._transport.name:
            return f"transport {self._transport.name} here, {hello.transport} there."
        if hello.identity != ours.identity:
            return f"model identity {_short(ours.identity)} here, {_short(hello.identity)} there."
        try:
            ours.kv_format.require_equal(hello.format, "the reader")
        except FormatMismatch as error:
            return error.message
        return ""


def _short(digest: bytes) -> str:
    return digest.hex()[:12]


def make_p2p(
    config: P2PConfig,
    transport: Transport,
    segment: Segment,
    leases: LeaseTable,
    clock: Clock,
    wake: Wake,
    faults: Faults | None = None,
    staging: Staging | None = None,
) -> Connector:
    """The connector `p2p` over one transport."""
    scheduler = P2PScheduler(config, transport.name, clock)
    worker = P2PWorker(config, transport, segment, leases, clock, wake, faults, staging)
    return Connector("p2p", scheduler, worker)
