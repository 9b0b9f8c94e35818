"""A runner that computes nothing, yet notices wrong KV: for tests of scheduling, and the simulator.

The KV of a position is a 64-bit hash of the tokens up to it. It lies in the pool as a real pool's
KV does (one layer, one head, one dimension: K is the low half, V the high half), so that
transports move it for real. The token drawn depends on that hash, and whenever a draw tells what
came before, all KV below `start` is compared with what it must be. A wrong block, a stale block, a
block at the wrong place in the table or one that was never filled is a WorkerFault.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from splitserve.engine.step import Draw, OnLayer, PlanItem, StepPlan, StepResult
from splitserve.errors import ConfigError, WorkerFault
from splitserve.kv.format import KVFormat

Hashes = npt.NDArray[np.uint64]

_UINT64 = 2**64 - 1


def simulated_format(block_size: int) -> KVFormat:
    """8 bytes per token."""
    return KVFormat(
        dtype="float32", block_size=block_size, num_layers=1, num_kv_heads=1, head_dim=1
    )


def prefix_hashes(tokens: Sequence[int], start: int = 0, before: int = 0) -> Hashes:
    """The hash of each prefix that ends with one of `tokens`, at positions from `start` on.

    `before` is the hash of the prefix ending at start - 1, 0 if start is 0. A prefix's hash is the
    sum, modulo 2^64, of a mixture of each (token, position): it can be had for all at once.
    """
    positions = np.arange(start, start + len(tokens), dtype=np.uint64)
    mixed = _mix(np.asarray(tokens, dtype=np.uint64) + np.uint64(1) + (positions << np.uint64(32)))
    return np.cumsum(mixed, dtype=np.uint64) + np.uint64(before)


def next_token(prefix_hash: int, draw: Draw, vocab_size: int) -> int:
    """The token after a prefix: a function of the prefix, and of the seed unless it is greedy."""
    salt = 0
    if draw.sampling.temperature > 0:
        salt = (draw.sampling.seed * 31 + draw.sampling.choice + 1) & _UINT64
    mixed = _mix(np.array([prefix_hash ^ salt], dtype=np.uint64))
    return int(mixed[0] % np.uint64(vocab_size))


class SimulatedRunner:
    """Implements `engine.step.Runner`.

    blocks: uint8 [num_blocks, block_bytes] of `simulated_format(block_size)`, writable.
    duration_s: how long a step takes; `spend` is then called with it: ManualClock.advance, or
        time.sleep in a process that should behave like a slow worker.
    verify: compare all KV with what it must be, whenever that is known: O(context) per draw.
    """

    def __init__(
        self,
        blocks: npt.NDArray[np.uint8],
        block_size: int,
        vocab_size: int = 512,
        *,
        duration_s: Callable[[StepPlan], float] | None = None,
        spend: Callable[[float], None] | None = None,
        verify: bool = True,
    ) -> None:
        if (duration_s is None) != (spend is None):
            raise ConfigError("A simulated duration needs something that spends it.")
        self.kv_format = simulated_format(block_size)
        if blocks.ndim != 2 or blocks.shape[1] != self.kv_format.block_bytes:
            raise ConfigError(f"Simulated blocks must have {self.kv_format.block_bytes} bytes.")
        self._halves = blocks.view(np.uint32).reshape(len(blocks), 2, block_size)
        self._vocab_size = vocab_size
        self._duration_s = duration_s
        self._spend = spend
        self._verify = verify

    def execute(self, plan: StepPlan, on_layer: OnLayer | None = None) -> StepResult:
        """Write the hashes of the plan's tokens; draw where asked."""
        drawn = [self._compute(item) for item in plan.items]
        if on_layer is not None:
            on_layer(0)
        if self._duration_s is not None and self._spend is not None:
            self._spend(self._duration_s(plan))
        return StepResult(drawn)

    def _compute(self, item: PlanItem) -> int | None:
        start, end = item.start, item.start + len(item.token_ids)
        self._check_shape(item, end)
        before = int(self._read(item, start - 1, start)[0]) if start else 0
        if start and not before:
            raise WorkerFault(_wrong(item, start - 1, "it was never written"))
        if item.draw is not None and self._verify:
            self._check_kv(item, [*item.draw.prompt_ids, *item.draw.output_ids])
        hashes = prefix_hashes(item.token_ids, start, before)
        blocks, slots = self._places(item, start, end)
        self._halves[blocks, 0, slots] = (hashes & np.uint64(0xFFFFFFFF)).astype(np.uint32)
        self._halves[blocks, 1, slots] = (hashes >> np.uint64(32)).astype(np.uint32)
        if item.draw is None:
            return None
        return next_token(int(hashes[-1]), item.draw, self._vocab_size)

    def _check_shape(self, item: PlanItem, end: int) -> None:
        covered = len(item.block_ids) * self.kv_format.block_size
        if not item.token_ids or covered < end:
            raise WorkerFault(f"Request {item.request_id}: {covered} slots for {end} positions.")
        if not 0 <= min(item.block_ids) <= max(item.block_ids) < len(self._halves):
            raise WorkerFault(f"Request {item.request_id} names a block outside the pool.")
        if len(set(item.block_ids)) != len(item.block_ids):
            raise WorkerFault(f"Request {item.request_id} has a block twice in its table.")

    def _check_kv(self, item: PlanItem, tokens: list[int]) -> None:
        """Compare what lies below `start` with the hashes of the tokens that came before."""
        end = item.start + len(item.token_ids)
        if len(tokens) != end or tokens[item.start :] != item.token_ids:
            raise WorkerFault(
                f"Request {item.request_id} draws after position {end - 1}, with other tokens "
                f"than the {len(tokens)} of its prompt and output."
            )
        found = self._read(item, 0, item.start)
        wrong = np.flatnonzero(found != prefix_hashes(tokens[: item.start]))
        if len(wrong):
            raise WorkerFault(_wrong(item, int(wrong[0]), f"{len(wrong)} positions differ"))

    def _places(
        self, item: PlanItem, start: int, end: int
    ) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
        positions = np.arange(start, end)
        size = self.kv_format.block_size
        return np.asarray(item.block_ids, dtype=np.intp)[positions // size], positions % size

    def _read(self, item: PlanItem, start: int, end: int) -> Hashes:
        blocks, slots = self._places(item, start, end)
        low = self._halves[blocks, 0, slots].astype(np.uint64)
        high = self._halves[blocks, 1, slots].astype(np.uint64)
        found: Hashes = low | (high << np.uint64(32))
        return found


def _wrong(item: PlanItem, position: int, why: str) -> str:
    return f"Request {item.request_id}: wrong KV at position {position}: {why}."


def _mix(values: Hashes) -> Hashes:
    """splitmix64's finalizer (Steele et al. 2014)."""
    mixed = values + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
