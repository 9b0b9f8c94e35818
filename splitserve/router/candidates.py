"""What the router knows of a worker when it picks."""

from __future__ import annotations

from dataclasses import dataclass

from splitserve.wire import Leg, Role, View


@dataclass(frozen=True, slots=True)
class Candidate:
    """A live worker: its role, its last view, and what the gateway has sent it since.

    pending_tokens: prompt tokens handed over and not yet known to be computed; num_legs: legs that
    have not ended. Both are the gateway's own count, newer than the view. silent_s: since the last
    frame of its engine loop.
    """

    worker_id: str
    role: Role
    view: View
    num_legs: int
    pending_tokens: int
    num_blocks: int
    silent_s: float = 0.0


ROLES_FOR_LEG: dict[Leg, tuple[Role, Role]] = {
    Leg.PREFILL: (Role.PREFILL, Role.MIXED),
    Leg.DECODE: (Role.DECODE, Role.MIXED),
    Leg.WHOLE: (Role.MIXED, Role.DECODE),
}
"""Roles that may take a leg, the preferred one first; the other is used if no such worker lives."""
