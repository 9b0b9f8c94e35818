"""What is handed to one engine (design 3.3): one offer, or parts and then the offer.

The reader asks for the blocks that it lacks and knows when all are there. What goes through a store
has no tail, and may lack blocks: the leg computes those itself.
"""

from __future__ import annotations

from splitserve import wire
from splitserve.clock import Clock
from splitserve.connector.base import Connector
from splitserve.connector.jobs import FetchDone, FetchJob, Place
from splitserve.engine.scheduler import Scheduler
from splitserve.engine.sequence import Sequence, Status
from splitserve.engine.source import Tell
from splitserve.errors import SplitserveError, TransferFailed


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
                sequence.landing = self._connector.lender.lend(incoming.num_hits, num_wanted)
                if sequence.landing is not None:
                    self._tell(wire.Landed(sequence.request_id, sequence.landing))
            self._start_jobs(sequence)

    def give_back(self, sequence: Sequence) -> None:
        """Nothing more is read from the landing that a leg lent."""
        if sequence.landing is not None:
            self._connector.lender.give_back(sequence.landing)
            sequence.landing = None

    def on_fetched(self, sequence: Sequence, event: FetchDone) -> None:
        """One of the leg's jobs is over."""
        incoming = sequence.incoming
        assert incoming is not None
        incoming.num_jobs -= 1
        if event.proof is None:
            self._fail(sequence, event.reason)
            return
        incoming.note(event)
        self._end_if_whole(sequence)

    def _start_jobs(self, sequence: Sequence) -> None:
        """Ask for what was delivered and is lacked."""
        incoming = sequence.incoming
        assert incoming is not None
        parts, sequence.parts = sequence.parts, []
        for part in parts:
            self._start_job(sequence, part, part.first)
        offer = sequence.offer
        if offer is None:
            return
        if offer.stored:
            incoming.num_blocks = max(incoming.num_asked, len(offer.block_ids))
        if incoming.num_asked < incoming.num_blocks:
            self._start_job(sequence, offer, 0)
        elif not offer.stored:
            self._connector.worker.end_lease(offer)
        self._end_if_whole(sequence)

    def _start_job(self, sequence: Sequence, source: wire.Part | wire.Offer, first: int) -> None:
        """A job for those blocks of `source`, the first of which has index `first`, that are
        lacked. A part that leaves a gap is of no use: the offer will have its blocks too."""
        incoming = sequence.incoming
        assert incoming is not None
        is_converted = isinstance(source, wire.Offer) and source.format != self._connector.kv_format
        start, stop = incoming.num_asked, first + len(source.block_ids)
        if is_converted:
            stop = incoming.num_blocks
        if not first <= start < stop <= incoming.num_blocks:
            return
        place, block_ids, keys = self._place(sequence, source, start - first, stop - first)
        job = FetchJob(
            sequence.request_id,
            source,
            source.block_ids if is_converted else block_ids,
            source.digests[0 if is_converted else start - first :],
            sequence.held[start - incoming.num_hits : stop - incoming.num_hits],
            is_last=isinstance(source, wire.Offer),
            place=place,
            keys=keys,
            is_converted=is_converted,
            first=start,
        )
        incoming.num_asked = stop
        incoming.num_jobs += 1
        self._connector.worker.start_fetch(job)

    @staticmethod
    def _place(
        sequence: Sequence, source: wire.Part | wire.Offer, start: int, stop: int
    ) -> tuple[Place, list[int], list[bytes]]:
        """Where the source's blocks [start, stop) are: the place, and their ids there or keys."""
        landing = sequence.landing
        if source.stored:
            return Place.STORE, [], source.keys[start:stop]
        if isinstance(source, wire.Part) and source.pushed and landing is not None:
            shift = source.first - landing.first
            return Place.ZONE, landing.block_ids[start + shift : stop + shift], []
        return Place.POOL, source.block_ids[start:stop], []

    def _end_if_whole(self, sequence: Sequence) -> None:
        incoming, offer = sequence.incoming, sequence.offer
        assert incoming is not None
        if offer is None or incoming.num_jobs or incoming.num_asked < incoming.num_blocks:
            return
        size = self._scheduler.pool.block_size
        num_there = min(offer.num_tokens, incoming.num_there * size)
        self._scheduler.end_fetch(sequence, num_there if offer.stored else offer.num_tokens)
        self.give_back(sequence)
        self._tell(
            wire.FetchEnded(
                sequence.request_id,
                incoming.seconds,
                incoming.num_bytes,
                min(offer.num_tokens, incoming.num_hits * size),
                incoming.proof,
                offer.num_tokens - num_there,
            )
        )

    def _fail(self, sequence: Sequence, reason: str) -> None:
        """Nothing of the fetch is used; jobs that still run end soon."""
        del self._sequences[sequence.request_id]
        self._connector.worker.cancel_fetch(sequence.request_id)
        self._scheduler.abort(sequence, self._clock.now())
        self.give_back(sequence)
        self._tell(wire.FetchFailed(sequence.request_id, reason))
