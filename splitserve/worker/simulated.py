"""The hosted model that computes nothing but notices wrong KV: processes, wire and transfers are
real, so what surrounds the model can be tested in milliseconds."""

from __future__ import annotations

import time
from pathlib import Path

from splitserve.engine.step import StepPlan
from splitserve.kv.format import KVFormat, ModelIdentity
from splitserve.model.info import describe
from splitserve.model.simulated import SimulatedRunner, simulated_format
from splitserve.transport.segment import Segment
from splitserve.worker.main import MadeRunner
from splitserve.worker.spec import ModelSpec, WorkerSpec


class SimulatedModel:
    """Implements `worker.main.HostedModel`; a step lasts step_s + token_s x its tokens."""

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self._info = describe(Path(spec.path))

    @property
    def identity(self) -> ModelIdentity:
        return self._info.identity

    @property
    def max_model_len(self) -> int:
        return self._info.max_model_len

    @property
    def vocab_size(self) -> int:
        return self._info.vocab_size

    def kv_format(self, block_size: int) -> KVFormat:
        return simulated_format(block_size)

    def make_runner(self, segment: Segment, spec: WorkerSpec) -> MadeRunner:
        def duration_s(plan: StepPlan) -> float:
            return self._spec.step_s + self._spec.token_s * plan.num_tokens

        runner = SimulatedRunner(
            segment.blocks,
            spec.block_size,
            self._info.vocab_size,
            duration_s=duration_s,
            spend=time.sleep,
        )
        return MadeRunner(runner, 1 if spec.exact else None)
