"""KV of a prompt from elsewhere, instead of computing it: from another worker, or the store.

A leg that lacks blocks asks before it queues. If fetching what was found is predicted to be faster
than computing it, it is loaded when the leg gets blocks; whatever fails, it is computed. So neither
a broken store nor a wrong hint fails a request.
"""

from __future__ import annotations

from splitserve import wire
from splitserve.connector.base import Connector
from splitserve.connector.jobs import FetchDone, FetchJob, FindJob, FoundDone, Place
from splitserve.engine.scheduler import Scheduler
from splitserve.engine.sequence import Found, Sequence, Status
from splitserve.engine.source import Tell

STORE = "store"
PRIOR_LOAD_BYTES_PER_S = 0.5e9
PRIOR_COMPUTE_TOKENS_PER_S = 1000.0
LOAD_OVERHEAD_S = 1e-3  # a round trip and a job
_WEIGHT = 0.2  # of the newest observation
_MIN_STEP_TOKENS = 16  # smaller steps say little of prefill


class Speeds:
    """Moving means of this worker: what a load is compared with."""

    def __init__(self) -> None:
        self.compute_tokens_per_s = PRIOR_COMPUTE_TOKENS_PER_S
        self._load_bytes_per_s: dict[str, float] = {}

    def note_step(self, num_tokens: int, seconds: float) -> None:
        if num_tokens >= _MIN_STEP_TOKENS and seconds > 0:
            new = num_tokens / seconds
            self.compute_tokens_per_s += _WEIGHT * (new - self.compute_tokens_per_s)

    def note_load(self, source: str, num_bytes: int, seconds: float) -> None:
        if num_bytes and seconds > 0:
            old = self._load_bytes_per_s.get(source, PRIOR_LOAD_BYTES_PER_S)
            self._load_bytes_per_s[source] = old + _WEIGHT * (num_bytes / seconds - old)

    def is_load_faster(self, source: str, num_bytes: int, num_tokens: int) -> bool:
        rate = self._load_bytes_per_s.get(source, PRIOR_LOAD_BYTES_PER_S)
        return num_bytes / rate + LOAD_OVERHEAD_S < num_tokens / self.compute_tokens_per_s


class Loader:
    """Prompts' side of a load: asks, decides, fetches. The engine thread's."""

    def __init__(
        self,
        scheduler: Scheduler,
        connector: Connector,
        tell: Tell,
        sequences: dict[str, Sequence],
    ) -> None:
        self.speeds = Speeds()
        self.always = False  # load whatever is found, though computing it may be faster
        self._scheduler = scheduler
        self._connector = connector
        self._tell = tell
        self._sequences = sequences
        self._finding: dict[str, Sequence] = {}

    def begin(self, sequence: Sequence, hints: list[wire.Hint]) -> bool:
        """Ask for what a leg lacks; it is queued when the answer is here. False if there is nothing
        to ask for, or nobody to ask."""
        if sequence.is_fetch or not (hints or self._connector.has_store):
            return False
        size = self._scheduler.pool.block_size
        keys = sequence.table.block_keys(sequence.tokens[: len(sequence.tokens) - 1])
        first = 0
        if self._scheduler.config.prefix_cache:
            first = len(self._scheduler.pool.lookup(keys))
        hints = [hint for hint in hints if hint.num_blocks > first]
        if len(keys) <= first or size * (len(keys) - first) < size:
            return False
        self._finding[sequence.request_id] = sequence
        self._connector.worker.start_find(FindJob(sequence.request_id, keys[first:], first, hints))
        return True

    def on_found(self, event: FoundDone) -> None:
        """Queue the leg, whatever was found; what it does not use of a lease is ended."""
        sequence = self._finding.pop(event.request_id, None)
        known = self._sequences.get(event.request_id)
        if sequence is None or known is not sequence:
            if event.part is not None:
                self._connector.worker.end_lease(event.part)
            return
        for hint, num_blocks in event.failed:
            self._tell(
                wire.HintFailed(
                    event.request_id, hint.worker_id, hint.epoch, hint.num_blocks, num_blocks
                )
            )
        if event.num_blocks and self._is_worthwhile(event):
            source = event.part.worker_id if event.part is not None else STORE
            sequence.found = Found(event.first, event.num_blocks, source, event.part)
        elif event.part is not None:
            self._connector.worker.end_lease(event.part)
        self._scheduler.add(sequence)

    def start(self) -> bool:
        """Begin the loads of legs that the scheduler has given blocks for them. Whether one runs
        already: nothing of what was found is of use."""
        loading = self._scheduler.take_loading()
        for sequence in loading:
            self._start(sequence)
        return any(sequence.status is Status.RUNNING for sequence in loading)

    def on_fetched(self, sequence: Sequence, event: FetchDone) -> None:
        """The leg runs, with what came of it."""
        incoming, found = sequence.incoming, sequence.found
        assert incoming is not None
        assert found is not None
        if event.proof is not None:
            incoming.note(event)
            self.speeds.note_load(_kind(found), event.num_bytes, event.seconds)
        self._end(sequence, event.num_blocks, event.num_bytes, event.seconds, event.reason)

    def forget(self, sequence: Sequence) -> None:
        """The leg is gone, before or while it was loaded."""
        self._finding.pop(sequence.request_id, None)
        found = sequence.found
        if found is not None and found.part is not None and sequence.status is Status.WAITING:
            self._connector.worker.end_lease(found.part)

    # --- inside

    def _is_worthwhile(self, event: FoundDone) -> bool:
        if self.always or self._connector.kv_format is None:
            return True
        num_bytes = event.num_blocks * self._connector.kv_format.block_bytes
        num_tokens = event.num_blocks * self._scheduler.pool.block_size
        kind = STORE if event.part is None else "worker"
        return self.speeds.is_load_faster(kind, num_bytes, num_tokens)

    def _start(self, sequence: Sequence) -> None:
        incoming, found = sequence.incoming, sequence.found
        assert incoming is not None
        assert found is not None
        start = incoming.num_hits
        if not (start < found.stop and (found.part is None or found.first <= start)):
            if found.part is not None:  # the cache has it by now, or has lost what came before it
                self._connector.worker.end_lease(found.part)
            self._end(sequence, 0, 0, 0.0, "")
            return
        target = sequence.held[: found.stop - start]
        if found.part is not None:
            skip = start - found.first
            job = FetchJob(
                sequence.request_id,
                found.part,
                found.part.block_ids[skip:],
                found.part.digests[skip:],
                target,
            )
        else:
            keys = sequence.table.block_keys(sequence.tokens)[start : found.stop]
            job = FetchJob(sequence.request_id, None, [], [], target, place=Place.STORE, keys=keys)
        incoming.num_asked = found.stop
        incoming.num_jobs = 1
        self._connector.worker.start_fetch(job)

    def _end(
        self, sequence: Sequence, num_blocks: int, num_bytes: int, seconds: float, reason: str
    ) -> None:
        incoming, found = sequence.incoming, sequence.found
        assert incoming is not None
        assert found is not None
        size = self._scheduler.pool.block_size
        self._scheduler.end_fetch(sequence, incoming.num_there * size)
        self._tell(
            wire.Loaded(
                sequence.request_id, found.source, num_blocks * size, num_bytes, seconds, reason
            )
        )


def _kind(found: Found) -> str:
    """What speeds are remembered by: all workers are reached in one way, the store in another."""
    return STORE if found.part is None else "worker"
