"""The landing zone: blocks beside the pool that writers fill, so that no writer ever sees the pool
(design 3.6).

A landing is lent for one handoff. Its writer begins, writes, and says when it has ended; its reader
takes out what is proved and gives it back. The blocks are lent again only when both are through. A
writer that does neither, frozen in the middle of a write, keeps them: they are in quarantine until
it goes on and ends, or its connection closes, which is when its process is gone (design 3.5).
"""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass


@dataclass(slots=True)
class _Landing:
    blocks: list[int]
    writer: int | None = None  # the connection that may be writing
    is_wanted: bool = True  # the reader has not given it back


class LandingZone:
    """Who has which of `num_blocks` staging blocks. Thread-safe: the engine lends and takes back,
    the side channel hears of writers."""

    def __init__(self, epoch: str, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._epoch = epoch
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._free = list(range(num_blocks))
        self._landings: dict[str, _Landing] = {}

    def lend(self, num_blocks: int) -> tuple[str, list[int]] | None:
        """A landing's id and blocks; None if there are not so many free."""
        with self._lock:
            if not 0 < num_blocks <= len(self._free):
                return None
            blocks = [self._free.pop() for _ in range(num_blocks)]
            landing_id = f"{self._epoch}/landing-{next(self._numbers)}"
            self._landings[landing_id] = _Landing(blocks)
            return landing_id, blocks

    def give_back(self, landing_id: str) -> None:
        """The reader needs nothing of it any more. From now on no writer can begin."""
        with self._lock:
            landing = self._landings.get(landing_id)
            if landing is not None:
                landing.is_wanted = False
                self._settle(landing_id, landing)

    def begin(self, landing_id: str, writer: int) -> bool:
        """A writer wants to write; False if it must not."""
        with self._lock:
            landing = self._landings.get(landing_id)
            if landing is None or not landing.is_wanted or landing.writer is not None:
                return False
            landing.writer = writer
            return True

    def end(self, landing_id: str, writer: int) -> None:
        """The writer will not touch it again."""
        with self._lock:
            landing = self._landings.get(landing_id)
            if landing is not None and landing.writer == writer:
                landing.writer = None
                self._settle(landing_id, landing)

    def writer_gone(self, writer: int) -> None:
        """The writer's connection closed: it can't write any more."""
        with self._lock:
            for landing_id, landing in list(self._landings.items()):
                if landing.writer == writer:
                    landing.writer = None
                    self._settle(landing_id, landing)

    @property
    def num_quarantined(self) -> int:
        """Blocks that nobody reads any more and a writer may still write."""
        with self._lock:
            return sum(len(x.blocks) for x in self._landings.values() if not x.is_wanted)

    @property
    def is_settled(self) -> bool:
        with self._lock:
            return not self._landings

    def check(self) -> None:
        """Each block is free or lent once."""
        with self._lock:
            lent = [block for x in self._landings.values() for block in x.blocks]
            assert sorted(self._free + lent) == list(range(self.num_blocks))
            assert all(x.is_wanted or x.writer is not None for x in self._landings.values())

    def _settle(self, landing_id: str, landing: _Landing) -> None:
        if not landing.is_wanted and landing.writer is None:
            self._free += landing.blocks
            del self._landings[landing_id]
