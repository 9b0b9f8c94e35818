"""Converters between KV formats of one model: other float types, other block sizes (design 3.1).

Both change how a computation is stored, not what was computed, so the keys stay. A change of block
size moves bits; one of type rounds, and what is decoded from it is outside exact mode's promise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from splitserve.errors import FormatMismatch
from splitserve.kv.format import KVFormat

Bytes = npt.NDArray[np.uint8]
_CONVERTIBLE = ("dtype", "block_size")


@dataclass(frozen=True, slots=True)
class Converter:
    """From blocks of `source` to blocks of `target`. A unit is the larger block: what several
    small ones of one side and one of the other hold."""

    source: KVFormat
    target: KVFormat

    @property
    def name(self) -> str:
        """Of each field that changes: `dtype float32->bfloat16, block_size 16->32`."""
        return ", ".join(
            f"{field} {getattr(self.source, field)}->{getattr(self.target, field)}"
            for field in _CONVERTIBLE
            if getattr(self.source, field) != getattr(self.target, field)
        )

    @property
    def source_per_unit(self) -> int:
        return max(1, self.target.block_size // self.source.block_size)

    @property
    def target_per_unit(self) -> int:
        return max(1, self.source.block_size // self.target.block_size)

    def convert(self, sources: Sequence[Bytes], targets: Sequence[Bytes | None]) -> None:
        """One unit. sources: uint8 [block_bytes] each; the last unit of a prompt may have fewer.
        targets: where they go, None for what is not wanted; slots beyond the sources are left."""
        unit = np.concatenate([_floats(one, self.source) for one in sources], axis=3)
        size = self.target.block_size
        for i, target in enumerate(targets):
            part = unit[:, :, :, i * size : (i + 1) * size]
            if target is not None and part.shape[3]:
                _store(part, target, self.target)


def find_converter(source: KVFormat, target: KVFormat, who: str) -> Converter | None:
    """None if the formats are equal. Raise FormatMismatch, with both values of each field that
    differs, if there is no converter: other layers, heads or layouts, or block sizes of which
    neither is a multiple of the other."""
    if source == target:
        return None
    same = {field: getattr(target, field) for field in _CONVERTIBLE}
    msgspec.structs.replace(source, **same).require_equal(target, who)
    small, large = sorted((source.block_size, target.block_size))
    if large % small:
        raise FormatMismatch(
            f"KV blocks of {source.block_size} tokens can't be converted to {target.block_size}."
        )
    return Converter(source, target)


def _floats(block: Bytes, kv_format: KVFormat) -> npt.NDArray[np.generic]:
    """float32 or float16 [layer, K|V, head, slot, dim] of a block; bfloat16 as float32."""
    if kv_format.dtype == "bfloat16":
        bits = block.view(np.uint16).astype(np.uint32) << np.uint32(16)
        return bits.view(np.float32).reshape(kv_format.block_shape)
    return block.view(np.dtype(kv_format.dtype)).reshape(kv_format.block_shape)


def _store(part: npt.NDArray[np.generic], target: Bytes, kv_format: KVFormat) -> None:
    """Write into the first slots of a block, rounding to nearest even."""
    slots = part.shape[3]
    if kv_format.dtype == "bfloat16":
        whole = target.view(np.uint16).reshape(kv_format.block_shape)
        whole[:, :, :, :slots] = _to_bfloat16(part.astype(np.float32))
        return
    whole_floats = target.view(np.dtype(kv_format.dtype)).reshape(kv_format.block_shape)
    with np.errstate(over="ignore"):  # beyond float16 is infinite there too
        whole_floats[:, :, :, :slots] = part.astype(whole_floats.dtype)


def _to_bfloat16(floats: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    bits = np.ascontiguousarray(floats).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    # NaN: rounding could carry into the sign
    quiet = np.where(np.isnan(floats), bits | np.uint32(0x400000), rounded)
    return (quiet >> np.uint32(16)).astype(np.uint16)
