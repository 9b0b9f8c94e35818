"""Attention over a paged pool by torch alone, for any dtype and device.

A step's rows are put into groups that attend at once: sequences with one query token each, so many
that what is gathered for them stays within a limit, and each other sequence alone. For each layer a
group gathers its blocks out of the pool and gives them to `scaled_dot_product_attention`; soft caps
and sinks, which that does not have, go through explicit products in float32.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

_GATHER_SLOTS = 32768
"""Slots that one group may gather, at most, if it has more than one sequence: 128 MiB of K and V in
bfloat16 for 8 heads of 128."""

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Group:
    """S sequences with Q query tokens each, and the L positions from `begin` on that they see.

    rows: [S x Q], of the step. blocks: [S, B], where the positions are; of the B x block size slots
    the first L count. visible: [S, 1, Q, L], None if all are. unfilled: [S, 1, L, 1], slots past
    the end of their sequence, None if there are none. is_causal: Q = L, each sees those before it.
    """

    rows: torch.Tensor
    blocks: torch.Tensor
    length: int
    visible: torch.Tensor | None
    unfilled: torch.Tensor | None
    is_causal: bool


@dataclass(slots=True)
class TensorStep:
    """Where one step's tokens live in a pool that is a tensor; all rows are tokens, none padding.

    pool: [blocks, layers, K|V, kv heads, block size, D]. slots, position: [T] and block_tables [S,
    max blocks] as in `PagedStep`. bounds: row ranges, one per sequence, in the tables' order.
    """

    pool: torch.Tensor
    slots: Ints
    block_tables: npt.NDArray[np.int32]
    position: npt.NDArray[np.int32]
    bounds: list[tuple[int, int]]
    _where: tuple[torch.Tensor, torch.Tensor] = field(init=False)
    _groups: dict[int | None, list[_Group]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        block, slot = np.divmod(self.slots, self.pool.shape[4])
        self._where = self._moved(block), self._moved(slot)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: int,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Write the tokens' KV and attend. query: [1, heads, T, D]; key, value: [1, kv heads, T,
        D]; sinks: [heads]. Returns [1, T, heads, D]."""
        plane = self.pool[:, layer]
        block, slot = self._where
        plane[:, 0][block, :, slot] = key[0].transpose(0, 1)
        plane[:, 1][block, :, slot] = value[0].transpose(0, 1)
        packed = query[0].transpose(0, 1)
        out = torch.empty_like(packed, memory_format=torch.contiguous_format)
        if window not in self._groups:
            self._groups[window] = self._grouped(window)
        for group in self._groups[window]:
            queries = packed[group.rows].view(len(group.blocks), -1, *packed.shape[1:])
            queries = queries.transpose(1, 2)
            keys, values = _gathered(plane, group)
            if softcap is None and sinks is None:
                attended = torch.nn.functional.scaled_dot_product_attention(
                    queries,
                    keys,
                    values,
                    attn_mask=group.visible,
                    is_causal=group.is_causal,
                    scale=scale,
                    enable_gqa=queries.shape[1] != keys.shape[1],
                )
            else:
                attended = _explicit(group, queries, keys, values, scale, softcap, sinks)
            out[group.rows] = attended.transpose(1, 2).flatten(0, 1)
        return out[None]

    def _grouped(self, window: int | None) -> list[_Group]:
        """All rows of the step, for layers with this window."""
        single = [i for i, (first, last) in enumerate(self.bounds) if last - first == 1]
        single.sort(key=lambda i: self.position[self.bounds[i][0]])
        groups = [[i] for i, (first, last) in enumerate(self.bounds) if last - first > 1]
        together: list[int] = []
        for i in single:  # the longest comes last, so it decides
            length = int(self.position[self.bounds[i][0]]) + 1
            if together and length * (len(together) + 1) > _GATHER_SLOTS:
                groups.append(together)
                together = []
            together.append(i)
        return [self._group(one, window) for one in (*groups, together) if one]

    def _group(self, sequences: list[int], window: int | None) -> _Group:
        """Sequences that have equally many rows."""
        size = self.pool.shape[4]
        rows = np.array([np.arange(*self.bounds[i]) for i in sequences])
        at = self.position[rows].astype(np.int64)  # [S, Q]
        ends = at[:, -1] + 1
        skipped = np.zeros_like(ends)  # blocks before the window of the first query
        if window is not None:
            skipped = np.maximum(0, at[:, 0] - window + 1) // size
        length = int((ends - skipped * size).max())
        picked = skipped[:, None] + np.arange(-(-length // size))
        tables = self.block_tables[np.array(sequences)]
        blocks = np.take_along_axis(tables, np.minimum(picked, tables.shape[1] - 1), axis=1)
        seen = skipped[:, None] * size + np.arange(length)  # [S, L], positions
        visible = seen[:, None] <= at[:, :, None]
        if window is not None:
            visible &= seen[:, None] > at[:, :, None] - window
        unfilled = seen >= ends[:, None]
        is_causal = rows.shape[1] == length > 1 and (window is None or window >= length)
        return _Group(
            rows=self._moved(rows.reshape(-1)),
            blocks=self._moved(blocks.astype(np.int64)),
            length=length,
            visible=None if is_causal or visible.all() else self._moved(visible[:, None]),
            unfilled=self._moved(unfilled[:, None, :, None]) if unfilled.any() else None,
            is_causal=is_causal,
        )

    def _moved(self, array: npt.NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(array).to(self.pool.device)


def _gathered(plane: torch.Tensor, group: _Group) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of a group, each [S, kv heads, L, D]; zeros where a sequence has no position: a mask
    hides no NaN, since 0 x NaN is not 0."""
    both = plane.permute(1, 2, 0, 3, 4)[:, :, group.blocks].flatten(3, 4)[..., : group.length, :]
    keys, values = both.transpose(1, 2)
    if group.unfilled is not None:
        keys.masked_fill_(group.unfilled, 0)
        values.masked_fill_(group.unfilled, 0)
    return keys, values


def _explicit(
    group: _Group,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention with a soft cap or sinks, in float32; [S, heads, Q, D] in the queries' dtype."""
    kv_heads, num_queries = keys.shape[1], queries.shape[2]
    shape = (len(queries), kv_heads, -1, *queries.shape[2:])
    grouped = queries.float().reshape(shape)  # [S, kv heads, group, Q, D]
    scores = (grouped * scale) @ keys.float().transpose(-1, -2)[:, :, None]
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    visible = group.visible
    if group.is_causal:
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    elif visible is not None:
        visible = visible[:, :, None]
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        each = sinks.float().view(1, kv_heads, -1, 1, 1).expand(len(scores), -1, -1, num_queries, 1)
        scores = torch.cat([scores, each], dim=-1)
    weights = scores.softmax(dim=-1)[..., : group.length]
    attended: torch.Tensor = weights @ values.float()[:, :, None]
    return attended.flatten(1, 2).to(queries.dtype)
