"""Decoder layers of Llama's shape with everything between their products as one pass.

transformers' own layers spend a third of a small step in Python and small operations. A layer is
replaced only if its class is known to have this shape, and the model is then checked again against
its own logits (`selfcheck`): a layer that computes anything else is put back.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from splitserve.model import rows
from splitserve.model.attention import Layer, PagedStep, attend
from splitserve.model.linear import PackedLinear, Packing, side_by_side
from splitserve.model.simd import LANES

KNOWN = {"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"}

Floats = npt.NDArray[np.float32]
_NONE = np.empty(0, np.float32)


class FusedLayer(torch.nn.Module):
    """One decoder layer: norm, attention, norm and gated MLP, each added to what came in."""

    def __init__(self, layer: Any, registered: Layer, packing: Packing) -> None:
        super().__init__()
        self.original = layer
        self._registered = registered
        attention, mlp = layer.self_attn, layer.mlp
        self._qkv = side_by_side([attention.q_proj, attention.k_proj, attention.v_proj], packing)
        self._out = attention.o_proj
        self._gate_up = side_by_side([mlp.gate_proj, mlp.up_proj], packing)
        self._down = mlp.down_proj
        self._before_attention = _norm(layer.input_layernorm)
        self._before_mlp = _norm(layer.post_attention_layernorm)
        self._query_norm = _norm(getattr(attention, "q_norm", None))
        self._key_norm = _norm(getattr(attention, "k_norm", None))

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        paged: PagedStep,
        **kwargs: Any,
    ) -> torch.Tensor:
        """hidden_states: [1, T, hidden], which is overwritten. Returns the same shape."""
        x = hidden_states[0].contiguous().numpy()
        normed = _added_and_normed(x, _NONE, self._before_attention)
        attended = self._attend(self._qkv.product(normed), position_embeddings, paged)
        attended = self._out.product(attended)
        normed = _added_and_normed(x, attended, self._before_mlp)
        both = self._gate_up.product(normed)
        gated = np.empty((len(x), self._down.in_features), np.float32)
        rows.gate(both.reshape(-1), gated.reshape(-1), *gated.shape)
        out = self._down.product(gated)
        out += x
        return torch.from_numpy(out)[None]

    def _attend(
        self, qkv: Floats, angles: tuple[torch.Tensor, torch.Tensor], paged: PagedStep
    ) -> Floats:
        attention, registered = self.original.self_attn, self._registered
        dim, count = registered.key_width, len(qkv)
        heads = self._out.in_features // dim
        query, key, value = (
            np.empty((count, num, dim), np.float32)
            for num in (heads, registered.num_kv_heads, registered.num_kv_heads)
        )
        cos, sin = (one[0].numpy() for one in angles)
        norms = self._query_norm[0], self._key_norm[0], self._key_norm[1]
        rows.split_heads(qkv.reshape(-1), cos, sin, *norms, query, key, value)
        attended, _ = attend(
            attention,
            _by_head(query),
            _by_head(key),
            _by_head(value),
            None,
            scaling=registered.scale,
            sliding_window=registered.window,
            paged=paged,
        )
        return attended.reshape(count, heads * dim).numpy()


def fuse(module: torch.nn.Module, layers: tuple[Layer, ...], packing: Packing) -> bool:
    """Replace the model's decoder layers where every one of them can be; whether they were.

    layers: as registered by the self-check.
    """
    found = _decoder_layers(module, KNOWN)
    if found is None or len(found) != len(layers):
        return False
    if not all(map(_is_fusable, found, layers)):
        return False
    for i, registered in enumerate(layers):
        found[i] = FusedLayer(found[i], registered, packing)
    return True


def unfuse(module: torch.nn.Module, packing: Packing) -> None:
    """Put the model's own layers back."""
    found = _decoder_layers(module, {FusedLayer.__name__})
    assert found is not None
    for i, layer in enumerate(found):
        found[i] = layer.original  # type: ignore[assignment]
    packing.layers = [one for one in module.modules() if isinstance(one, PackedLinear)]


def _decoder_layers(module: torch.nn.Module, kinds: set[str]) -> torch.nn.ModuleList | None:
    for child in module.modules():
        if isinstance(child, torch.nn.ModuleList):
            names = {type(one).__name__ for one in child}
            if names and names <= kinds:
                return child
    return None


def _is_fusable(layer: Any, registered: Layer) -> bool:
    attention, mlp = layer.self_attn, layer.mlp
    linears = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
    linears += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    activation = layer.mlp.act_fn
    return (
        all(isinstance(one, PackedLinear) for one in linears)
        and all(one.out_features % 16 == 0 for one in linears)
        and registered.key_width == registered.value_width
        and registered.key_width % (2 * LANES) == 0
        and registered.is_plain
        and type(activation).__name__ in ("SiLUActivation", "SiLU")
    )


def _by_head(heads: Floats) -> torch.Tensor:
    """[T, heads, D] as [1, heads, T, D]."""
    return torch.from_numpy(heads).transpose(0, 1)[None]


def _norm(module: Any) -> tuple[Floats, float]:
    """An RMSNorm's weights and epsilon; no weights if there is none."""
    if module is None:
        return _NONE, 0.0
    return module.weight.detach().numpy(), module.variance_epsilon


def _added_and_normed(x: Floats, delta: Floats, norm: tuple[Floats, float]) -> Floats:
    normed = np.empty_like(x)
    weight, eps = norm
    rows.add_and_norm(x.reshape(-1), delta.reshape(-1), weight, normed.reshape(-1), len(x), eps)
    return normed
