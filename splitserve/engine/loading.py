"""KV of a prompt from elsewhere, instead of computing it: from another worker, or the store.

A leg that lacks blocks asks before it queues. If fetching what was found is predicted to be faster
than computing it, it is loaded when the leg gets blocks; whatever fails, it is computed. So neither
a broken store nor a wrong hint fails a request.
"""

from __future__ import annotations

from dataclasses import dataclass

from splitserve import wire
from splitserve.clock import Clock
from splitserve.connector.base import Connector
from splitserve.connector.jobs import FetchDone, FetchJob, FindJob, FoundDone, Place
from splitserve.engine.scheduler import Scheduler
from splitserve.engine.sequence import Found, Sequence, Status
from splitserve.engine.source import Tell

STORE = "store"
FIND_LIMIT_S = 2.0  # at most; no longer than computing is predicted to take
MIN_LIMIT_S = 0.1
LOAD_LIMIT_S = 5.0  # at least; 10 x predicted if that is more
MUTE_S = 5.0  # a store that took longer is not asked for so long
PRIOR_LOAD_BYTES_PER_S = 0.5e9
PRIOR_COMPUTE_TOKENS_PER_S = 1000.0
LOAD_OVERHEAD_S = 1e-3  # a round trip and a job
_WEIGHT = 0.2  # of the newest observation
_MIN_STEP_TOKENS = 16  # smaller steps say little of prefill


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A leg that goes on without, from `until_s` on. by: the worker that is waited for first; the
    store, if None."""

    sequence: Sequence
    until_s: float
    by: wire.Hint | wire.Part | None


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

    def load_s(self, source: str, num_bytes: int) -> float:
        rate = self._load_bytes_per_s.get(source, PRIOR_LOAD_BYTES_PER_S)
        return num_bytes / rate + LOAD_OVERHEAD_S

    def compute_s(self, num_tokens: int) -> float:
        return num_tokens / self.compute_tokens_per_s


class Loader:
    """Prompts' side of a load: asks, decides, fetches. The engine thread's."""

    def __init__(
        self,
        scheduler: Scheduler,
        connector: Connector,
        clock: Clock,
        tell: Tell,
        sequences: dict[str, Sequence],
    ) -> None:
        self.speeds = Speeds()
        self.always = False  # load whatever is found, though computing it may be faster
        self._scheduler = scheduler
        self._connector = connector
        self._clock = clock
        self._tell = tell
        self._sequences = sequences
        self._finding: dict[str, _Waiting] = {}
        self._loading: dict[str, _Waiting] = {}
        self._store_muted_until_s = float("-inf")

    def begin(self, sequence: Sequence, hints: list[wire.Hint]) -> bool:
        """Ask for what a leg lacks; it is queued when the answer is here. False if there is nothing
        to ask for, or nobody to ask."""
        now = self._clock.now()
        with_store = self._connector.has_store and now >= self._store_muted_until_s
        if sequence.is_fetch or not (hints or with_store):
            return False
        size = self._scheduler.pool.block_size
        keys = sequence.table.block_keys(sequence.tokens[: len(sequence.tokens) - 1])
        first = 0
        if self._scheduler.config.prefix_cache:
            first = len(self._scheduler.pool.lookup(keys))
        hints = [hint for hint in hints if hint.num_blocks > first]
        if len(keys) <= first or not (hints or with_store):
            return False
        compute_s = self.speeds.compute_s((len(keys) - first) * size)
        limit_s = max(MIN_LIMIT_S, min(FIND_LIMIT_S, compute_s))
        self._finding[sequence.request_id] = _Waiting(
            sequence, now + limit_s, hints[0] if hints else None
        )
        self._connector.worker.start_find(
            FindJob(sequence.request_id, keys[first:], first, hints, with_store)
        )
        return True

    def give_up(self, now_s: float) -> None:
        """What takes too long to be found or loaded is computed."""
        for waiting in self._take_late(self._finding, now_s):
            self._tell_late(waiting, "nobody answered in time")
            self._scheduler.add(waiting.sequence)
        for waiting in self._take_late(self._loading, now_s):
            self._tell_late(waiting, "it took too long")
            self._connector.worker.cancel_fetch(waiting.sequence.request_id)
            self._scheduler.give_up_load(waiting.sequence, now_s)

    def next_deadline_s(self) -> float | None:
        """When `give_up` would have something to do, if nothing else happens."""
        waiting = (*self._finding.values(), *self._loading.values())
        return min((one.until_s for one in waiting), default=None)

    def on_found(self, event: FoundDone) -> None:
        """Queue the leg, whatever was found; what it does not use of a lease is ended."""
        waiting = self._finding.pop(event.request_id, None)
        sequence = waiting.sequence if waiting else None
        if sequence is None or self._sequences.get(event.request_id) is not sequence:
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
            self.speeds.note_load(_kind(found.part), event.num_bytes, event.seconds)
        self._end(sequence, event.num_blocks, event.num_bytes, event.seconds, event.reason)

    def forget(self, sequence: Sequence) -> None:
        """The leg is gone, before or while it was loaded."""
        self._finding.pop(sequence.request_id, None)
        self._loading.pop(sequence.request_id, None)
        found = sequence.found
        if found is not None and found.part is not None and sequence.status is Status.WAITING:
            self._connector.worker.end_lease(found.part)

    # --- inside

    @staticmethod
    def _take_late(waiting: dict[str, _Waiting], now_s: float) -> list[_Waiting]:
        late = [name for name, one in waiting.items() if now_s > one.until_s]
        return [waiting.pop(name) for name in late]

    def _tell_late(self, waiting: _Waiting, reason: str) -> None:
        request_id, by = waiting.sequence.request_id, waiting.by
        source = STORE if by is None else by.worker_id
        if by is None:
            self._store_muted_until_s = self._clock.now() + MUTE_S
        elif isinstance(by, wire.Hint):  # it may well have them
            num = by.num_blocks
            self._tell(wire.HintFailed(request_id, by.worker_id, by.epoch, num, num))
        self._tell(wire.Loaded(request_id, source, 0, 0, 0.0, reason))

    def _is_worthwhile(self, event: FoundDone) -> bool:
        if self.always or self._connector.kv_format is None:
            return True
        num_bytes = event.num_blocks * self._connector.kv_format.block_bytes
        num_tokens = event.num_blocks * self._scheduler.pool.block_size
        load_s = self.speeds.load_s(_kind(event.part), num_bytes)
        return load_s < self.speeds.compute_s(num_tokens)

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
        size = self._connector.kv_format.block_bytes if self._connector.kv_format else 0
        limit_s = max(LOAD_LIMIT_S, 10 * self.speeds.load_s(_kind(found.part), size * len(target)))
        until_s = self._clock.now() + limit_s
        self._loading[sequence.request_id] = _Waiting(sequence, until_s, found.part)
        incoming.num_asked = found.stop
        incoming.num_jobs = 1
        self._connector.worker.start_fetch(job)

    def _end(
        self, sequence: Sequence, num_blocks: int, num_bytes: int, seconds: float, reason: str
    ) -> None:
        incoming, found = sequence.incoming, sequence.found
        assert incoming is not None
        assert found is not None
        self._loading.pop(sequence.request_id, None)
        size = self._scheduler.pool.block_size
        self._scheduler.end_fetch(sequence, incoming.num_there * size)
        self._tell(
            wire.Loaded(
                sequence.request_id, found.source, num_blocks * size, num_bytes, seconds, reason
            )
        )


def _kind(part: wire.Part | None) -> str:
    """What speeds are remembered by: all workers are reached in one way, the store in another."""
    return STORE if part is None else "worker"
