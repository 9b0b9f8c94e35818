"""What one engine hands over (design 3.3): one offer, or parts and then the offer.

The source digests a lease's blocks in order and tells of them, after they were pushed or stored if
that is how they go.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from splitserve import wire
from splitserve.clock import Clock
from splitserve.connector.base import Connector
from splitserve.connector.jobs import (
    HandoffState,
    PushDone,
    PushJob,
    SaveDone,
    SealDone,
    SealJob,
)
from splitserve.engine.keeping import Keeping
from splitserve.engine.scheduler import Scheduler
from splitserve.engine.sequence import Sequence
from splitserve.errors import TransferFailed
from splitserve.kv.lease import Lease, LeaseEnd

Tell = Callable[[wire.Notice], None]


@dataclass(slots=True)
class _Leaving:
    """A part that is pushed, or stored, and is told when it and all before it are there."""

    part: wire.Part
    seal_s: float
    is_last: bool
    num_stored: int | None = None


@dataclass(slots=True)
class _Outgoing:
    """A lease's blocks on their way to an offer."""

    sequence: Sequence
    lease: Lease
    sealing: deque[list[int]] = field(default_factory=deque)  # what the sealer has, in its order
    digests: list[bytes] = field(default_factory=list)
    num_sealed: int = 0
    leaving: deque[_Leaving] = field(default_factory=deque)  # parts that the connector has
    saves: dict[str, _Leaving] = field(default_factory=dict)  # by job: those of a store
    num_stored: int = 0  # leading blocks that the store has, of those told
    is_whole: bool = False  # the token after prefill is drawn, no more blocks follow


class Source:
    """Prefill legs' side: from leased blocks to parts and offers."""

    def __init__(
        self,
        scheduler: Scheduler,
        connector: Connector,
        keeping: Keeping,
        clock: Clock,
        tell: Tell,
    ) -> None:
        self._scheduler = scheduler
        self._connector = connector
        self._keeping = keeping
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
        leaving = _Leaving(part, event.seconds, is_last)
        sequence = outgoing.sequence
        if self._connector.by_store:
            self._store(outgoing, leaving)
        elif sequence.landing is not None and sequence.grain is not wire.Grain.REQUEST:
            self._push(outgoing, sequence.landing, leaving)
        else:
            self._pass_on(outgoing, leaving)

    def _store(self, outgoing: _Outgoing, leaving: _Leaving) -> None:
        """Have the full blocks of a part saved; it is told when that is done, and all before."""
        part, sequence = leaving.part, outgoing.sequence
        # not of the token just drawn: its position is not computed, though it may fill a block
        keys = list(sequence.table.block_keys(sequence.tokens[: sequence.num_computed]))
        keys = keys[part.first : part.first + len(part.block_ids)]
        leaving.part = msgspec.structs.replace(part, keys=keys, stored=True)
        outgoing.leaving.append(leaving)
        if not keys:
            leaving.num_stored = 0
            self._pass_on_stored(outgoing)
            return
        job_id = f"{part.lease_id}/{part.first}"
        outgoing.saves[job_id] = leaving
        self._keeping.save(job_id, keys, part.block_ids[: len(keys)], part.digests[: len(keys)])

    def on_saved(self, event: SaveDone) -> None:
        """The store has what it will have of a part."""
        outgoing = self._outgoing.get(event.job_id.rpartition("/")[0])
        if outgoing is None:
            return
        outgoing.saves.pop(event.job_id).num_stored = event.num_saved
        self._pass_on_stored(outgoing)

    def _pass_on_stored(self, outgoing: _Outgoing) -> None:
        """Tell parts in order, as far as the store has answered. One that it lacks blocks of is the
        last that is of use: what comes after has nothing to follow."""
        while outgoing.leaving and outgoing.leaving[0].num_stored is not None:
            leaving = outgoing.leaving.popleft()
            if outgoing.lease.ended is LeaseEnd.RELEASED:
                self._close(outgoing)
                return
            part = leaving.part
            if part.first == outgoing.num_stored:
                outgoing.num_stored += leaving.num_stored or 0
            num_told = max(0, outgoing.num_stored - part.first)
            leaving.part = msgspec.structs.replace(
                part,
                block_ids=part.block_ids[:num_told],
                digests=part.digests[:num_told],
                keys=part.keys[:num_told],
            )
            self._pass_on(outgoing, leaving)

    def _push(self, outgoing: _Outgoing, landing: wire.Landing, leaving: _Leaving) -> None:
        """Write what is not there yet of a part; it is told when that is done, and all before."""
        part, layered = leaving.part, outgoing.sequence.layered
        indices = [
            i
            for i in range(part.first, part.first + len(part.block_ids))
            if i >= landing.first and i not in layered
        ]
        outgoing.leaving.append(leaving)
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
        leaving = outgoing.leaving.popleft()
        if outgoing.lease.ended is LeaseEnd.RELEASED:
            self._close(outgoing)
        else:
            leaving.part = msgspec.structs.replace(leaving.part, pushed=not event.reason)
            self._pass_on(outgoing, leaving)

    def _pass_on(self, outgoing: _Outgoing, leaving: _Leaving) -> None:
        """Tell a part, and the offer after the last one."""
        request_id, lease, part = outgoing.sequence.request_id, outgoing.lease, leaving.part
        is_told = part.pushed or not leaving.is_last
        if outgoing.sequence.grain is not wire.Grain.REQUEST and is_told and part.block_ids:
            self._tell(wire.PartReady(request_id, part))
        if not leaving.is_last:
            return
        self._close(outgoing)
        leases = self._scheduler.leases
        if leases.renew(lease.lease_id, self._clock.now()) or self._connector.by_store:
            self._tell(wire.Offered(request_id, self._make_offer(outgoing), leaving.seal_s))
        else:
            self._fail(request_id, "The lease expired before its digests were computed.")
        if self._connector.by_store:
            leases.release(lease.lease_id)  # the offer is sufficient without us

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
        offer = self._connector.scheduler.make_offer(outgoing.lease, state, outgoing.digests)
        if self._connector.by_store:
            stop = outgoing.num_stored
            offer = msgspec.structs.replace(
                offer, block_ids=offer.block_ids[:stop], digests=offer.digests[:stop]
            )
        return offer
