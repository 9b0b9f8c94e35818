"""Filter, score, pick: which worker takes a leg, or which two take a split request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from splitserve.router.fleet import ROLES, Fleet, Floats, Ints
from splitserve.router.policies import make_policy
from splitserve.router.policy import Ask
from splitserve.router.prefix_index import PrefixIndex
from splitserve.router.slots import Slots
from splitserve.wire import Leg, Role

SILENT_S = 3.0  # an idle engine loop is heard every 0.25 s; a long step may take longer than this
NUM_PAIRED = 8  # the best of each side, of which all pairs are scored
NUM_EXPLAINED = 4

ROLES_FOR_LEG: dict[Leg, tuple[Role, Role]] = {
    Leg.PREFILL: (Role.PREFILL, Role.MIXED),
    Leg.DECODE: (Role.DECODE, Role.MIXED),
    Leg.WHOLE: (Role.MIXED, Role.DECODE),
}
"""Roles that may take a leg, the preferred one first; the other is used if no such worker lives."""


@dataclass(frozen=True, slots=True)
class Pick:
    """The chosen worker, its score, and why."""

    worker_id: str
    score: float
    reason: str


@dataclass(frozen=True, slots=True)
class PickedPair:
    """Two workers for a split request. score: of both; it is the policy's."""

    prefill: str
    decode: str
    score: float
    reason: str


class Router:
    """Over one fleet and its prefix index. The event loop's."""

    def __init__(self, policy: str = "cost") -> None:
        """Raise ConfigError for an unknown policy."""
        slots = Slots()
        self.fleet = Fleet(slots)
        self.index = PrefixIndex(slots)
        self.policy = make_policy(policy, self.fleet)

    def has(self, *roles: Role) -> bool:
        """Whether a worker of one of the roles takes new legs."""
        numbers = [ROLES.index(role) for role in roles]
        fleet = self.fleet
        return bool((fleet.live & ~fleet.draining & np.isin(fleet.role, numbers)).any())

    def hits(self, granules: Sequence[bytes], granule: int) -> Floats:
        """[slots] leading tokens that each worker's cache has. granules: keys of all full granules
        of a prompt, shortened as workers tell them; granule: its tokens."""
        fleet = self.fleet
        hits = np.zeros(len(fleet.live))
        if not len(self.index):
            return hits
        for size in fleet.block_sizes:
            per_block = size // granule
            for slot, num in self.index.leading_slots(granules[per_block - 1 :: per_block]):
                if len(fleet.block_sizes) == 1 or fleet.block_size[slot] == size:
                    hits[slot] = num * size
        return hits

    def eligible(self, leg: Leg, ask: Ask) -> Ints:
        """Slots of the preferred role, or, if it has nobody, of the other one: of those that were
        heard lately and are not to be avoided; if there are none, that were heard lately; else of
        all. Of them those near, if any."""
        fleet = self.fleet
        takes = fleet.live & ~fleet.draining
        heard = takes & (fleet.heard_s >= ask.now_s - SILENT_S)
        slots: Ints = np.zeros(0, np.int64)
        if ask.avoid:
            others = heard.copy()
            others[[x for x in map(fleet.slots.get, ask.avoid) if x is not None]] = False
            slots = self._of_role(leg, others)
        for mask in (heard, takes):
            if not len(slots):
                slots = self._of_role(leg, mask)
        if ask.near:
            is_near = np.array([name in ask.near for name in fleet.names(slots)], dtype=bool)
            slots = slots[is_near] if is_near.any() else slots
        return slots

    def pick(self, leg: Leg, ask: Ask) -> Pick | None:
        """None if nobody can take the leg."""
        slots = self.eligible(leg, ask)
        if not len(slots):
            return None
        scores = self.policy.score(leg, slots, ask)
        best = self._best(slots, scores, 1)[0]
        slot = int(slots[best])
        self.policy.note_picked(slot)
        worker_id = self.fleet.slots.name(slot)
        return Pick(
            worker_id,
            float(scores[best]),
            f"{leg.value} on {worker_id}: {self._explain(slots, scores)}",
        )

    def pick_pair(self, ask: Ask) -> PickedPair | None:
        """Who prefills and who decodes; None if a side has nobody. Nothing is noted: each leg is
        picked when it is sent."""
        prefill, decode = self.eligible(Leg.PREFILL, ask), self.eligible(Leg.DECODE, ask)
        if not (len(prefill) and len(decode)):
            return None
        prefill, first_scores = self._nearest(Leg.PREFILL, prefill, ask)
        decode, second_scores = self._nearest(Leg.DECODE, decode, ask)
        scores = first_scores[:, None] + second_scores[None, :]
        scores += self.policy.between(prefill, decode, ask)
        row, column = divmod(int(scores.argmin()), len(decode))
        first, second = self.fleet.names(np.array([prefill[row], decode[column]]))
        score = float(scores[row, column])
        unit = self.policy.unit
        return PickedPair(first, second, score, f"{first} and {second}: {score:.3f}{unit}")

    # --- inside

    def _nearest(self, leg: Leg, slots: Ints, ask: Ask) -> tuple[Ints, Floats]:
        """The best few, with their scores."""
        scores = self.policy.score(leg, slots, ask)
        best = self._best(slots, scores, NUM_PAIRED)[:NUM_PAIRED]
        return slots[best], scores[best]

    def _best(self, slots: Ints, scores: Floats, num: int) -> Ints:
        """Positions of the num lowest scores, the lowest first; of equal ones by name."""
        if num == 1:
            best = np.flatnonzero(scores == scores.min())
            if len(best) > 1:
                names = self.fleet.names(slots[best])
                best = best[[names.index(min(names))]]
            return best[:1]
        if len(scores) > num:
            chosen = np.argpartition(scores, num)[:num]
        else:
            chosen = np.arange(len(scores))
        result: Ints = chosen[np.argsort(scores[chosen], kind="stable")]
        return result

    def _of_role(self, leg: Leg, takes: npt.NDArray[np.bool_]) -> Ints:
        """Of those who take legs, the ones of the first role that has any."""
        for role in ROLES_FOR_LEG[leg]:
            slots: Ints = np.flatnonzero(takes & (self.fleet.role == ROLES.index(role)))
            if len(slots):
                break
        return slots

    def _explain(self, slots: Ints, scores: Floats) -> str:
        shown = self._best(slots, scores, NUM_EXPLAINED)[:NUM_EXPLAINED]
        unit = self.policy.unit
        parts = [
            f"{name} {scores[i]:.3g}{unit}"
            for name, i in zip(self.fleet.names(slots[shown]), shown, strict=True)
        ]
        more = len(slots) - len(shown)
        return f"{self.policy.name} {', '.join(parts)}" + (f" and {more} more" if more else "")
