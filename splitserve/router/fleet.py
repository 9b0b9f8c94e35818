"""What the router knows of all workers: a column per fact, a row (slot) per worker.

Rows are written when something is heard or sent, so that a pick reads arrays instead of visiting
workers.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from splitserve.latency.model import KNOTS, StepModel, segment_of, segments
from splitserve.router.slots import Slots
from splitserve.wire import Role, View

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

ROLES = (Role.PREFILL, Role.DECODE, Role.MIXED)
_FIRST_CAPACITY = 16


class Fleet:
    """All arrays are [capacity], rows of slots that nobody has are not `live`.

    legs: legs that have not ended; pending: prompt tokens handed over and not yet known to be
    computed. Both are the gateway's own count, newer than a view. The step model of each: base and
    slope [capacity, segments], context_s.
    """

    def __init__(self, slots: Slots | None = None) -> None:
        self.slots = Slots() if slots is None else slots
        self.block_sizes: list[int] = []  # of those that live
        num = _FIRST_CAPACITY
        self.live = np.zeros(num, bool)
        self.draining = np.zeros(num, bool)
        self.role = np.zeros(num, np.int64)
        self.heard_s = np.zeros(num)
        self.legs = np.zeros(num)
        self.pending = np.zeros(num)
        self.free_blocks = np.zeros(num)
        self.num_blocks = np.ones(num)
        self.block_size = np.full(num, 16.0)
        self.budget = np.full(num, 256.0)
        self.context = np.zeros(num)
        self.running = np.zeros(num)
        self.picked = np.zeros(num)  # when the slot was picked last, as a running number
        self.base = np.ones((num, len(KNOTS) - 1))
        self.slope = np.zeros((num, len(KNOTS) - 1))
        self.context_s = np.zeros(num)
        self.token_s = np.ones(num)  # of a prompt in full steps, without attention

    def __len__(self) -> int:
        return int(self.live.sum())

    def add(
        self,
        worker_id: str,
        role: Role,
        now_s: float,
        *,
        num_blocks: int,
        block_size: int,
        budget: int,
        model: StepModel,
    ) -> int:
        """A worker is there; returns its slot. budget: tokens per step."""
        slot = self.slots.give(worker_id)
        self._grow(slot + 1)
        self.live[slot], self.draining[slot] = True, False
        self.role[slot] = ROLES.index(role)
        self.heard_s[slot] = now_s
        self.legs[slot] = self.pending[slot] = self.context[slot] = self.running[slot] = 0.0
        self.free_blocks[slot] = self.num_blocks[slot] = num_blocks
        self.block_size[slot], self.budget[slot] = block_size, budget
        self.picked[slot] = 0.0
        self.set_model(slot, model)
        self._note_sizes()
        return slot

    def remove(self, worker_id: str) -> None:
        """The worker is gone. Whoever else goes by its slot has to be told before."""
        slot = self.slots.get(worker_id)
        if slot is not None:
            self.live[slot] = False
            self.slots.free(worker_id)
            self._note_sizes()

    def set_view(self, slot: int, view: View, now_s: float) -> None:
        self.heard_s[slot] = now_s
        self.free_blocks[slot] = view.free_blocks
        self.context[slot] = view.context_tokens
        self.running[slot] = view.running

    def set_model(self, slot: int, model: StepModel) -> None:
        budget = float(self.budget[slot])
        self.base[slot], self.slope[slot] = segments(model.knot_s)
        self.context_s[slot] = model.context_s
        self.token_s[slot] = model.predict(budget, 0.0) / budget

    def step_s(self, slots: Ints, num_tokens: Floats, context: Floats | float) -> Floats:
        """[len(slots)] predicted seconds of a step on each, by its model."""
        place = slots * (len(KNOTS) - 1) + segment_of(num_tokens)
        result: Floats = self.base.take(place)
        result += self.slope.take(place) * num_tokens
        result += self.context_s[slots] * context
        return result

    def set_role(self, slot: int, role: Role) -> None:
        self.role[slot] = ROLES.index(role)

    def names(self, slots: Ints) -> list[str]:
        return [self.slots.name(int(slot)) for slot in slots]

    def _note_sizes(self) -> None:
        self.block_sizes = sorted({int(x) for x in self.block_size[self.live]})

    def _grow(self, num: int) -> None:
        capacity = len(self.live)
        if num <= capacity:
            return
        for name, column in list(vars(self).items()):
            if isinstance(column, np.ndarray):
                more = np.zeros((max(capacity, num - capacity), *column.shape[1:]), column.dtype)
                setattr(self, name, np.concatenate([column, more]))
