"""Which other workers have leading blocks of a prompt, and whether to fetch them (design §4)."""

from __future__ import annotations

from collections.abc import Sequence

from splitserve import wire
from splitserve.gateway.hub import WorkerHandle, WorkerHub
from splitserve.gateway.prompt_keys import PromptKeys

MAX_HINTS = 3
ASK_S = 5e-3  # what it takes to ask, on top of half a step of the one that is asked
SILENT_S = 1.0  # who was not heard for so long would hold up the asking leg


class Hints:
    """Of one request."""

    def __init__(self, hub: WorkerHub, keys: PromptKeys) -> None:
        self._hub = hub
        self._keys = keys

    def make(self, worker_id: str, token_ids: Sequence[int], now_s: float) -> list[wire.Hint]:
        """For a leg on a worker, the best first: those that have more of its leading blocks, if to
        fetch them is predicted to take less time than to compute them."""
        hub = self._hub
        target = hub.workers.get(worker_id)
        if target is None or not len(hub.index):
            return []
        keys = self._keys.blocks(token_ids, target.hello.format.block_size)
        lengths = hub.index.leading(keys)
        here = lengths.get(worker_id, 0)
        hints = [
            self._hint(target, hub.workers[other], num, num - here)
            for other, num in lengths.items()
            if num > here and self._can_ask(target, hub.workers.get(other), now_s)
        ]
        hints = [hint for hint in hints if hint.fetch_s < hint.recompute_s]
        hints.sort(key=lambda hint: (-hint.num_blocks, hint.fetch_s, hint.worker_id))
        return hints[:MAX_HINTS]

    def note_failed(self, failed: wire.HintFailed, token_ids: Sequence[int]) -> None:
        """Correct the index: the hinted worker has fewer blocks."""
        handle = self._hub.workers.get(failed.worker_id)
        self._hub.num_hints_failed += 1
        if handle is not None and handle.hello.epoch == failed.epoch:
            keys = self._keys.blocks(token_ids, handle.hello.format.block_size)
            gone = keys[failed.num_blocks : failed.num_hinted]
            self._hub.index.remove(failed.worker_id, gone)

    @staticmethod
    def _can_ask(target: WorkerHandle, other: WorkerHandle | None, now_s: float) -> bool:
        return (
            other is not None
            and other.hello.format == target.hello.format
            and now_s - other.last_frame_s < SILENT_S
        )

    def _hint(
        self, target: WorkerHandle, other: WorkerHandle, num_blocks: int, num_lacked: int
    ) -> wire.Hint:
        kv_format, rates = target.hello.format, self._hub.rates
        step_s = other.step_s / max(1, other.num_frames)
        return wire.Hint(
            other.hello.worker_id,
            other.hello.epoch,
            other.hello.address,
            num_blocks,
            fetch_s=num_lacked * kv_format.block_bytes / rates.transfer_bytes_per_s
            + ASK_S
            + step_s / 2,
            recompute_s=num_lacked * kv_format.block_size / rates.prefill_tokens_per_s,
        )
