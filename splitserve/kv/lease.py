"""Leases: blocks pinned for readers elsewhere, each of which ends exactly once (design 3.4).

The table is shared by two threads. The engine grants, releases and collects; the side channel
confirms and hears that a reader is done, in the middle of a step. A block stays pinned until the
engine has collected the lease, so a lease that is active when confirmed held throughout.
"""

from __future__ import annotations

import enum
import itertools
import threading
from dataclasses import dataclass


class LeaseEnd(enum.StrEnum):
    """The ways a lease ends. (The owner's death ends it too, with the whole table.)"""

    READ = "read"  # the last reader has done
    RELEASED = "released"  # the gateway said that no reader will come
    EXPIRED = "expired"  # its deadline passed


@dataclass(slots=True)
class Lease:
    """`blocks` stay as they are until the lease ends. Times by the owner's monotonic clock."""

    lease_id: str
    request_id: str
    blocks: list[int]
    deadline_s: float
    latest_s: float  # no renewal goes beyond: the request's own deadline
    readers: int
    ended: LeaseEnd | None = None


class LeaseTable:
    """All leases of one worker epoch. Thread-safe."""

    def __init__(self, epoch: str, term_s: float) -> None:
        self.term_s = term_s
        self._epoch = epoch
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._active: dict[str, Lease] = {}
        self._uncollected: list[Lease] = []
        self._num_ended = dict.fromkeys(LeaseEnd, 0)
        self._num_granted = 0

    def grant(
        self, request_id: str, blocks: list[int], now_s: float, latest_s: float, readers: int = 1
    ) -> Lease:
        """Begin a lease. The caller has pinned the blocks."""
        lease = Lease(
            lease_id=f"{self._epoch}/{next(self._numbers)}",
            request_id=request_id,
            blocks=blocks,
            deadline_s=min(now_s + self.term_s, latest_s),
            latest_s=latest_s,
            readers=readers,
        )
        with self._lock:
            self._active[lease.lease_id] = lease
            self._num_granted += 1
        return lease

    def extend(self, lease_id: str, blocks: list[int], now_s: float) -> bool:
        """Pin more blocks by a lease that holds, for another term; the caller has pinned them.
        False if it has ended: then it pins nothing new."""
        with self._lock:
            lease = self._active.get(lease_id)
            if lease is None or now_s > lease.deadline_s:
                return False
            lease.blocks += blocks
            lease.deadline_s = min(now_s + self.term_s, lease.latest_s)
            return True

    def confirm(self, lease_id: str, now_s: float) -> bool:
        """Proof for a reader: the lease has held from its grant until now."""
        with self._lock:
            lease = self._active.get(lease_id)
            return lease is not None and now_s <= lease.deadline_s

    def renew(self, lease_id: str, now_s: float) -> bool:
        """Another term from now, at most until the request's deadline. False if it has ended."""
        with self._lock:
            lease = self._active.get(lease_id)
            if lease is None or now_s > lease.deadline_s:
                return False
            lease.deadline_s = min(now_s + self.term_s, lease.latest_s)
            return True

    def done(self, lease_id: str) -> None:
        """A reader needs the blocks no more; the last one ends the lease."""
        with self._lock:
            lease = self._active.get(lease_id)
            if lease is not None:
                lease.readers -= 1
                if lease.readers <= 0:
                    self._end(lease, LeaseEnd.READ)

    def release(self, lease_id: str) -> None:
        """No reader will come."""
        with self._lock:
            lease = self._active.get(lease_id)
            if lease is not None:
                self._end(lease, LeaseEnd.RELEASED)

    def collect(self, now_s: float) -> list[Lease]:
        """End what has expired; return the leases that ended since the last call, each once.

        The caller unpins their blocks.
        """
        with self._lock:
            for lease in [x for x in self._active.values() if now_s > x.deadline_s]:
                self._end(lease, LeaseEnd.EXPIRED)
            ended, self._uncollected = self._uncollected, []
            return ended

    def next_deadline_s(self) -> float | None:
        """When the next lease expires, if any is active."""
        with self._lock:
            return min((x.deadline_s for x in self._active.values()), default=None)

    @property
    def is_settled(self) -> bool:
        """No lease is active, and none that ended still pins its blocks."""
        with self._lock:
            return not self._active and not self._uncollected

    @property
    def num_active(self) -> int:
        with self._lock:
            return len(self._active)

    def ended_counts(self) -> dict[LeaseEnd, int]:
        with self._lock:
            return dict(self._num_ended)

    def check(self) -> None:
        """Invariant 2: granted = active + ended, and nothing ended is active."""
        with self._lock:
            assert self._num_granted == len(self._active) + sum(self._num_ended.values())
            assert all(x.ended is None for x in self._active.values())
            assert all(x.ended is not None for x in self._uncollected)

    def _end(self, lease: Lease, how: LeaseEnd) -> None:
        assert lease.ended is None
        lease.ended = how
        del self._active[lease.lease_id]
        self._num_ended[how] += 1
        self._uncollected.append(lease)
