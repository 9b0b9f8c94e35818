"""The two values that cross the border between control and data: a step's plan and its result."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from splitserve.kv.format import KVFormat
from splitserve.sampling import Logprobs, Sampling


@dataclass(frozen=True, slots=True)
class Draw:
    """Sample one token from the logits of an item's last position.

    A pure function of these fields and the logits (design 3.9). The output index of the token drawn
    is len(output_ids).
    """

    sampling: Sampling
    prompt_ids: list[int]
    output_ids: list[int]


@dataclass(frozen=True, slots=True)
class PlanItem:
    """Part of one sequence in a step: compute positions [start, start + len(token_ids)).

    block_ids is the sequence's block table and covers at least that range: position p lives in
    block block_ids[p // block_size], slot p % block_size. KV of positions below start is there.
    """

    request_id: str
    token_ids: list[int]
    start: int
    block_ids: list[int]
    draw: Draw | None


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One forward pass. `items` hold at least one token in all; a request appears at most once."""

    items: list[PlanItem] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(len(item.token_ids) for item in self.items)

    @property
    def context(self) -> int:
        """Summed over the tokens: positions that each attends to."""
        total = 0
        for item in self.items:
            size = len(item.token_ids)
            total += size * item.start + size * (size + 1) // 2
        return total


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gave: per item of the plan, in its order, the token drawn or None.

    logprobs: per item too, None where not asked for; may be empty if nobody asked.
    """

    token_ids: list[int | None]
    logprobs: list[Logprobs | None] = field(default_factory=list)

    def items(self) -> Iterator[tuple[int | None, Logprobs | None]]:
        """(token, logprobs) per item of the plan."""
        return itertools.zip_longest(self.token_ids, self.logprobs)


OnLayer = Callable[[int], None]
"""Told the index of each layer when the KV that a step writes in it is in the pool, in the middle
of the step, on the thread that computes: it must return at once."""


class Runner(Protocol):
    """Executes plans: `model.runner.TorchRunner` or `model.simulated.SimulatedRunner`."""

    @property
    def kv_format(self) -> KVFormat: ...

    def execute(self, plan: StepPlan, on_layer: OnLayer | None = None) -> StepResult: ...
