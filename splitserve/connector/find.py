"""Asks where the leading blocks of a prompt are: other workers by hints, and the store."""

from __future__ import annotations

import functools
import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from splitserve.clock import Clock
from splitserve.connector.jobs import FindJob, FoundDone
from splitserve.connector.lanes import Lanes
from splitserve.connector.sidechannel import SideChannel
from splitserve.errors import FormatMismatch, SplitserveError
from splitserve.faults import Faults
from splitserve.store.chain import KVStore
from splitserve.wire import Hint, Part

log = logging.getLogger(__name__)

MUTE_S = 5.0  # who did not answer in time is not asked for so long


@dataclass(slots=True)
class _Question:
    """A job on its way from one who may know to the next."""

    job: FindJob
    hints: list[Hint]  # still to be asked
    failed: list[tuple[Hint, int]] = field(default_factory=list)


@dataclass(slots=True)
class _Line:
    """Questions to one worker; the channel and what follows are its lane's own."""

    waiting: deque[_Question] = field(default_factory=deque)  # any thread appends, the lane takes
    epoch: str = ""
    channel: SideChannel | None = None
    muted_until_s: float = float("-inf")


class Finder:
    """What waits for one worker is asked in one go. `start` is the engine thread's."""

    def __init__(
        self,
        connect: Callable[[str, str], SideChannel],
        store: KVStore | None,
        clock: Clock,
        faults: Faults,
        report: Callable[[FoundDone], None],
    ) -> None:
        """connect: a side channel to an epoch at an address; raises TransferFailed."""
        self._connect = connect
        self._store = store
        self._clock = clock
        self._faults = faults
        self._closing = threading.Event()
        self._report = report
        self._lanes = Lanes("kv-find")
        self._lines: dict[str, _Line] = {}
        self._lock = threading.Lock()

    def start(self, job: FindJob) -> None:
        self._pass_on(_Question(job, list(job.hints)))

    def meet(self, worker_id: str, epoch: str, address: str) -> None:
        """Connect ahead of the first question."""

        def meet() -> None:
            try:
                self._channel(line, Hint(worker_id, epoch, address, 0, 0.0, 0.0))
            except SplitserveError as error:
                log.info("worker %s could not be met: %s", worker_id, error.message)

        line = self._line(worker_id)
        self._lanes.submit(worker_id, meet)

    def close(self) -> None:
        self._closing.set()
        self._lanes.close()
        for line in self._lines.values():
            if line.channel is not None:
                line.channel.close()

    # --- any thread

    def _pass_on(self, question: _Question) -> None:
        """To the first of the workers that were not asked yet, then to the store."""
        if not question.hints:
            self._lanes.submit("the store", functools.partial(self._ask_store, question))
            return
        worker_id = question.hints[0].worker_id
        line = self._line(worker_id)
        line.waiting.append(question)
        self._lanes.submit(worker_id, functools.partial(self._ask_line, line))

    def _line(self, worker_id: str) -> _Line:
        with self._lock:
            return self._lines.setdefault(worker_id, _Line())

    # --- a lane's thread

    def _ask_line(self, line: _Line) -> None:
        """Ask all that waits; each call but the first of several finds nothing to do."""
        self._faults.hit("find", self._closing)
        by_epoch: dict[str, list[_Question]] = {}
        while line.waiting:
            question = line.waiting.popleft()
            by_epoch.setdefault(question.hints[0].epoch, []).append(question)
        for same in by_epoch.values():
            for question, part in zip(same, self._ask(line, same), strict=True):
                self._take_answer(question, part)

    def _ask(self, line: _Line, questions: list[_Question]) -> list[Part | None]:
        hint = questions[0].hints[0]
        nothing: list[Part | None] = [None] * len(questions)
        if self._clock.now() < line.muted_until_s:
            return nothing
        try:
            return self._channel(line, hint).find(
                [
                    (x.job.keys[: x.hints[0].num_blocks - x.job.first], x.job.first)
                    for x in questions
                ]
            )
        except FormatMismatch as error:  # another epoch, mostly
            log.info("worker %s refused a question: %s", hint.worker_id, error.message)
        except SplitserveError as error:
            log.warning("worker %s could not be asked: %s", hint.worker_id, error.message)
            line.muted_until_s = self._clock.now() + MUTE_S
        except Exception:
            log.exception("question to worker %s", hint.worker_id)
        return nothing

    def _channel(self, line: _Line, hint: Hint) -> SideChannel:
        channel = line.channel
        if channel is None or line.epoch != hint.epoch or not channel.is_open:
            line.channel = None
            if channel is not None:
                channel.close()
            channel = line.channel = self._connect(hint.epoch, hint.address)
            line.epoch = hint.epoch
        return channel

    def _take_answer(self, question: _Question, part: Part | None) -> None:
        job, hint = question.job, question.hints.pop(0)
        num_blocks = len(part.block_ids) if part is not None else 0
        if job.first + num_blocks < hint.num_blocks:
            question.failed.append((hint, job.first + num_blocks if num_blocks else 0))
        if part is not None and num_blocks:
            self._report(FoundDone(job.request_id, job.first, num_blocks, part, question.failed))
        else:
            self._pass_on(question)

    def _ask_store(self, question: _Question) -> None:
        self._faults.hit("find", self._closing)
        job = question.job
        num_blocks = 0
        if self._store is not None and job.with_store:
            num_blocks = self._store.find(job.keys)
        self._report(FoundDone(job.request_id, job.first, num_blocks, None, question.failed))
