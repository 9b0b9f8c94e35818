"""Copies blocks into our pool and proves them, on a thread for each source.

A copy may be used only with a proof (design 3.4): every block's digest equals the one in the offer
(then a dead source does not matter), or, without digests, the source's word after the copy that the
lease held throughout. A store proves what it gives by the digest that it keeps with each block.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import xxhash

from splitserve.clock import Clock
from splitserve.connector.base import Staging
from splitserve.connector.converted import copy_converted
from splitserve.connector.jobs import FetchDone, FetchJob, Place
from splitserve.connector.lanes import Lanes
from splitserve.connector.peers import OpenPeer, Peer, Peers
from splitserve.connector.sidechannel import SideChannel
from splitserve.errors import SplitserveError, TransferFailed
from splitserve.faults import Faults
from splitserve.store.chain import KVStore
from splitserve.transport.base import Link
from splitserve.transport.segment import Segment
from splitserve.wire import Offer, Part

log = logging.getLogger(__name__)

Report = Callable[[FetchDone], None]


@dataclass(slots=True)
class _Request:
    """A request's jobs: told to end all at once."""

    cancelled: threading.Event = field(default_factory=threading.Event)
    num_jobs: int = 0


class Fetcher:
    """`start`, `cancel` and `note_done` are called by the engine thread."""

    def __init__(
        self,
        segment: Segment,
        open_peer: OpenPeer,
        zone_link: Link | None,
        store: KVStore | None,
        staging: Staging | None,
        clock: Clock,
        faults: Faults,
        report: Report,
    ) -> None:
        self._segment = segment
        self._open_peer = open_peer
        self._zone_link = zone_link
        self._store = store
        self._staging = staging
        self._clock = clock
        self._faults = faults
        self._report = report
        self._block_bytes = segment.blocks.shape[1]
        self._requests: dict[str, _Request] = {}  # those with jobs
        self._lanes = Lanes("kv-fetch")
        self._peers: dict[str, Peers] = {}  # by worker: each is its lane's own

    def start(self, job: FetchJob) -> None:
        request = self._requests.setdefault(job.request_id, _Request())
        request.num_jobs += 1
        self._lanes.submit(_lane(job), functools.partial(self._fetch, job, request.cancelled))

    def cancel(self, request_id: str) -> None:
        request = self._requests.get(request_id)
        if request is not None:
            request.cancelled.set()

    def note_done(self, event: FetchDone) -> None:
        """The engine has heard of it."""
        request = self._requests[event.request_id]
        request.num_jobs -= 1
        if not request.num_jobs:
            del self._requests[event.request_id]

    def meet(self, worker_id: str, epoch: str, address: str) -> None:
        """Open the worker's pool ahead of its first offer."""

        def meet() -> None:
            try:
                self._peer(worker_id, epoch, address)
            except SplitserveError as error:
                log.info("worker %s could not be met: %s", worker_id, error.message)

        self._lanes.submit(worker_id, meet)

    def end_lease(self, source: Part | Offer) -> None:
        """Tell the source that nothing is read of it, after what is read of it now."""

        def end() -> None:
            try:
                peer = self._peer(source.worker_id, source.epoch, source.address)
                peer.channel.done(source.lease_id)
            except SplitserveError as error:
                log.info("lease %s could not be ended: %s", source.lease_id, error.message)

        self._lanes.submit(source.worker_id, end)

    def close(self) -> None:
        for request in self._requests.values():
            request.cancelled.set()
        self._lanes.close()
        for peers in self._peers.values():
            peers.close()

    # --- a lane's thread

    def _fetch(self, job: FetchJob, cancelled: threading.Event) -> None:
        start = self._clock.now()
        num_blocks, proof, reason = 0, None, ""
        try:
            num_blocks, proof = self._copy(job, cancelled)
            if self._staging is not None and num_blocks:
                self._staging.to_device(job.target[:num_blocks])
        except SplitserveError as error:
            reason = error.message
        except Exception as error:
            log.exception("fetch of %s", job.request_id)
            reason = repr(error)
        if reason:
            num_blocks, proof = 0, None
        seconds = self._clock.now() - start
        self._report(
            FetchDone(
                job.request_id,
                proof,
                seconds,
                num_blocks * self._block_bytes,
                num_blocks,
                len(job.target),
                reason,
            )
        )

    def _copy(self, job: FetchJob, cancelled: threading.Event) -> tuple[int, str]:
        """Copy and prove; how many blocks and the kind of proof, or raise."""
        self._faults.hit("fetch.begin", cancelled)
        if job.place is Place.STORE:
            return self._load(job, cancelled), "digest"
        if job.place is Place.ZONE:  # whether the source still lives does not matter
            assert self._zone_link is not None
            assert job.digests, "push needs digests"
            return len(job.target), self._copy_from(self._zone_link, None, job, cancelled)
        assert job.source is not None
        source = job.source
        peer = self._peer(source.worker_id, source.epoch, source.address)
        try:
            if job.is_converted:
                return len(job.target), self._convert_from(peer, job, cancelled)
            if peer.scratch is not None:
                raise TransferFailed("The source's KV format is another than was offered.")
            return len(job.target), self._copy_from(peer.link, peer.channel, job, cancelled)
        finally:
            if job.is_last:
                peer.channel.done(source.lease_id)

    def _load(self, job: FetchJob, cancelled: threading.Event) -> int:
        assert self._store is not None
        if cancelled.is_set():
            raise TransferFailed("The request was cancelled.")
        return self._store.load(job.keys, [self._segment.blocks[b] for b in job.target])

    def _copy_from(
        self, link: Link, channel: SideChannel | None, job: FetchJob, cancelled: threading.Event
    ) -> str:
        size = self._block_bytes
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
        return self._prove(channel, job, cancelled)

    def _convert_from(self, peer: Peer, job: FetchJob, cancelled: threading.Event) -> str:
        if peer.scratch is None:
            raise TransferFailed("The source has our format, its offer another.")
        targets = [self._segment.blocks[block] for block in job.target]
        copy_converted(peer.link, peer.scratch, job, targets, cancelled)
        proof = self._prove(peer.channel, job, cancelled)
        return f"{proof}, converted: {peer.scratch.converter.name}"

    def _prove(self, channel: SideChannel | None, job: FetchJob, cancelled: threading.Event) -> str:
        """The kind of proof of what was copied, or raise."""
        self._faults.hit("fetch.verify", cancelled)
        if cancelled.is_set():
            raise TransferFailed("The request was cancelled.")
        if job.digests:
            return "digest"
        if channel is not None and job.source and channel.confirm(job.source.lease_id):
            return "lease"
        raise TransferFailed("The source did not confirm that its lease held.")

    def _peer(self, worker_id: str, epoch: str, address: str) -> Peer:
        """Of this lane; raise TransferFailed, FormatMismatch."""
        peers = self._peers.get(worker_id)
        if peers is None:
            peers = self._peers[worker_id] = Peers(self._open_peer)
        return peers.get(worker_id, epoch, address)


def _lane(job: FetchJob) -> str:
    if job.place is Place.POOL:
        assert job.source is not None
        return job.source.worker_id
    return f"the {job.place.name.lower()}"
