"""Our attention, under a name that transformers' attention interface knows.

transformers calls `attend` once per layer with the packed tokens of a step and passes the step's
`PagedStep` through as a keyword. No mask function is registered under NAME, so transformers makes
no mask: what a layer may see follows from positions and from the window that it asks for. Under
NAME_CHECKED the model's mask is made as well, as the size of its window only, so that a layer whose
arguments don't say what its mask says can be refused when a model is loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AttentionInterface, AttentionMaskInterface

from splitserve.engine.step import OnLayer
from splitserve.errors import UnsupportedModel
from splitserve.model.kernels import attend_range, variant_arguments, write_kv
from splitserve.model.tensor_attention import TensorStep

NAME = "splitserve_paged"
NAME_CHECKED = "splitserve_paged_checked"

_KNOWN_ARGUMENTS = {
    "cache_position",
    "dropout",
    "is_causal",
    "logits_to_keep",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "position_embeddings",
    "position_ids",
    "return_dict",
    "use_cache",
}


@dataclass(frozen=True, slots=True)
class Layer:
    """What one layer keeps, and how it attends, as its first call told."""

    index: int
    kind: str  # the attention module's class
    num_kv_heads: int
    key_width: int
    value_width: int
    scale: float
    window: int | None
    softcap: float | None
    has_sinks: bool

    @property
    def is_plain(self) -> bool:
        """Whether torch's attention can do it."""
        return self.softcap is None and not self.has_sinks


@dataclass(slots=True)
class Run:
    """Rows [first, last) of the step that are one sequence's positions from `start` on."""

    first: int
    last: int
    start: int
    blocks: npt.NDArray[np.int32]  # the blocks of positions 0 .. start + last - first - 1


@dataclass(slots=True)
class PagedStep:
    """Where the packed tokens of one forward pass live in the pool.

    pool: float32 [blocks, layers, 2, kv heads, block size, D]; of no blocks if `tensors` has them.
    slots: int64 [T], block x block size + slot; negative for padding.
    sequence: int32 [T], the row of block_tables; negative for padding. position: int32 [T].
    parts: row ranges to attend to one by one, or on an executor's threads, by the paged kernel.
    runs: row ranges for torch's attention instead; none in exact mode.
    tensors: the step for a pool that is a torch tensor, of any dtype, on any device; it attends
        instead of the kernels.
    observe: is told of each layer and of the window in its mask; only at loading.
    layers_seen: how often attention was called, which must end up as the number of layers.
    on_layer: is told of each layer whose KV is in the pool now.
    """

    pool: npt.NDArray[np.float32]
    slots: npt.NDArray[np.int64]
    block_tables: npt.NDArray[np.int32]
    sequence: npt.NDArray[np.int32]
    position: npt.NDArray[np.int32]
    parts: list[tuple[int, int]]
    runs: list[Run]
    threads: Executor | None
    max_model_len: int
    tensors: TensorStep | None = None
    observe: Callable[[Layer, int | None], None] | None = None
    layers_seen: int = 0
    on_layer: OnLayer | None = None


@dataclass(frozen=True, slots=True)
class _Variant:
    """What distinguishes one layer's attention from another's."""

    layer: int
    scale: float
    window: int | None
    softcap: float | None
    sinks: torch.Tensor | None


def register() -> None:
    """Make our names attention implementations of transformers; harmless when repeated."""
    AttentionInterface.register(NAME, attend)
    AttentionInterface.register(NAME_CHECKED, attend)
    AttentionMaskInterface.register(NAME_CHECKED, _window_as_mask)


def _window_as_mask(*args: Any, local_size: int | None = None, **kwargs: Any) -> torch.Tensor:
    """In a mask's place, its window (or chunk) in tokens, 0 if it has none."""
    return torch.tensor(local_size or 0)


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    paged: PagedStep | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Write the tokens' KV into the pool and attend to their sequences.

    query: [1, heads, T, D]; key: [1, kv heads, T, D]; value: [1, kv heads, T, V]. D and V may be
    less than the pool's width: they are filled up with zeros. sliding_window: positions that a
    token sees, its own included. s_aux: [heads], attention sinks. Returns [1, T, heads, V].
    """
    if paged is None:
        raise UnsupportedModel(
            f"{type(module).__name__} can't be served: its layers do not pass our arguments on."
        )
    layer = _require_fit(module, kwargs, query, key, value, paged)
    has_window = sliding_window is not None and sliding_window < paged.max_model_len
    variant = _Variant(
        layer=layer,
        scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        window=sliding_window if has_window else None,
        softcap=softcap or None,
        sinks=None if s_aux is None else s_aux.detach(),
    )
    if paged.observe is not None:
        seen = None if attention_mask is None else int(attention_mask)
        paged.observe(_described(module, variant, key, value), seen)
    value_width = value.shape[-1]
    query, key, value = (_filled_up(one, paged.pool.shape[-1]) for one in (query, key, value))
    if paged.tensors is not None:
        result = _attend_tensors(paged.tensors, query, key, value, variant)
    else:
        result = _attend_kernels(paged, query, key, value, variant)
    paged.layers_seen += 1
    if paged.on_layer is not None:
        paged.on_layer(layer)
    return result[..., :value_width], None


def _attend_tensors(
    step: TensorStep,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    variant: _Variant,
) -> torch.Tensor:
    how = variant.layer, variant.scale, variant.window, variant.softcap, variant.sinks
    return step.attend(query, key, value, *how)


def _attend_kernels(
    paged: PagedStep,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    variant: _Variant,
) -> torch.Tensor:
    """The paged kernel, and torch's attention where a sequence has many rows."""
    packed_query, packed_key, packed_value = (
        one[0].transpose(0, 1).contiguous().numpy() for one in (query, key, value)
    )
    write_kv(packed_key, packed_value, paged.pool, variant.layer, paged.slots)
    out = np.empty_like(packed_query)
    runs = paged.runs if variant.softcap is None and variant.sinks is None else []
    parts = paged.parts if runs else paged.parts + [(run.first, run.last) for run in paged.runs]
    _attend_paged(paged, packed_query, variant, parts, out)
    result = torch.from_numpy(out).unsqueeze(0)
    for run in runs:
        result[0, run.first : run.last] = _attend_run(paged, run, query, key, value, variant)
    return result


def _attend_paged(
    paged: PagedStep,
    query: npt.NDArray[np.float32],
    variant: _Variant,
    parts: list[tuple[int, int]],
    out: npt.NDArray[np.float32],
) -> None:
    sinks = None if variant.sinks is None else variant.sinks.numpy()
    extra = variant_arguments(variant.window, variant.softcap, sinks)

    def part(bounds: tuple[int, int]) -> None:
        attend_range(
            query,
            paged.pool,
            variant.layer,
            paged.block_tables,
            paged.sequence,
            paged.position,
            variant.scale,
            *extra,
            *bounds,
            out,
        )

    if paged.threads is None:
        for bounds in parts:
            part(bounds)
    else:
        list(paged.threads.map(part, parts))


def _attend_run(
    paged: PagedStep,
    run: Run,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    variant: _Variant,
) -> torch.Tensor:
    """torch's attention for one sequence's rows, [rows, heads, width of the pool]."""
    rows = slice(run.first, run.last)
    end = run.start + run.last - run.first
    window = variant.window if variant.window is not None and variant.window < end else None
    if run.start == 0:
        begin, keys, values = 0, key[:, :, rows], value[:, :, rows]
    else:
        block_size = paged.pool.shape[4]
        skipped = 0 if window is None else max(0, run.start - window + 1) // block_size
        begin = skipped * block_size
        gathered = torch.from_numpy(paged.pool[run.blocks[skipped:], variant.layer])
        both = gathered.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, : end - begin]
        keys, values = both[0:1], both[1:2]
    mask = None
    if run.start > 0 or window is not None:
        seen, at = torch.arange(begin, end), torch.arange(run.start, end)[:, None]
        mask = seen <= at if window is None else (seen <= at) & (seen > at - window)
    attended = torch.nn.functional.scaled_dot_product_attention(
        query[:, :, rows],
        keys,
        values,
        attn_mask=mask,
        is_causal=mask is None,
        scale=variant.scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return attended[0].transpose(0, 1)


def _filled_up(heads: torch.Tensor, width: int) -> torch.Tensor:
    """[..., D] to [..., width] with zeros, which change no product of Q and K."""
    missing = width - heads.shape[-1]
    return torch.nn.functional.pad(heads, (0, missing)) if missing else heads


def _described(
    module: torch.nn.Module, variant: _Variant, key: torch.Tensor, value: torch.Tensor
) -> Layer:
    return Layer(
        index=variant.layer,
        kind=type(module).__name__,
        num_kv_heads=key.shape[1],
        key_width=key.shape[-1],
        value_width=value.shape[-1],
        scale=variant.scale,
        window=variant.window,
        softcap=variant.softcap,
        has_sinks=variant.sinks is not None,
    )


def _require_fit(
    module: torch.nn.Module,
    kwargs: dict[str, Any],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    paged: PagedStep,
) -> int:
    """The layer's index; raises UnsupportedModel, naming it, if it asks for what we don't have."""
    index = getattr(module, "layer_idx", None)
    num_layers, kv_heads, width = (paged.pool.shape[i] for i in (1, 3, 5))
    asked = [f"the argument {name}" for name in _unknown(kwargs)]
    if not isinstance(index, int) or not 0 <= index < num_layers:
        asked.append(f"a place beyond the {num_layers} layers of the configuration")
    if kwargs.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        asked.append("attention that is not causal")
    if not query.shape[-1] == key.shape[-1] <= width or value.shape[-1] > width:
        asked.append(f"K of width {key.shape[-1]} and V of {value.shape[-1]} in slots of {width}")
    if key.shape[1] != kv_heads:
        asked.append(f"{key.shape[1]} KV heads where {kv_heads} were expected")
    if key.shape[2] != query.shape[2]:
        asked.append(f"KV of {key.shape[2]} tokens for {query.shape[2]}")
    expected = torch.float32 if paged.tensors is None else paged.tensors.pool.dtype
    if query.dtype != expected:
        asked.append(f"computing in {query.dtype}")
    if asked:
        raise UnsupportedModel(
            f"Layer {index} ({type(module).__name__}) can't be served, it asks for: "
            f"{', '.join(asked)}."
        )
    return int(index)  # type: ignore[arg-type]


def _unknown(kwargs: dict[str, Any]) -> list[str]:
    """Arguments that are set and that we don't know not to matter."""
    return sorted(name for name in kwargs.keys() - _KNOWN_ARGUMENTS if kwargs[name] is not None)
