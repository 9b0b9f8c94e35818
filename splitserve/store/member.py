"""A tier as a member of a KVStore: it may break, and is then left alone for a while."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from splitserve.clock import Clock
from splitserve.errors import StoreError
from splitserve.store.base import Tier, TierStats

log = logging.getLogger(__name__)

FIRST_BACK_OFF_S = 1.0
MAX_BACK_OFF_S = 30.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class MemberStats:
    """errors: calls that failed. is_broken: the last one did; it is called again later."""

    name: str
    tier: TierStats
    errors: int
    is_broken: bool


class Member:
    """Used by the thread that loads and the one that saves, at once."""

    def __init__(self, tier: Tier, clock: Clock) -> None:
        self.tier = tier
        self._clock = clock
        self._lock = threading.Lock()
        self._errors = 0
        self._back_off_s = 0.0  # 0: not broken
        self._retry_at_s = 0.0

    def call(self, work: Callable[[Tier], T], instead: T) -> T:
        """What the work returns; `instead` if the tier breaks, or is broken and left alone."""
        with self._lock:
            if self._back_off_s and self._clock.now() < self._retry_at_s:
                return instead
            started_broken = self._back_off_s > 0
        try:
            result = work(self.tier)
        except StoreError as error:
            self._break(error.message, started_broken)
            return instead
        except Exception as error:
            log.exception("tier %s", self.tier.name)  # our own bug: no reason to fail requests
            self._break(repr(error), started_broken)
            return instead
        self._mend(started_broken)
        return result

    def stats(self) -> MemberStats:
        with self._lock:
            errors, is_broken = self._errors, self._back_off_s > 0
        return MemberStats(self.tier.name, self.tier.stats(), errors, is_broken)

    def close(self) -> None:
        try:
            self.tier.close()
        except Exception:
            log.exception("tier %s", self.tier.name)

    def _break(self, reason: str, started_broken: bool) -> None:
        with self._lock:
            self._errors += 1
            if self._back_off_s and not started_broken:
                return  # the other thread's call broke it meanwhile: one back-off for both
            is_new = not self._back_off_s
            self._back_off_s = min(self._back_off_s * 2 or FIRST_BACK_OFF_S, MAX_BACK_OFF_S)
            self._retry_at_s = self._clock.now() + self._back_off_s
        if is_new:
            log.warning("tier %s of the KV store is left out: %s", self.tier.name, reason)

    def _mend(self, started_broken: bool) -> None:
        with self._lock:
            # A call that began before the tier broke, and went well, says nothing about now.
            mended = started_broken and self._back_off_s > 0
            if mended:
                self._back_off_s = 0.0
        if mended:
            log.warning("tier %s of the KV store is back", self.tier.name)
