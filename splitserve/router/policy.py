"""What a routing policy is.

A policy scores workers for a leg; the lowest score takes it. `docs/routing.md` adds one as an
example. Policies see only candidates that passed the filters, as rows of the fleet's columns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from splitserve.router.fleet import Fleet, Floats, Ints
from splitserve.wire import Leg


@dataclass(slots=True)
class Ask:
    """A leg, or a whole request, that is to be placed.

    num_output: tokens that are expected to come. hits: [slots] leading tokens that each worker's
    cache has. avoid: workers not to take, if others can. near: workers to prefer to all others.
    bytes_per_token of KV; transfer_bytes_per_s between workers. mean_output: of answers lately.
    """

    num_tokens: int
    now_s: float
    num_output: float = 128.0
    hits: Floats = field(default_factory=lambda: np.zeros(0))
    avoid: frozenset[str] = frozenset()
    near: frozenset[str] = frozenset()
    bytes_per_token: float = 0.0
    transfer_bytes_per_s: float = 1e9
    mean_output: float = 128.0

    def hits_at(self, slots: Ints) -> Floats:
        if not len(self.hits):
            return np.zeros(len(slots))
        result: Floats = self.hits[slots]
        return result


class Policy(ABC):
    """One instance per gateway: it may remember. Not thread-safe, must not block."""

    name: ClassVar[str]
    unit: ClassVar[str] = ""  # of its scores, as an explanation shows them
    by_prefix: ClassVar[bool] = False  # whether it needs `Ask.hits`

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet

    @abstractmethod
    def score(self, leg: Leg, slots: Ints, ask: Ask) -> Floats:
        """[len(slots)]; the lowest takes the leg, ties go to the first worker by name."""

    def between(self, prefill: Ints, decode: Ints, ask: Ask) -> Floats | float:
        """[len(prefill), len(decode)]: what a pair costs beyond the scores of its two legs."""
        return 0.0

    def note_picked(self, slot: int) -> None:  # noqa: B027
        """A leg goes there."""
