"""Digests blocks, and hands them to the store: off the engine's thread, in order."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import xxhash

from splitserve.clock import Clock
from splitserve.connector.base import Staging
from splitserve.connector.jobs import SaveDone, SaveJob, SealDone, SealJob
from splitserve.faults import Faults
from splitserve.store.chain import KVStore
from splitserve.transport.segment import Segment

log = logging.getLogger(__name__)


class Saver:
    """`start_seal` and `start_save` are called by the engine thread; a thread does the rest, and
    the store's own thread the saving."""

    def __init__(
        self,
        segment: Segment,
        store: KVStore | None,
        with_digests: bool,
        staging: Staging | None,
        clock: Clock,
        faults: Faults,
        report: Callable[[SealDone | SaveDone], None],
    ) -> None:
        self._segment = segment
        self._store = store
        self._with_digests = with_digests
        self._staging = staging
        self._clock = clock
        self._faults = faults
        self._report = report
        self._closing = threading.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kv-seal")

    def start_seal(self, job: SealJob) -> None:
        self._thread.submit(self._seal, job)

    def start_save(self, job: SaveJob) -> None:
        self._thread.submit(self._save, job)

    def close(self) -> None:
        self._closing.set()
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _seal(self, job: SealJob) -> None:
        start = self._clock.now()
        self._faults.hit("seal", self._closing)
        digests: list[bytes] = []
        reason = ""
        try:
            if self._staging is not None:
                self._staging.to_host(job.blocks)
            if self._with_digests:
                digests = self._digests(job.blocks)
        except Exception as error:
            log.exception("seal of %s", job.lease_id)
            reason = f"The blocks could not be brought to the host: {error!r}"
        self._report(SealDone(job.lease_id, digests, self._clock.now() - start, reason))

    def _save(self, job: SaveJob) -> None:
        assert self._store is not None
        self._faults.hit("save", self._closing)
        try:
            digests = job.digests
            if not digests:
                if self._staging is not None:
                    self._staging.to_host(job.blocks)
                digests = self._digests(job.blocks)
        except Exception:
            log.exception("save of %d blocks", len(job.blocks))
            self._report(SaveDone(job.job_id, 0))
            return
        saving = _Saving(job, self._report)
        for i, (key, block) in enumerate(zip(job.keys, job.blocks, strict=True)):
            done = functools.partial(saving.note, i)
            self._store.save(key, self._segment.blocks[block], digests[i], done)

    def _digests(self, blocks: list[int]) -> list[bytes]:
        return [xxhash.xxh3_128_digest(self._segment.blocks[block]) for block in blocks]


class _Saving:
    """A job of which the store has some blocks. `note` is called by its thread or by ours."""

    def __init__(self, job: SaveJob, report: Callable[[SaveDone], None]) -> None:
        self._job = job
        self._report = report
        self._lock = threading.Lock()
        self._saved: list[bool | None] = [None] * len(job.blocks)

    def note(self, index: int, saved: bool) -> None:
        with self._lock:
            assert self._saved[index] is None, "told once"
            self._saved[index] = saved
            if None in self._saved:
                return
        num_saved = (*self._saved, False).index(False)
        self._report(SaveDone(self._job.job_id, num_saved))
