"""Loading a Hugging Face model for the paged pool, from a local directory and nowhere else."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM

from splitserve.errors import ModelUnavailable, UnsupportedModel
from splitserve.kv.format import KVFormat, ModelIdentity
from splitserve.model import attention
from splitserve.model.info import ModelInfo, describe


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A causal language model whose attention is ours, with what its directory says of it."""

    module: torch.nn.Module
    info: ModelInfo

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
    _require_paged(module, info)
    return LoadedModel(module=module, info=info)


def _require_paged(module: Any, info: ModelInfo) -> None:
    """Refuse what the configuration file did not give away."""
    kind = info.model_type
    if not getattr(type(module), "_supports_attention_backend", False):
        raise UnsupportedModel(
            f"Models of type {kind} can't be served: their attention is not replaceable."
        )
    layers = [one for one in module.modules() if hasattr(one, "layer_idx")]
    with_attention = {one.layer_idx for one in layers if "Attention" in type(one).__name__}
    if with_attention != set(range(info.num_layers)):
        raise UnsupportedModel(
            f"Models of type {kind} can't be served: {len(with_attention)} of {info.num_layers} "
            "layers have attention."
        )
