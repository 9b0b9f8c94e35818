"""Our attention, under a name that transformers' attention interface knows.

transformers calls `attend` once per layer with the packed tokens of a step and passes the step's
`PagedStep` through as a keyword. No mask function is registered under the name, so transformers
makes no mask.
"""

from __future__ import annotations

from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AttentionInterface

from splitserve.errors import UnsupportedModel
from splitserve.model.kernels import attend_range, write_kv

NAME = "splitserve_paged"

_REFUSED = ("softcap", "s_aux", "position_bias", "alibi", "attention_chunk_size")


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

    pool: float32 [blocks, layers, 2, kv heads, block size, D].
    slots: int64 [T], block x block size + slot; negative for padding.
    sequence: int32 [T], the row of block_tables; negative for padding. position: int32 [T].
    parts: row ranges to attend to one by one, or on an executor's threads, by the paged kernel.
    runs: row ranges for torch's attention instead; none in exact mode.
    layers_seen: how often attention was called, which must end up as the number of layers.
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
    layers_seen: int = 0


def register() -> None:
    """Make NAME an attention implementation of transformers; harmless when repeated."""
    AttentionInterface.register(NAME, attend)


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    paged: PagedStep | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Write the tokens' KV into the pool and attend to their sequences.

    query: [1, heads, T, D]; key, value: [1, kv heads, T, D]. Returns [1, T, heads, D].
    """
    if paged is None:
        raise UnsupportedModel(
            f"{type(module).__name__} can't be served: its layers do not pass our arguments on."
        )
    _refuse(module, kwargs, query, key, value, paged)
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    packed_query, packed_key, packed_value = (
        one[0].transpose(0, 1).contiguous().numpy() for one in (query, key, value)
    )
    write_kv(packed_key, packed_value, paged.pool, layer, paged.slots)
    out = np.empty_like(packed_query)
    _attend_paged(paged, packed_query, layer, scale, out)
    result = torch.from_numpy(out).unsqueeze(0)
    for run in paged.runs:
        result[0, run.first : run.last] = _attend_run(paged, run, query, key, value, layer, scale)
    paged.layers_seen += 1
    return result, None


def _attend_paged(
    paged: PagedStep,
    query: npt.NDArray[np.float32],
    layer: int,
    scale: float,
    out: npt.NDArray[np.float32],
) -> None:
    def part(bounds: tuple[int, int]) -> None:
        attend_range(
            query,
            paged.pool,
            layer,
            paged.block_tables,
            paged.sequence,
            paged.position,
            scale,
            *bounds,
            out,
        )

    if paged.threads is None:
        for bounds in paged.parts:
            part(bounds)
    else:
        list(paged.threads.map(part, paged.parts))


def _attend_run(
    paged: PagedStep,
    run: Run,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer: int,
    scale: float,
) -> torch.Tensor:
    """torch's attention for one sequence's rows, [rows, heads, D]."""
    rows = slice(run.first, run.last)
    mask = None
    if run.start == 0:
        keys, values = key[:, :, rows], value[:, :, rows]
    else:
        end = run.start + run.last - run.first
        gathered = torch.from_numpy(paged.pool[run.blocks, layer])  # [b, 2, kv heads, slot, D]
        both = gathered.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :end]
        keys, values = both[0:1], both[1:2]
        mask = torch.arange(end) <= torch.arange(run.start, end)[:, None]
    attended = torch.nn.functional.scaled_dot_product_attention(
        query[:, :, rows],
        keys,
        values,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return attended[0].transpose(0, 1)


def _refuse(
    module: torch.nn.Module,
    kwargs: dict[str, Any],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    paged: PagedStep,
) -> None:
    """Raise UnsupportedModel if the model asks for attention that is not plain and causal."""
    asked = [name for name in _REFUSED if kwargs.get(name) is not None]
    window = kwargs.get("sliding_window")
    if window is not None and window < paged.max_model_len:
        asked.append(f"a sliding window of {window} tokens")
    if kwargs.get("is_causal") is False:
        asked.append("attention that is not causal")
    if not query.shape[-1] == key.shape[-1] == value.shape[-1] == paged.pool.shape[-1]:
        asked.append("K and V of unequal width")
    if key.shape[1] != paged.pool.shape[3]:
        asked.append(f"{key.shape[1]} KV heads where {paged.pool.shape[3]} were expected")
    if query.dtype != torch.float32:
        asked.append(f"computing in {query.dtype}")
    if asked:
        raise UnsupportedModel(
            f"{type(module).__name__} can't be served, it asks for: {', '.join(asked)}."
        )
