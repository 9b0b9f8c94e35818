"""Loading a Hugging Face model for the paged pool, from a local directory and nowhere else."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from splitserve.engine.step import Draw, PlanItem, StepPlan
from splitserve.errors import ModelUnavailable, UnsupportedModel, WorkerFault
from splitserve.kv.format import KVFormat, ModelIdentity
from splitserve.model import attention
from splitserve.model.forward import Forward
from splitserve.model.info import ModelInfo, describe
from splitserve.model.kernels import GRANULE
from splitserve.model.linear import Packing, pack_linears
from splitserve.sampling import Sampling


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A causal language model whose attention is ours, with what its directory says of it."""

    module: torch.nn.Module
    info: ModelInfo
    packing: Packing  # of the module's linear layers

    @property
    def identity(self) -> ModelIdentity:
        return self.info.identity

    @property
    def max_model_len(self) -> int:
        return self.info.max_model_len

    @property
    def vocab_size(self) -> int:
        return self.info.vocab_size

    @property
    def eos_ids(self) -> tuple[int, ...]:
        return self.info.eos_ids

    def kv_format(self, block_size: int) -> KVFormat:
        return self.info.kv_format(block_size)


def load(path: Path, dtype: str = "float32") -> LoadedModel:
    """Load weights into memory, converted to `dtype`, on the CPU.

    Raises UnsupportedModel, naming why, for what the kernels can't carry, and ModelUnavailable for
    a directory that can't be read.
    """
    if dtype != "float32":
        raise UnsupportedModel(f"Computing in {dtype} is not supported on a CPU: use float32.")
    info = describe(path)
    attention.register()
    disable_progress_bar()
    try:
        module = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=torch.float32,
            attn_implementation=attention.NAME,
            local_files_only=True,
            trust_remote_code=False,
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ModelUnavailable(f"{path} can't be loaded: {error}") from error
    module.eval()
    module.requires_grad_(False)
    loaded = LoadedModel(module, info, pack_linears(module))
    _require_paged(loaded)
    return loaded


def _require_paged(loaded: LoadedModel) -> None:
    """Refuse, after one small pass, what the configuration file did not give away."""
    info, kind = loaded.info, loaded.info.model_type
    if not getattr(type(loaded.module), "_supports_attention_backend", False):
        raise UnsupportedModel(
            f"Models of type {kind} can't be served: their attention is not replaceable."
        )
    blocks = np.zeros((1, info.kv_format(GRANULE).block_bytes), np.uint8)
    item = PlanItem("try", [0, 0], 0, [0], Draw(Sampling(seed=0, max_tokens=1), [], []))
    try:
        Forward(loaded, blocks, GRANULE).logits(StepPlan([item]))
    except WorkerFault as fault:
        raise UnsupportedModel(f"Models of type {kind} can't be served: {fault.message}") from fault
