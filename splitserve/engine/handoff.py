"""Handoffs under way in one engine: what it hands over, and what is handed to it (design 3.3).

A handoff is one offer, or parts and then the offer. The source digests a lease's blocks in order
and tells of them; the reader asks for those it lacks and knows when all are there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from splitserve import wire
from splitserve.clock import Clock
from splitserve.connector.base import (
    Connector,
    FetchDone,
    FetchJob,
    HandoffState,
    PushDone,
    PushJob,
    SealDone,
    SealJob,
    WorkerSide,
)
from splitserve.engine.scheduler import Scheduler
from splitserve.engine.sequence import Sequence, Status
from splitserve.engine.step import StepPlan
from splitserve.errors import SplitserveError, TransferFailed
from splitserve.kv.lease import Lease, LeaseEnd

Tell = Callable[[wire.Notice], None]


@dataclass(frozen=True, slots=True)
class _Pushing:
    part: wire.Part
    seal_s: float
    is_last: bool


@dataclass(slots=True)
class LayerPush:
    """What a step's layers are pushed of: (landing, our blocks, the zone's), per sequence."""

    worker: WorkerSide
    pieces: list[tuple[Sequence, list[int]]]  # indices of blocks that the step fills

    def on_layer(self, layer: int) -> None:
        for sequence, indices in self.pieces:
            landing = sequence.landing
            assert landing is not None
            self.worker.start_push(
                PushJob(
                    "",
                    landing,
                    [sequence.table.blocks[i] for i in indices],
                    [landing.block_ids[i - landing.first] for i in indices],
                    layer,
                )
            )

    def note_whole(self) -> None:
        """The step succeeded: all layers of these blocks were pushed."""
        for sequence, indices in self.pieces:
            sequence.layered.update(indices)


@dataclass(slots=True)
class _Outgoing:
    """A lease's blocks on their way to an offer."""

    sequence: Sequence
    lease: Lease
    sealing: deque[list[int]] = field(default_factory=deque)  # what the sealer has, in its order
    digests: list[bytes] = field(default_factory=list)
    num_sealed: int = 0
    pushing: deque[_Pushing] = field(default_factory=deque)  # parts that the pusher has
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

    def land(self, sequence: Sequence | None, landing: wire.Landing) -> None:
        """Where a leg's blocks are to be written from now on; too late for one that is over."""
        if sequence is not None and sequence.landing is None:
            sequence.landing = landing

    def end_push(self, sequence: Sequence) -> None:
        """Nothing more of the leg will be written."""
        if sequence.landing is not None and sequence.leg is wire.Leg.PREFILL:
            self._connector.worker.end_push(sequence.landing)
            sequence.landing = None

    def layers_of(self, plan: StepPlan, sequences: dict[str, Sequence]) -> LayerPush | None:
        """What to push while the plan is computed: blocks that it fills, of legs of grain layer."""
        pieces = []
        for item in plan.items:
            sequence = sequences[item.request_id]
            landing = sequence.landing
            if sequence.leg is not wire.Leg.PREFILL or sequence.grain is not wire.Grain.LAYER:
                continue
            size, end = self._scheduler.pool.block_size, item.start + len(item.token_ids)
            stop = -(-end // size) if item.draw is not None else end // size
            if landing is not None and stop > max(landing.first, item.start // size):
                pieces.append((sequence, list(range(max(landing.first, item.start // size), stop))))
        return LayerPush(self._connector.worker, pieces) if pieces else None

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
        if lease.ended is LeaseEnd.RELEASED:
            self._close(outgoing)
            return
        if event.reason:
            leases.release(lease.lease_id)
            if outgoing.is_whole:
                self._fail(outgoing.sequence.request_id, event.reason)
            self._close(outgoing)
            return
        if not leases.renew(lease.lease_id, self._clock.now()) and not is_last:
            return  # the leg will get another lease, and its offer has these blocks too
        part = self._connector.scheduler.make_part(lease, first, blocks, event.digests)
        pushing = _Pushing(part, event.seconds, is_last)
        sequence = outgoing.sequence
        if sequence.landing is not None and sequence.grain is not wire.Grain.REQUEST:
            self._push(outgoing, sequence.landing, pushing)
        else:
            self._pass_on(outgoing, pushing, pushed=False)

    def _push(self, outgoing: _Outgoing, landing: wire.Landing, pushing: _Pushing) -> None:
        """Write what is not there yet of a part; it is told when that is done, and all before."""
        part, layered = pushing.part, outgoing.sequence.layered
        indices = [
            i
            for i in range(part.first, part.first + len(part.block_ids))
            if i >= landing.first and i not in layered
        ]
        outgoing.pushing.append(pushing)
        self._connector.worker.start_push(
            PushJob(
                part.lease_id,
                landing,
                [part.block_ids[i - part.first] for i in indices],
                [landing.block_ids[i - landing.first] for i in indices],
            )
        )

    def on_pushed(self, event: PushDone) -> None:
        """A part is in its landing, or it will have to be read."""
        outgoing = self._outgoing.get(event.job_id)
        if outgoing is None:
            return
        pushing = outgoing.pushing.popleft()
        if outgoing.lease.ended is LeaseEnd.RELEASED:
            self._close(outgoing)
        else:
            self._pass_on(outgoing, pushing, pushed=not event.reason)

    def _pass_on(self, outgoing: _Outgoing, pushing: _Pushing, *, pushed: bool) -> None:
        """Tell a part, and the offer after the last one."""
        request_id, lease = outgoing.sequence.request_id, outgoing.lease
        part = msgspec.structs.replace(pushing.part, pushed=pushed)
        if outgoing.sequence.grain is not wire.Grain.REQUEST and (pushed or not pushing.is_last):
            self._tell(wire.PartReady(request_id, part))
        if not pushing.is_last:
            return
        self._close(outgoing)
        if self._scheduler.leases.renew(lease.lease_id, self._clock.now()):
            self._tell(wire.Offered(request_id, self._make_offer(outgoing), pushing.seal_s))
        else:
            self._fail(request_id, "The lease expired before its digests were computed.")

    def _close(self, outgoing: _Outgoing) -> None:
        del self._outgoing[outgoing.lease.lease_id]
        self.end_push(outgoing.sequence)

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
            incoming = sequence.incoming
            assert incoming is not None
            if sequence.wants_push and sequence.offer is None:
                num_wanted = incoming.num_blocks - incoming.num_hits
                sequence.landing = self._connector.worker.lend(incoming.num_hits, num_wanted)
                if sequence.landing is not None:
                    self._tell(wire.Landed(sequence.request_id, sequence.landing))
            self._start_jobs(sequence)

    def give_back(self, sequence: Sequence) -> None:
        """Nothing more is read from the landing that a leg lent."""
        if sequence.landing is not None:
            self._connector.worker.give_back(sequence.landing)
            sequence.landing = None

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
        landing = sequence.landing
        from_zone = isinstance(source, wire.Part) and source.pushed and landing is not None
        if from_zone:
            assert landing is not None
            block_ids = landing.block_ids[start - landing.first : stop - landing.first]
        else:
            block_ids = source.block_ids[start - first :]
        job = FetchJob(
            sequence.request_id,
            source,
            block_ids,
            source.digests[start - first :],
            sequence.held[start - incoming.num_hits : stop - incoming.num_hits],
            is_last=isinstance(source, wire.Offer),
            from_zone=from_zone,
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
        self.give_back(sequence)
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
        self.give_back(sequence)
        self._tell(wire.FetchFailed(sequence.request_id, reason))
