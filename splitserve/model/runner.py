"""The runner that computes: a Hugging Face model on the paged KV pool, then the sampler."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from splitserve.engine.step import OnLayer, PlanItem, StepPlan, StepResult
from splitserve.errors import ConfigError, DeviceLost, WorkerFault
from splitserve.kv.format import KVFormat
from splitserve.model.adjust import adjusted
from splitserve.model.device_pool import DevicePool
from splitserve.model.exact import invariant_rows
from splitserve.model.forward import Forward
from splitserve.model.loader import LoadedModel
from splitserve.model.logprobs import logprobs
from splitserve.model.sampling import draw
from splitserve.sampling import Logprobs

NOT_EXACT = "Exact mode is for float32 on the CPU: elsewhere the order of sums is torch's."


class TorchRunner:
    """Executes step plans, on the CPU unless the model was moved; draws on the CPU, in float32.

    blocks: uint8 [num_blocks, block_bytes], writable; its bytes are KV in `kv_format`, or where
    KV passes on its way to and from a device (see `DevicePool`).
    exact: outputs do not depend, by a bit, on what shares a step or on how a prompt is cut.
    num_threads: of torch (a setting of the whole process) and of the attention kernel.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        blocks: npt.NDArray[np.uint8],
        block_size: int,
        exact: bool = False,
        num_threads: int = 1,
    ) -> None:
        if exact and loaded.by_torch:
            raise ConfigError(NOT_EXACT)
        torch.set_num_threads(num_threads)
        loaded.packing.use_threads(num_threads)
        self.exact = exact
        self._forward = Forward(
            loaded,
            blocks,
            block_size,
            min_rows=invariant_rows(loaded, num_threads) if exact else 1,
            torch_attention=not exact,
            num_threads=num_threads,
        )

    @property
    def kv_format(self) -> KVFormat:
        return self._forward.kv_format

    @property
    def device_pool(self) -> DevicePool | None:
        """What stages KV between the blocks and a device; None where the blocks are the pool."""
        pool = self._forward.device_pool
        return pool if pool is not None and pool.is_staged else None

    @property
    def min_rows(self) -> int:
        """Rows that a forward pass is padded to."""
        return self._forward.min_rows

    def execute(self, plan: StepPlan, on_layer: OnLayer | None = None) -> StepResult:
        """Compute the plan and draw a token for each item that asks for one.

        on_layer: not with a staged pool, whose KV reaches the blocks only when it is sealed.

        Raises DeviceLost when a device fails: no later step in this process could succeed.
        """
        try:
            rows = iter(self._forward.logits(plan, on_layer))
        except torch.AcceleratorError as error:
            raise DeviceLost(f"The device failed: {error}") from error
        drawn = [_draw(item, next(rows)) if item.draw else (None, None) for item in plan.items]
        return StepResult([token_id for token_id, _ in drawn], [told for _, told in drawn])


def _draw(item: PlanItem, logits: npt.NDArray[np.float32]) -> tuple[int, Logprobs | None]:
    assert item.draw is not None
    try:
        wanted = item.draw
        row = adjusted(logits, wanted.sampling, wanted.prompt_ids, wanted.output_ids)
        token_id = draw(row, wanted.sampling, len(wanted.output_ids))
    except WorkerFault as fault:
        raise WorkerFault(f"Request {item.request_id}: {fault.message}") from fault
    num_top = wanted.sampling.logprobs
    return token_id, None if num_top is None else logprobs(logits, token_id, num_top)
