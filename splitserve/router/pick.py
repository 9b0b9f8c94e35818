"""Filter, score, pick: which worker takes a leg. Pure; the pick explains itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from splitserve.router.candidates import ROLES_FOR_LEG, Candidate
from splitserve.wire import Leg

SILENT_S = 3.0  # an idle engine loop is heard every 0.25 s; a long step may take longer than this


@dataclass(frozen=True, slots=True)
class Pick:
    """The chosen worker and why."""

    worker_id: str
    reason: str


def eligible(leg: Leg, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Those of the preferred role, or, if none lives, of the other one; of them those that were
    heard lately, if any."""
    for role in ROLES_FOR_LEG[leg]:
        kept = [candidate for candidate in candidates if candidate.role is role]
        if kept:
            return [candidate for candidate in kept if candidate.silent_s <= SILENT_S] or kept
    return []


def load_scores(leg: Leg, candidates: Sequence[Candidate]) -> npt.NDArray[np.float64]:
    """[n] load of each candidate for this leg; lower is better.

    Prefill: prompt tokens ahead in line. Decode and whole: legs running there, then how full its
    pool is.
    """
    tokens = np.array([c.pending_tokens for c in candidates], dtype=np.float64)
    legs = np.array([c.num_legs for c in candidates], dtype=np.float64)
    if leg is Leg.PREFILL:
        return tokens + legs * 1e-3
    free = np.array([c.view.free_blocks for c in candidates], dtype=np.float64)
    total = np.array([max(1, c.num_blocks) for c in candidates], dtype=np.float64)
    return legs + (1.0 - free / total) * 0.5 + tokens * 1e-3


def pick(leg: Leg, candidates: Sequence[Candidate]) -> Pick | None:
    """The least loaded eligible worker; ties go to the lowest id. None if there is none."""
    kept = sorted(eligible(leg, candidates), key=lambda candidate: candidate.worker_id)
    if not kept:
        return None
    scores = load_scores(leg, kept)
    best = int(np.argmin(scores))
    others = ", ".join(f"{c.worker_id} {s:.2f}" for c, s in zip(kept, scores, strict=True))
    return Pick(kept[best].worker_id, f"{leg.value} on {kept[best].worker_id}: load {others}")
