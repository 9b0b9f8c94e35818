"""Loading a Hugging Face model for the paged pool, from a local directory and nowhere else."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM
from transformers import __version__ as transformers_version
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.pytorch_utils import Conv1D
from transformers.utils.logging import disable_progress_bar

from splitserve.errors import ConfigError, UnsupportedModel
from splitserve.kv.format import KVFormat, ModelIdentity
from splitserve.model import attention, checkpoint, fused, selfcheck
from splitserve.model.attention import Layer
from splitserve.model.info import ModelInfo, describe
from splitserve.model.linear import Packing, pack_linears
from splitserve.model.selfcheck import Floats


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A causal language model whose attention is ours, with what its directory says of it."""

    module: torch.nn.Module
    info: ModelInfo
    packing: Packing  # of the module's linear layers
    layers: tuple[Layer, ...] = ()  # as registered by the self-check
    dtype: str = "float32"
    device: str = "cpu"
    by_torch: bool = False  # linear layers and attention by torch, not by our kernels
    expected: Floats | None = None  # of the self-check, kept for devices

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
        return self.info.kv_format(block_size, self.dtype)

    def on(self, device: str) -> LoadedModel:
        """The same model, its weights moved to the device and checked there.

        After the fork, never before it. Raises ConfigError if the device can't take them, and
        UnsupportedModel if its logits differ from those that the CPU gave at loading.
        """
        if device == self.device:
            return self
        assert self.by_torch
        assert self.expected is not None
        try:
            self.module.to(device)
        except RuntimeError as error:
            raise ConfigError(f"The weights can't be moved to {device}: {error}") from error
        moved = replace(self, device=device)
        selfcheck.require_own_logits(moved, self.expected)
        return moved


def load(path: Path, dtype: str = "float32", *, by_torch: bool = False) -> LoadedModel:
    """Load weights into memory, converted to `dtype`, on the CPU; `LoadedModel.on` moves them.

    by_torch: compute by torch alone, which other dtypes than float32, and other devices, need.

    Raises UnsupportedModel, naming why, for what the kernels can't carry and for a model whose
    logits are not its own here (`selfcheck`), and ModelUnavailable for a directory that can't be
    read or whose weights are not the model's (`checkpoint`).
    """
    info = describe(path)
    _require_known(info)
    attention.register()
    disable_progress_bar()
    with checkpoint.told_here(path):
        module, told = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=getattr(torch, dtype),
            attn_implementation="eager",  # the model's own, for the self-check
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, by name
        )
    checkpoint.require_complete(path, told)
    checkpoint.require_finite(path, module)
    module.eval()
    module.requires_grad_(False)
    _require_interface(module, info)
    expected = selfcheck.own_logits(module, info)
    if by_torch or dtype != "float32":
        loaded = LoadedModel(module, info, Packing(), dtype=dtype, by_torch=True, expected=expected)
        return replace(loaded, layers=selfcheck.layers_of(loaded, expected))
    _linears_for_conv1ds(module)
    loaded = LoadedModel(module, info, pack_linears(module))
    layers = selfcheck.layers_of(loaded, expected)
    return _with_fused_layers(replace(loaded, layers=layers), expected)


def _with_fused_layers(loaded: LoadedModel, expected: Floats) -> LoadedModel:
    """The same, with layers fused where that gives the expected logits too."""
    if fused.fuse(loaded.module, loaded.layers, loaded.packing):
        try:
            selfcheck.require_own_logits(loaded, expected)
        except UnsupportedModel:
            fused.unfuse(loaded.module, loaded.packing)
    return loaded


def _require_known(info: ModelInfo) -> None:
    kind = info.model_type
    if kind not in CONFIG_MAPPING_NAMES:
        raise UnsupportedModel(
            f"Models of type {kind!r} can't be served: transformers {transformers_version} does "
            "not know them."
        )
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise UnsupportedModel(f"Models of type {kind} can't be served: they write no text.")


def _require_interface(module: torch.nn.Module, info: ModelInfo) -> None:
    if not getattr(type(module), "_supports_attention_backend", False):
        raise UnsupportedModel(
            f"Models of type {info.model_type} can't be served: their attention is not replaceable."
        )


def _linears_for_conv1ds(module: torch.nn.Module) -> None:
    """Replace GPT-2's transposed linear layers by torch's, which can be packed."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is not Conv1D:
                continue
            weights = child.state_dict()  # [in, out], and [out]
            num_in, num_out = weights["weight"].shape
            linear = torch.nn.Linear(num_in, num_out, device="meta")
            linear.weight = torch.nn.Parameter(weights["weight"].T, requires_grad=False)
            linear.bias = torch.nn.Parameter(weights["bias"], requires_grad=False)
            setattr(parent, name, linear)
