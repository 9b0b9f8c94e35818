"""Who is evicted first: one number per block, its score, and the least score goes.

The score is a time. With LRU it is that of the last use. With FREQUENCY it is log2 of the sum, over
all uses, of 2^(time of use / half-life), in half-lives: each use counts half as much after one
half-life, k uses at once put a block HALF_LIFE_S x log2(k) into the future, and nothing has to be
aged. So either policy needs no more than a place for one number that only grows: a file's mtime, a
member's score in a sorted set.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from typing import Generic, TypeVar

from splitserve.store.base import Policy

HALF_LIFE_S = 3600.0
BETWEEN_S = 1e-6
"""Between the scores of neighbours in a batch, the leading one's the larger: without its head a
prefix is worth nothing, so its tail is evicted first."""

_COMPACT_ABOVE = 1024

K = TypeVar("K")


def used(policy: Policy, score_s: float, now_s: float) -> float:
    """The score of a block after a use; never less than before."""
    high, low = max(score_s, now_s), min(score_s, now_s)
    if policy is Policy.LRU:
        return high
    return high + HALF_LIFE_S * math.log2(1 + 2 ** ((low - high) / HALF_LIFE_S))


class Victims(Generic[K]):
    """Keys by their score. As scores only grow, one that is out of date is a lower bound: it is
    looked up anew when it comes first. score_of: the score now, None if the key is gone."""

    def __init__(self, score_of: Callable[[K], float | None]) -> None:
        self._score_of = score_of
        self._heap: list[tuple[float, K]] = []

    def __len__(self) -> int:
        """Of entries, including those that are gone and not noticed yet."""
        return len(self._heap)

    def add(self, key: K, score: float) -> None:
        heapq.heappush(self._heap, (score, key))

    def pop(self) -> K | None:
        """Take out the key of the least score; None if there is none."""
        while self._heap:
            score, key = heapq.heappop(self._heap)
            now = self._score_of(key)
            if now is None:
                continue
            if now <= score:
                return key
            self.add(key, now)
        return None

    def compact(self, num_live: int) -> None:
        """Drop those that are gone, if they are most."""
        if len(self._heap) > 2 * num_live + _COMPACT_ABOVE:
            keys = {key for _, key in self._heap}
            scores = ((self._score_of(key), key) for key in keys)
            self._heap = [(score, key) for score, key in scores if score is not None]
            heapq.heapify(self._heap)
