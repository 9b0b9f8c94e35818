"""What names a computation (identity) and how its result is stored (format): design 3.1."""

from __future__ import annotations

import hashlib

import msgspec

from splitserve.errors import FormatMismatch

LAYOUT_VERSION = 1  # 1: [block, layer, K|V, kv head, slot, dim], C order

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class KVFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How KV is laid out in a pool. Two pools exchange blocks only if their formats are equal."""

    dtype: str
    block_size: int  # tokens per block, a multiple of the granule
    num_layers: int
    num_kv_heads: int
    head_dim: int
    head_shard: str = "0/1"
    layout_version: int = LAYOUT_VERSION

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        """[layer, K|V, kv head, slot, dim] of one block."""
        return (self.num_layers, 2, self.num_kv_heads, self.block_size, self.head_dim)

    @property
    def block_bytes(self) -> int:
        num = 1
        for extent in self.block_shape:
            num *= extent
        return num * DTYPE_BYTES[self.dtype]

    def require_equal(self, other: KVFormat, who: str) -> None:
        """Raise FormatMismatch naming each field that differs, with both values."""
        differing = [
            f"{name}: {getattr(self, name)!r} here, {getattr(other, name)!r} there"
            for name in self.__struct_fields__
            if getattr(self, name) != getattr(other, name)
        ]
        if differing:
            raise FormatMismatch(f"KV format of {who} differs: {'; '.join(differing)}.")


class ModelIdentity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was computed, apart from the tokens: two workers with equal identities may share KV."""

    architecture: str
    weights: str  # hub commit, or a digest of the safetensors headers and sizes
    tokenizer: str  # digest of tokenizer.json
    rope: str  # the rotary settings, as JSON
    adapter: str = ""

    def digest(self) -> bytes:
        """32 bytes that root every key."""
        return hashlib.blake2b(msgspec.json.encode(self), digest_size=32).digest()
