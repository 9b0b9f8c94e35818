"""Handoffs under way in one engine: what it hands over, and what is handed to it (design 3.3).

A handoff is one offer, or parts and then the offer. The source digests a lease's blocks in order
and tells of them; the reader asks for those it lacks and knows when all are there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from splitserve import wire
from splitserve.clock import Clock
from splitserve.connector.base import (
    Connector,
    FetchDone,
    FetchJob,
    HandoffState,
    SealDone,
    SealJob,
)
from splitserve.engine.scheduler import Scheduler
from splitserve.engine.sequence import Sequence, Status
from splitserve.errors import SplitserveError, TransferFailed
from splitserve.kv.lease import Lease, LeaseEnd

Tell = Callable[[wire.Notice], None]


@dataclass(slots=True)
class _Outgoing:
    """A lease's blocks on their way to an offer."""

    sequence: Sequence
    lease: Lease
    sealing: deque[list[int]] = field(default_factory=deque)  # what the sealer has, in its order
    digests: list[bytes] = field(default_factory=list)
    num_sealed: int = 0
    is_whole: bool = False  # the token after prefill is drawn, no more blocks follow


class Source:
    """Prefill legs' side: from leased blocks to parts and offers."""

    def __init__(
        self, scheduler: Scheduler, connector: Connector, clock: Clock, tell: Tell
    ) -> None:
        self._scheduler = scheduler
        self._connector = connector
        self._clock = clock
        self._tell = tell
        self._outgoing: dict[str, _Outgoing] = {}  # by lease id

    def seal(self, sequence: Sequence, lease: Lease, blocks: list[int]) -> None:
        """Digest blocks that were just leased; a part is told when that is done."""
        outgoing = self._outgoing.setdefault(lease.lease_id, _Outgoing(sequence, lease))
        outgoing.sealing.append(blocks)
        self._connector.worker.start_seal(SealJob(lease.lease_id, blocks))

    def seal_rest(self, sequence: Sequence, lease: Lease) -> None:
        """The same for the last blocks, after which the offer is told."""
        outgoing = self._outgoing.setdefault(lease.lease_id, _Outgoing(sequence, lease))
        outgoing.is_whole = True
        num_begun = outgoing.num_sealed + sum(map(len, outgoing.sealing))
        self.seal(sequence, lease, lease.blocks[num_begun:])

    def forget(self, lease: Lease) -> None:
        """The lease has ended; if its leg computes on, it will get another."""
        outgoing = self._outgoing.get(lease.lease_id)
        if outgoing is not None and not outgoing.is_whole:
            del self._outgoing[lease.lease_id]

    def on_sealed(self, event: SealDone) -> None:
        outgoing = self._outgoing.get(event.lease_id)
        if outgoing is None:
            return
        lease, leases = outgoing.lease, self._scheduler.leases
        blocks = outgoing.sealing.popleft()
        first = outgoing.num_sealed
        outgoing.num_sealed += len(blocks)
        outgoing.digests += event.digests
        is_last = outgoing.is_whole and not outgoing.sealing
        if is_last or event.reason:
            del self._outgoing[event.lease_id]
        if lease.ended is LeaseEnd.RELEASED:
            return
        request_id = outgoing.sequence.request_id
        if event.reason:
            leases.release(lease.lease_id)
            if outgoing.is_whole:
                self._fail(request_id, event.reason)
            return
        held = leases.renew(lease.lease_id, self._clock.now())
        if is_last and held:
            self._tell(wire.Offered(request_id, self._make_offer(outgoing), event.seconds))
        elif is_last:
            self._fail(request_id, "The lease expired before its digests were computed.")
        elif held:
            part = self._connector.scheduler.make_part(lease, first, blocks, event.digests)
            self._tell(wire.PartReady(request_id, part))

    def _fail(self, request_id: str, reason: str) -> None:
        self._tell(wire.End(request_id, "error", TransferFailed.code, reason))

    def _make_offer(self, outgoing: _Outgoing) -> wire.Offer:
        sequence = outgoing.sequence
        num_tokens = len(sequence.tokens) - 1
        state = HandoffState(
            num_tokens=num_tokens,
            num_prompt_tokens=len(sequence.prompt_ids),
            output_ids=list(sequence.output_ids),
            sampling=sequence.sampling,
            keys=list(sequence.table.block_keys(sequence.tokens[:num_tokens])),
        )
        return self._connector.scheduler.make_offer(outgoing.lease, state, outgoing.digests)


class Reader:
    """Decode legs' side: from parts and offers to KV in our blocks."""

    def __init__(
        self,
        scheduler: Scheduler,
        connector: Connector,
        clock: Clock,
        tell: Tell,
        sequences: dict[str, Sequence],
    ) -> None:
        self._scheduler = scheduler
        self._connector = connector
        self._clock = clock
        self._tell = tell
        self._sequences = sequences  # the engine's own

    def check_offer(self, sequence: Sequence, offer: wire.Offer) -> None:
        """Raise TransferFailed or FormatMismatch if the offer is not of this sequence's tokens."""
        keys = sequence.table.block_keys(sequence.tokens[: offer.num_tokens])
        self._connector.scheduler.check_offer(offer, keys, len(sequence.tokens) - 1)

    def deliver(self, request_id: str, part: wire.Part) -> None:
        """A part of a handoff; ignored if its leg is gone or has the whole offer already."""
        sequence = self._sequences.get(request_id)
        if sequence is None or sequence.offer is not None:
            return
        sequence.parts.append(part)
        if sequence.status is Status.FETCHING:
            self._start_jobs(sequence)

    def complete(self, request_id: str, offer: wire.Offer) -> None:
        """The offer of a handoff of which parts were delivered, with its outcome."""
        sequence = self._sequences.get(request_id)
        if sequence is None or sequence.offer is not None:
            return
        try:
            if offer.output_ids[:-1] != sequence.output_ids:
                raise TransferFailed("The offer's output does not continue this request's.")
            sequence.output_ids.append(offer.output_ids[-1])
            sequence.tokens.append(offer.output_ids[-1])
            self.check_offer(sequence, offer)
        except SplitserveError as error:
            self._fail(sequence, error.message)
            return
        sequence.offer = offer
        if sequence.status is Status.FETCHING:
            self._start_jobs(sequence)

    def admit(self, now_s: float) -> None:
        """Reserve blocks for legs that wait for them, and ask for their KV."""
        for sequence in self._scheduler.admit_fetches(now_s):
            queued_s = now_s - sequence.arrived_s
            self._tell(wire.FetchStarted(sequence.request_id, queued_s))
            self._start_jobs(sequence)

    def on_fetched(self, event: FetchDone) -> None:
        """One job is over, maybe of a leg that is gone."""
        if not self._scheduler.end_job(event.request_id):
            return
        sequence = self._sequences[event.request_id]
        incoming = sequence.incoming
        assert incoming is not None
        incoming.num_jobs -= 1
        if event.proof is None:
            self._fail(sequence, event.reason)
            return
        incoming.num_bytes += event.num_bytes
        incoming.seconds += event.seconds
        incoming.proof = event.proof
        self._end_if_whole(sequence)

    def _start_jobs(self, sequence: Sequence) -> None:
        """Ask for what was delivered and is lacked."""
        incoming = sequence.incoming
        assert incoming is not None
        parts, sequence.parts = sequence.parts, []
        for part in parts:
            self._start_job(sequence, part, part.first)
        if sequence.offer is None:
            return
        if incoming.num_asked < incoming.num_blocks:
            self._start_job(sequence, sequence.offer, 0)
        else:
            self._connector.worker.end_lease(sequence.offer)
        self._end_if_whole(sequence)

    def _start_job(self, sequence: Sequence, source: wire.Part | wire.Offer, first: int) -> None:
        """A job for those blocks of `source`, the first of which has index `first`, that are
        lacked. A part that leaves a gap is of no use: the offer will have its blocks too."""
        incoming = sequence.incoming
        assert incoming is not None
        start, stop = incoming.num_asked, first + len(source.block_ids)
        if not first <= start < stop <= incoming.num_blocks:
            return
        job = FetchJob(
            sequence.request_id,
            source,
            source.block_ids[start - first :],
            source.digests[start - first :],
            sequence.held[start - incoming.num_hits : stop - incoming.num_hits],
            is_last=isinstance(source, wire.Offer),
        )
        incoming.num_asked = stop
        incoming.num_jobs += 1
        self._connector.worker.start_fetch(job)

    def _end_if_whole(self, sequence: Sequence) -> None:
        incoming, offer = sequence.incoming, sequence.offer
        assert incoming is not None
        if offer is None or incoming.num_jobs or incoming.num_asked < incoming.num_blocks:
            return
        self._scheduler.end_fetch(sequence)
        self._tell(
            wire.FetchEnded(
                sequence.request_id,
                incoming.seconds,
                incoming.num_bytes,
                min(offer.num_tokens, incoming.num_hits * offer.format.block_size),
                incoming.proof,
            )
        )

    def _fail(self, sequence: Sequence, reason: str) -> None:
        """Nothing of the fetch is used; jobs that still run end soon."""
        del self._sequences[sequence.request_id]
        self._connector.worker.cancel_fetch(sequence.request_id)
        self._scheduler.abort(sequence, self._clock.now())
        self._tell(wire.FetchFailed(sequence.request_id, reason))
