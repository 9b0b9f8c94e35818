"""One forward pass of packed sequences over the paged pool: a plan in, logits out."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from splitserve.engine.step import OnLayer, PlanItem, StepPlan
from splitserve.errors import ConfigError, WorkerFault
from splitserve.kv.format import KVFormat
from splitserve.model.attention import Layer, PagedStep, Run
from splitserve.model.device_pool import DevicePool
from splitserve.model.kernels import GRANULE
from splitserve.model.tensor_attention import TensorStep

if TYPE_CHECKING:  # the loader tries a model out with a Forward
    from splitserve.model.loader import LoadedModel

_TORCH_ATTENTION_FROM = 16  # query tokens of a sequence in a step


class Forward:
    """Runs a model on a pool of KV blocks that it does not own.

    blocks: uint8 [num_blocks, block_bytes], writable, as in `transport.segment.Segment`.
    min_rows: forwards with fewer rows are padded to so many (design 3.10).
    torch_attention: let torch attend where a sequence has many tokens: faster, not exact.
    observe: see `PagedStep`.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        blocks: npt.NDArray[np.uint8],
        block_size: int,
        *,
        min_rows: int = 1,
        torch_attention: bool = False,
        num_threads: int = 1,
        observe: Callable[[Layer, int | None], None] | None = None,
    ) -> None:
        self.loaded = loaded
        self.kv_format = loaded.kv_format(block_size)
        self.pool, self.device_pool = _pools(loaded, blocks, self.kv_format)
        self._num_blocks = len(blocks)
        self.min_rows = min_rows
        self._torch_attention = torch_attention and all(one.is_plain for one in loaded.layers)
        self._observe = observe
        parameters = inspect.signature(loaded.module.forward).parameters
        self._picks_logits = "logits_to_keep" in parameters
        self._num_threads = num_threads
        self._threads = ThreadPoolExecutor(num_threads) if num_threads > 1 else None

    def logits(self, plan: StepPlan, on_layer: OnLayer | None = None) -> npt.NDArray[np.float32]:
        """Compute the plan, its KV into the pool; logits [number of draws, vocab] in plan order."""
        items = plan.items
        step, tokens, positions = self._pack(items)
        step.on_layer = on_layer
        ends = np.cumsum([len(item.token_ids) for item in items])
        wanted = [int(end) - 1 for end, item in zip(ends, items, strict=True) if item.draw]
        kept = wanted + [0] * max(0, self.min_rows - len(wanted)) if wanted else []
        device = self.loaded.device
        picked = torch.tensor(kept, dtype=torch.long, device=device)
        with torch.inference_mode():
            output = self.loaded.module(
                input_ids=torch.from_numpy(tokens)[None].to(device),
                position_ids=torch.from_numpy(positions)[None].to(device),
                use_cache=False,
                paged=step,
                **({"logits_to_keep": picked} if self._picks_logits else {}),
            )
        if step.layers_seen != self.kv_format.num_layers:
            raise WorkerFault(
                f"{step.layers_seen} of {self.kv_format.num_layers} layers used the KV pool."
            )
        logits = output.logits[0] if self._picks_logits else output.logits[0, picked]
        rows: npt.NDArray[np.float32] = logits[: len(wanted)].float().cpu().numpy()
        return rows

    def _pack(
        self, items: Sequence[PlanItem]
    ) -> tuple[PagedStep, npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The items one after the other, then padding."""
        counts = np.array([len(item.token_ids) for item in items])
        total = int(counts.sum())
        rows = max(total, self.min_rows)
        tokens = np.zeros(rows, np.int64)
        positions = np.zeros(rows, np.int64)
        sequence = np.full(rows, -1, np.int32)
        slots = np.full(rows, -1, np.int64)
        tables = np.zeros((len(items), max(len(item.block_ids) for item in items)), np.int32)
        size = self.kv_format.block_size
        runs, bounds, first = [], [], 0
        for i, item in enumerate(items):
            self._check(item)
            last = first + len(item.token_ids)
            end = item.start + len(item.token_ids)
            tables[i, : len(item.block_ids)] = item.block_ids
            tokens[first:last] = item.token_ids
            positions[first:last] = where = np.arange(item.start, end)
            sequence[first:last] = i
            slots[first:last] = tables[i, where // size].astype(np.int64) * size + where % size
            if self._torch_attention and last - first >= _TORCH_ATTENTION_FROM:
                runs.append(Run(first, last, item.start, tables[i, : -(-end // size)]))
            bounds.append((first, last))
            first = last
        position = positions.astype(np.int32)
        tensors = None
        if self.device_pool is not None:
            tensors = TensorStep(self.device_pool.tensor, slots, tables, position, bounds)
        step = PagedStep(
            pool=self.pool,
            slots=slots,
            block_tables=tables,
            sequence=sequence,
            position=position,
            parts=self._parts(positions, runs),
            runs=runs,
            threads=self._threads,
            max_model_len=self.loaded.info.max_model_len,
            tensors=tensors,
            observe=self._observe,
        )
        return step, tokens, positions

    def _check(self, item: PlanItem) -> None:
        end = item.start + len(item.token_ids)
        blocks = item.block_ids
        if not item.token_ids or len(blocks) * self.kv_format.block_size < end:
            raise WorkerFault(
                f"Request {item.request_id}: {len(blocks)} blocks for positions up to {end}."
            )
        if not 0 <= min(blocks) <= max(blocks) < self._num_blocks:
            raise WorkerFault(f"Request {item.request_id} names a block outside the pool.")
        if not 0 <= min(item.token_ids) <= max(item.token_ids) < self.loaded.info.vocab_size:
            raise WorkerFault(f"Request {item.request_id} has a token outside the vocabulary.")

    def _parts(self, positions: npt.NDArray[np.int64], runs: list[Run]) -> list[tuple[int, int]]:
        """Row ranges outside `runs`, split so that threads have about equal work each."""
        work = np.cumsum(positions + 1)
        cuts = np.searchsorted(work, work[-1] * np.arange(1, self._num_threads) / self._num_threads)
        edges = {0, len(positions), *(int(cut) for cut in cuts)}
        edges.update(edge for run in runs for edge in (run.first, run.last))
        bounds = sorted(edges)
        covered = {row for run in runs for row in range(run.first, run.last)}
        return [(a, b) for a, b in itertools.pairwise(bounds) if a not in covered]


def pool_view(blocks: npt.NDArray[np.uint8], kv_format: KVFormat) -> npt.NDArray[np.float32]:
    """The pool as float32 [blocks, layers, 2, kv heads, block size, D], sharing its memory."""
    if kv_format.dtype != "float32":
        raise ConfigError(f"The kernels' pool is float32, not {kv_format.dtype}.")
    _require_fit(blocks, kv_format)
    return blocks.view(np.float32).reshape(-1, *kv_format.block_shape)


def _pools(
    loaded: LoadedModel, blocks: npt.NDArray[np.uint8], kv_format: KVFormat
) -> tuple[npt.NDArray[np.float32], DevicePool | None]:
    """The pool for the kernels, and the one for torch; the first has no blocks if there is one."""
    if not loaded.by_torch:
        return pool_view(blocks, kv_format), None
    _require_fit(blocks, kv_format)
    none = np.empty((0, *kv_format.block_shape), np.float32)
    return none, DevicePool(blocks, kv_format, loaded.device)


def _require_fit(blocks: npt.NDArray[np.uint8], kv_format: KVFormat) -> None:
    if kv_format.block_size % GRANULE:
        raise ConfigError(f"The block size must be a multiple of {GRANULE}.")
    if blocks.ndim != 2 or blocks.shape[1] != kv_format.block_bytes:
        raise ConfigError(
            f"Blocks have {blocks.shape[1:]} bytes where the format needs {kv_format.block_bytes}."
        )
