"""Policies that look at one thing."""

from __future__ import annotations

import numpy as np

from splitserve.router.fleet import Fleet, Floats, Ints
from splitserve.router.policy import Ask, Policy
from splitserve.wire import Leg


class RoundRobin(Policy):
    """Who was picked longest ago."""

    name = "round_robin"

    def __init__(self, fleet: Fleet) -> None:
        super().__init__(fleet)
        self._number = 0.0

    def score(self, leg: Leg, slots: Ints, ask: Ask) -> Floats:
        result: Floats = self.fleet.picked[slots]
        return result

    def note_picked(self, slot: int) -> None:
        self._number += 1.0
        self.fleet.picked[slot] = self._number


class LeastLoaded(Policy):
    """Prefill: the fewest prompt tokens ahead in line. Decode and whole: the fewest legs, then the
    emptiest pool."""

    name = "least_loaded"

    def score(self, leg: Leg, slots: Ints, ask: Ask) -> Floats:
        fleet = self.fleet
        result: Floats
        if leg is Leg.PREFILL:
            result = fleet.pending[slots] + fleet.legs[slots] * 1e-3
        else:
            full = 1.0 - fleet.free_blocks[slots] / np.maximum(fleet.num_blocks[slots], 1.0)
            result = fleet.legs[slots] + 0.5 * full + fleet.pending[slots] * 1e-3
        return result


class PrefixAware(LeastLoaded):
    """Who has most of the prompt in its cache, unless more tokens wait there than at the least
    loaded one plus IMBALANCE_TOKENS; decode as least_loaded."""

    name = "prefix_aware"
    by_prefix = True
    IMBALANCE_TOKENS = 2048.0

    def score(self, leg: Leg, slots: Ints, ask: Ask) -> Floats:
        load = super().score(leg, slots, ask)
        if leg is Leg.DECODE:
            return load
        pending = self.fleet.pending[slots]
        is_free = pending <= pending.min() + self.IMBALANCE_TOKENS
        hits = np.where(is_free, ask.hits_at(slots), 0.0)
        tiny = load / (1.0 + load.max())  # below one granule: it only breaks ties
        result: Floats = tiny - hits
        return result
