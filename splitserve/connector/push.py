"""Both ends of a push: the source writes into a landing, the reader lends it (design 3.6).

The source's thread asks the owner for leave over the side channel, writes, and says when it has
ended. The owner's blocks are never written by anybody else: what landed is copied into them after
it was proved, as if it had been read.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from splitserve.connector.base import Lender
from splitserve.connector.jobs import PushDone, PushJob
from splitserve.connector.landing import LandingZone
from splitserve.connector.peers import Peers
from splitserve.errors import SplitserveError, TransferFailed
from splitserve.faults import Faults
from splitserve.transport.base import Link, Transport
from splitserve.transport.segment import Segment
from splitserve.transport.shm import link_here
from splitserve.wire import Landing

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Zone:
    """A decode worker's staging blocks: the memory, who has which, and how writers reach it."""

    segment: Segment
    transport: Transport
    landings: LandingZone

    def link_to(self, pool: Segment) -> Link:
        """To copy from the zone into our own pool."""
        return link_here(self.segment, pool)


class ZoneLender(Lender):
    """Lends landings of a zone, if there is one."""

    def __init__(self, worker_id: str, epoch: str, address: str, zone: Zone | None) -> None:
        self._worker_id = worker_id
        self._epoch = epoch
        self._address = address
        self._landings = zone.landings if zone else None

    def lend(self, first: int, num_blocks: int) -> Landing | None:
        lent = self._landings.lend(num_blocks) if self._landings else None
        if lent is None:
            return None
        landing_id, blocks = lent
        return Landing(landing_id, self._worker_id, self._epoch, self._address, first, blocks)

    def give_back(self, landing: Landing) -> None:
        assert self._landings is not None
        self._landings.give_back(landing.landing_id)

    @property
    def num_quarantined(self) -> int:
        return self._landings.num_quarantined if self._landings else 0

    @property
    def is_settled(self) -> bool:
        return self._landings is None or self._landings.is_settled

    def check(self) -> None:
        if self._landings is not None:
            self._landings.check()


@dataclass(slots=True)
class _Push:
    """One landing that we write."""

    ended: threading.Event = field(default_factory=threading.Event)
    has_begun: bool = False
    failure: str = ""


class Pusher:
    """Writes jobs in order, on one thread. `start` and `end` are called by the engine thread."""

    def __init__(
        self,
        zones: Peers,
        block_bytes: int,
        layer_bytes: int,
        report: Callable[[PushDone], None],
        faults: Faults,
    ) -> None:
        self._zones = zones  # only the thread's
        self._block_bytes = block_bytes
        self._layer_bytes = layer_bytes
        self._report = report
        self._faults = faults
        self._pushes: dict[str, _Push] = {}
        self._queue: queue.SimpleQueue[tuple[PushJob | Landing, _Push] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kv-push", daemon=True)
        self._thread.start()

    def start(self, job: PushJob) -> None:
        push = self._pushes.setdefault(job.landing.landing_id, _Push())
        self._queue.put((job, push))

    def end(self, landing: Landing) -> None:
        push = self._pushes.pop(landing.landing_id, None)
        if push is not None:
            push.ended.set()
            self._queue.put((landing, push))

    def close(self) -> None:
        for push in self._pushes.values():
            push.ended.set()
        self._queue.put(None)
        self._thread.join()
        self._zones.close()

    # --- the thread

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            what, push = item
            if isinstance(what, Landing):
                self._say_ended(what, push)
                continue
            if not push.failure:
                try:
                    self._write(what, push)
                except SplitserveError as error:
                    push.failure = error.message
                except Exception as error:
                    log.exception("push to %s", what.landing.landing_id)
                    push.failure = repr(error)
            if what.layer is None:
                self._report(PushDone(what.job_id, push.failure))

    def _write(self, job: PushJob, push: _Push) -> None:
        landing = job.landing
        self._faults.hit("push.begin", push.ended)
        if push.ended.is_set():
            raise TransferFailed("The push was ended.")
        zone = self._zones.get(landing.worker_id, landing.epoch, landing.address)
        if not push.has_begun:
            if not zone.channel.begin(landing.landing_id):
                raise TransferFailed("The reader does not want this landing to be written.")
            push.has_begun = True
        size = self._block_bytes if job.layer is None else self._layer_bytes
        offset = 0 if job.layer is None else job.layer * self._layer_bytes
        there = [block * self._block_bytes + offset for block in job.zone]
        here = [block * self._block_bytes + offset for block in job.blocks]
        with contextlib.closing(zone.link.write(there, here, size, push.ended)) as pieces:
            for _ in pieces:
                self._faults.hit("push.block", push.ended)

    def _say_ended(self, landing: Landing, push: _Push) -> None:
        zone = self._zones.known(landing.worker_id, landing.epoch)
        if push.has_begun and zone is not None:
            zone.channel.ended(landing.landing_id)
