"""The hosted model that computes: loaded once in the zygote, run in each worker."""

from __future__ import annotations

from pathlib import Path

import torch

from splitserve.engine.step import Runner
from splitserve.kv.format import KVFormat, ModelIdentity
from splitserve.model import loader
from splitserve.model.runner import TorchRunner
from splitserve.transport.segment import Segment
from splitserve.worker.spec import ModelSpec, WorkerSpec


class NativeModel:
    """Implements `worker.main.HostedModel` with a Hugging Face model."""

    def __init__(self, spec: ModelSpec) -> None:
        torch.set_num_threads(1)  # an OpenMP pool made before the fork would hang in the child
        self._loaded = loader.load(Path(spec.path))

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

    def make_runner(self, segment: Segment, spec: WorkerSpec) -> tuple[Runner, int | None]:
        runner = TorchRunner(
            self._loaded, segment.blocks, spec.block_size, spec.exact, spec.num_threads
        )
        return runner, runner.min_rows if spec.exact else None
