"""The KV store as connectors use it: a list of tiers, the fastest first.

A prefix is loaded piece by piece from the first tier that has the next block. What came from a
lower tier is then brought into those above, and what is saved goes to all, by one thread of the
store: it reads a promoted block from the lower tier again, so that nobody has to pin the loaded
one. A tier that can't be reached is left out and tried again later: no call here fails.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from splitserve.clock import Clock
from splitserve.store.base import Block, Tier
from splitserve.store.member import Member, MemberStats
from splitserve.store.record import digest_of

log = logging.getLogger(__name__)

MAX_QUEUED_BLOCKS = 1024
BATCH_BLOCKS = 64
PROMOTED_AT_ONCE = 8
"""Blocks that are read again to promote them: so much memory is the store's own."""

NOTHING: frozenset[bytes] = frozenset()

Done = Callable[[bool], None]
"""Called once: the block's memory is not touched any more. Whether a tier has the block now."""


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Blocks: `queued` wait for the saving thread, `dropped` met a full queue or a closed store."""

    tiers: list[MemberStats]
    queued: int
    dropped: int
    promoted: int


@dataclass(frozen=True, slots=True)
class _Save:
    key: bytes
    block: Block
    digest: bytes
    done: Done


@dataclass(frozen=True, slots=True)
class _Promotion:
    """Bring a block from tier `source` into those above."""

    key: bytes
    source: int
    block_bytes: int


class KVStore:
    """May be used by several threads at once."""

    def __init__(
        self, tiers: Sequence[Tier], clock: Clock, max_queued_blocks: int = MAX_QUEUED_BLOCKS
    ) -> None:
        self._members = [Member(tier, clock) for tier in tiers]
        self._max_queued = max_queued_blocks
        self._queue: deque[_Save | _Promotion] = deque()
        self._changed = threading.Condition()
        self._is_busy = False
        self._is_closed = False
        self._dropped = 0
        self._promoted = 0
        self._thread = threading.Thread(target=self._run, name="kv-store", daemon=True)
        self._thread.start()

    def find(self, keys: Sequence[bytes]) -> int:
        """How many leading keys the tiers have together. Not a promise."""
        return sum(num for _, num in self._walk(len(keys), lambda at: lambda t: t.find(keys[at:])))

    def load(self, keys: Sequence[bytes], targets: Sequence[Block]) -> int:
        """Fill targets[i] with the block of keys[i], proved by its digest, as far as possible.
        Returns how many leading ones are filled; the others' content is undefined."""
        stretches = self._walk(
            len(keys), lambda at: lambda tier: tier.load(keys[at:], targets[at:])
        )
        at = 0
        for source, num in stretches:
            if source:
                for key, target in zip(keys[at : at + num], targets[at : at + num], strict=True):
                    self._put(_Promotion(key, source, len(target)))
            at += num
        return at

    def save(self, key: bytes, block: Block, digest: bytes, done: Done) -> bool:
        """Hand over a block by reference: its memory must not change until `done` is called, by the
        store's thread or by `close`. Returns False if it is dropped: done(False) was called here.

        digest: xxh3-128 of the block.
        """
        is_taken = self._put(_Save(key, block, digest, done))
        if not is_taken:
            _tell(done, False)
        return is_taken

    def flush(self, timeout_s: float) -> bool:
        """Wait until all that was handed over is saved or dropped; False if that takes longer."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._queue and not self._is_busy, timeout_s)

    def stats(self) -> StoreStats:
        with self._changed:
            queued, dropped, promoted = len(self._queue), self._dropped, self._promoted
        return StoreStats([member.stats() for member in self._members], queued, dropped, promoted)

    def close(self) -> None:
        """Finish the batch at hand, drop what is queued, close the tiers. Idempotent."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            left = list(self._queue)
            self._queue.clear()
            self._dropped += len(left)
            self._changed.notify_all()
        self._thread.join()
        for job in left:
            if isinstance(job, _Save):
                _tell(job.done, False)
        for member in self._members:
            member.close()

    # --- the caller's thread

    def _walk(
        self, num_keys: int, ask: Callable[[int], Callable[[Tier], int]]
    ) -> list[tuple[int, int]]:
        """(tier, number of blocks) of each stretch, from the first key on.

        ask(at): work that says how far a tier brings us from key `at` on. Upper tiers are asked
        first, again after each stretch; who brought us to a key need not be asked about it.
        """
        stretches = []
        at = 0
        in_vain: set[int] = set()  # who was asked about key `at`
        while at < num_keys and len(in_vain) < len(self._members):
            turn = next(i for i in range(len(self._members)) if i not in in_vain)
            num = self._members[turn].call(ask(at), 0)
            if num:
                stretches.append((turn, num))
                at += num
                in_vain.clear()
            in_vain.add(turn)
        return stretches

    def _put(self, job: _Save | _Promotion) -> bool:
        with self._changed:
            if self._is_closed or len(self._queue) >= self._max_queued:
                self._dropped += 1
                return False
            self._queue.append(job)
            self._changed.notify_all()
            return True

    # --- the saving thread

    def _run(self) -> None:
        while batch := self._take():
            saves = [job for job in batch if isinstance(job, _Save)]
            promotions = [job for job in batch if isinstance(job, _Promotion)]
            try:
                self._promote(promotions)
            except Exception:
                log.exception("promotion of %d blocks", len(promotions))
            self._save_all(saves)
            with self._changed:
                self._is_busy = False
                self._changed.notify_all()

    def _take(self) -> list[_Save | _Promotion]:
        """The next batch; empty when the store is closed."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._queue) or self._is_closed)
            if self._is_closed:
                return []
            self._is_busy = True
            return [self._queue.popleft() for _ in range(min(len(self._queue), BATCH_BLOCKS))]

    def _save_all(self, jobs: list[_Save]) -> None:
        there: set[bytes] = set()
        try:
            for member in self._members:
                there |= member.call(lambda tier: _save_into(tier, jobs), NOTHING)
        except Exception:
            log.exception("save of %d blocks", len(jobs))
        for job in jobs:
            _tell(job.done, job.key in there)

    def _promote(self, jobs: list[_Promotion]) -> None:
        for source in sorted({job.source for job in jobs}):
            mine = [job for job in jobs if job.source == source]
            for start in range(0, len(mine), PROMOTED_AT_ONCE):
                self._promote_from(source, mine[start : start + PROMOTED_AT_ONCE])

    def _promote_from(self, source: int, jobs: list[_Promotion]) -> None:
        above = self._members[:source]
        lacking: set[bytes] = set()
        for member in above:
            lacking |= member.call(lambda tier: _lacking(tier, [job.key for job in jobs]), NOTHING)
        keys = [job.key for job in jobs if job.key in lacking]
        blocks = [np.empty(jobs[0].block_bytes, np.uint8) for _ in keys]
        num = self._members[source].call(lambda tier: tier.load(keys, blocks), 0) if keys else 0
        again = [
            _Save(key, block, digest_of(block), lambda _: None)
            for key, block in zip(keys[:num], blocks[:num], strict=True)
        ]
        for member in above:
            member.call(lambda tier: _save_into(tier, again), NOTHING)
        with self._changed:
            self._promoted += num


def _save_into(tier: Tier, jobs: list[_Save]) -> frozenset[bytes]:
    """Save what the tier lacks. Returns the keys that it has then."""
    unique = {job.key: job for job in jobs}
    if not unique:
        return NOTHING
    lacking = _lacking(tier, list(unique))
    wanted = [job for key, job in unique.items() if key in lacking]
    if wanted:
        keys = [job.key for job in wanted]
        num = tier.save(keys, [job.block for job in wanted], [job.digest for job in wanted])
        lacking = NOTHING if num == len(keys) else _lacking(tier, keys)
    return frozenset(unique) - lacking


def _lacking(tier: Tier, keys: list[bytes]) -> frozenset[bytes]:
    missing = tier.missing(keys)
    return frozenset(key for key, is_missing in zip(keys, missing, strict=True) if is_missing)


def _tell(done: Done, saved: bool) -> None:
    try:
        done(saved)
    except Exception:
        log.exception("done")
