"""The hosted model that computes: loaded once in the zygote, run in each worker."""

from __future__ import annotations

from pathlib import Path

import torch

from splitserve.engine.step import Draw, PlanItem, StepPlan
from splitserve.kv.format import KVFormat, ModelIdentity
from splitserve.model import loader
from splitserve.model.device import require_device
from splitserve.model.runner import TorchRunner
from splitserve.sampling import Sampling
from splitserve.transport.segment import Segment
from splitserve.worker.main import MadeRunner
from splitserve.worker.spec import ModelSpec, WorkerSpec


class NativeModel:
    """Implements `worker.main.HostedModel` with a Hugging Face model."""

    def __init__(self, spec: ModelSpec) -> None:
        torch.set_num_threads(1)  # an OpenMP pool made before the fork would hang in the child
        require_device(spec.device)
        self._device = spec.device
        by_torch = spec.device != "cpu"
        self._loaded = loader.load(Path(spec.path), spec.dtype, by_torch=by_torch)
        if spec.quantize:
            self._loaded.packing.quantize()

    @property
    def identity(self) -> ModelIdentity:
        return self._loaded.identity

    @property
    def max_model_len(self) -> int:
        return self._loaded.max_model_len

    @property
    def vocab_size(self) -> int:
        return self._loaded.vocab_size

    def kv_format(self, block_size: int) -> KVFormat:
        return self._loaded.kv_format(block_size)

    def make_runner(self, segment: Segment, spec: WorkerSpec) -> MadeRunner:
        loaded = self._loaded.on(self._device)
        runner = TorchRunner(loaded, segment.blocks, spec.block_size, spec.exact, spec.num_threads)
        loaded.packing.int8 = spec.weights == "int8"
        _warm_up(runner, spec.block_size)
        rows = runner.min_rows if spec.exact else None
        return MadeRunner(runner, rows, runner.device_pool)


def _warm_up(runner: TorchRunner, block_size: int) -> None:
    """Touch weights, libraries and kernels, so that the first request does not pay for it. The KV
    it leaves in two blocks is read by nobody: they are free."""
    blocks = [0, 1]
    prompt = StepPlan([PlanItem("warm-up", [0] * block_size, 0, blocks, None)])
    draw = Draw(Sampling(seed=0, max_tokens=1, temperature=0.0), [0], [])
    decode = StepPlan([PlanItem("warm-up", [0], block_size, blocks, draw)])
    for plan in (prompt, decode):
        runner.execute(plan)
