"""Supervision: every worker is started, watched, restarted with back-off and stopped one way.

The zygote loads the model once and forks workers. If a worker dies it is forked again; if the
zygote dies, the kernel kills its workers, and all are started anew. What a death means for requests
is the hub's and the journeys' business.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from splitserve.clock import Clock
from splitserve.cluster.zygote_client import ZygoteClient
from splitserve.errors import NoWorker, SplitserveError
from splitserve.gateway.hub import WorkerHub
from splitserve.worker.spec import Exited, ModelSpec, Spawned, WorkerSpec

log = logging.getLogger(__name__)

BACKOFF_FIRST_S = 0.2
BACKOFF_MAX_S = 30.0
STABLE_S = 30.0  # a worker that lived so long starts again without back-off
WATCH_PERIOD_S = 1.0
START_TRIES = 3
_START_LOOK_S = 0.2


@dataclass(slots=True)
class _Slot:
    """One worker id: its template, and the epoch that lives now."""

    template: WorkerSpec
    epoch: str = ""
    pid: int | None = None
    started_s: float = 0.0
    num_failures: int = 0  # in a row
    num_restarts: int = 0
    restart: asyncio.Task[None] | None = field(default=None)


class Supervisor:
    """Owns the worker processes of one gateway."""

    def __init__(
        self,
        model: ModelSpec,
        templates: list[WorkerSpec],
        hub: WorkerHub,
        clock: Clock,
        *,
        start_s: float,
        hang_s: float,
        say: Callable[[str], None] = log.info,
    ) -> None:
        self._model = model
        self._slots = {spec.worker_id: _Slot(spec) for spec in templates}
        self._hub = hub
        self._clock = clock
        self._start_s = start_s
        self._hang_s = hang_s
        self._say = say
        self._zygote: ZygoteClient | None = None
        self._watch: asyncio.Task[None] | None = None
        self._revival: asyncio.Task[None] | None = None
        self._stopping = False

    async def start(self) -> None:
        """Load the model and start all workers; returns when each has said hello."""
        await self._start_zygote()
        for slot in self._slots.values():
            self._spawn(slot)
        limit_s = self._clock.now() + self._start_s
        while len(self._hub.workers) < len(self._slots):
            self._require_starting(limit_s)
            try:
                await self._hub.wait_for_change(_START_LOOK_S)
            except TimeoutError:
                continue
        self._watch = asyncio.create_task(self._watch_loop())

    def _require_starting(self, limit_s: float) -> None:
        """Raise if a worker keeps dying before its hello, or time is up."""
        missing = sorted(self._slots.keys() - self._hub.workers.keys())
        hopeless = [name for name in missing if self._slots[name].num_failures >= START_TRIES]
        if hopeless:
            raise NoWorker(
                f"{', '.join(hopeless)} died {START_TRIES} times while starting.",
                advice="Why is said above.",
            )
        if self._clock.now() > limit_s:
            raise NoWorker(
                f"Workers {', '.join(missing)} did not start within {self._start_s:g} s.",
                advice="Their messages are above.",
            )

    async def stop(self) -> None:
        """Terminate the workers, then the zygote; nothing is left running."""
        self._stopping = True
        tasks = [self._watch, self._revival, *(slot.restart for slot in self._slots.values())]
        for task in tasks:
            if task is not None:
                task.cancel()
        for slot in self._slots.values():
            if slot.pid is not None:
                _kill(slot.pid, signal.SIGTERM)
        try:
            async with asyncio.timeout(2.0):
                while any(slot.pid is not None for slot in self._slots.values()):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        except TimeoutError:
            log.warning("workers did not stop on SIGTERM, killing them")
        if self._zygote is not None:
            await self._zygote.stop()

    def num_restarts(self) -> dict[str, int]:
        return {worker_id: slot.num_restarts for worker_id, slot in self._slots.items()}

    def pids(self) -> dict[str, int]:
        """Live worker processes."""
        return {name: slot.pid for name, slot in self._slots.items() if slot.pid is not None}

    # --- inside

    async def _start_zygote(self) -> None:
        self._zygote = ZygoteClient(self._model, self._on_message, self._on_zygote_death)
        seconds = await self._zygote.start(self._start_s)
        self._say(f"model loaded in {seconds:.1f} s")

    def _spawn(self, slot: _Slot) -> None:
        slot.epoch = secrets.token_hex(6)
        slot.started_s = self._clock.now()
        spec = msgspec.structs.replace(slot.template, epoch=slot.epoch)
        self._hub.expect(spec.worker_id, spec.epoch)
        assert self._zygote is not None
        self._zygote.spawn(spec)

    def _on_message(self, message: Spawned | Exited) -> None:
        slot = self._slots[message.worker_id]
        if message.epoch != slot.epoch:
            return
        if isinstance(message, Spawned):
            slot.pid = message.pid
            return
        slot.pid = None
        if not self._stopping:
            self._after_death(slot, _describe_exit(message.status))

    def _after_death(self, slot: _Slot, reason: str) -> None:
        worker_id = slot.template.worker_id
        self._hub.lost(worker_id, slot.epoch, reason)
        lived_s = self._clock.now() - slot.started_s
        slot.num_failures = 0 if lived_s >= STABLE_S else slot.num_failures + 1
        delay_s = backoff_s(slot.num_failures)
        log.warning("worker %s %s; restart in %.1f s", worker_id, reason, delay_s)
        slot.num_restarts += 1
        slot.restart = asyncio.create_task(self._restart(slot, delay_s))

    async def _restart(self, slot: _Slot, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        self._spawn(slot)

    def _on_zygote_death(self, code: int | None) -> None:
        if self._stopping or self._revival is not None:
            return
        log.error("the process that workers are forked from exited with %s", code)
        for slot in self._slots.values():
            slot.pid = None
            if slot.restart is not None:
                slot.restart.cancel()  # the revival starts all of them
            self._hub.lost(slot.template.worker_id, slot.epoch, "died with its parent")
        self._revival = asyncio.create_task(self._revive())

    async def _revive(self) -> None:
        failures = 0
        while True:
            failures += 1
            await asyncio.sleep(backoff_s(failures))
            try:
                await self._start_zygote()
                break
            except SplitserveError as error:
                log.error("restart failed: %s", error.message)
        self._revival = None
        for slot in self._slots.values():
            slot.num_restarts += 1
            self._spawn(slot)

    async def _watch_loop(self) -> None:
        """Kill workers whose engine loop is silent or that never said hello."""
        while True:
            await asyncio.sleep(WATCH_PERIOD_S)
            now = self._clock.now()
            for worker_id, slot in self._slots.items():
                if slot.pid is None:
                    continue
                handle = self._hub.workers.get(worker_id)
                silent = handle is not None and now - handle.last_frame_s > self._hang_s
                mute = handle is None and now - slot.started_s > self._start_s
                if silent or mute:
                    log.error("worker %s gives no sign of life, killing it", worker_id)
                    _kill(slot.pid, signal.SIGKILL)


def backoff_s(num_failures: int) -> float:
    """Delay before the next start after so many failures in a row."""
    if num_failures == 0:
        return 0.0
    return float(min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2 ** (num_failures - 1)))


def _describe_exit(status: int) -> str:
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"exited with {status}"


def _kill(pid: int, signum: signal.Signals) -> None:
    try:
        os.kill(pid, signum)
    except ProcessLookupError:
        pass
