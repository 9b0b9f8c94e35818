"""What is known of a kept block apart from its bytes, and the header that says it.

Header, little endian, 136 bytes: magic, version, length of the key, block's bytes, time of the
save, digest of the namespace, xxh3-128 of the block, key padded with zeros, xxh3-64 of all that.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

import xxhash

from splitserve.store.base import Block

MAX_KEY_BYTES = 64
VERSION = 1

_MAGIC = b"splitKV\n"
_HEADER = struct.Struct("<8sHHQd16s16s64s")
_CHECK = struct.Struct("<Q")
HEADER_BYTES = 136

assert _HEADER.size + _CHECK.size <= HEADER_BYTES


def namespace_digest(namespace: bytes) -> bytes:
    """16 bytes in the place of a namespace of any length."""
    return hashlib.blake2b(namespace, digest_size=16).digest()


def digest_of(block: Block) -> bytes:
    """xxh3-128 of a block's bytes."""
    digest: bytes = xxhash.xxh3_128_digest(block.data)
    return digest


@dataclass(frozen=True, slots=True)
class Record:
    """namespace: its digest. saved_s: wall clock, as other processes and hosts have it."""

    key: bytes
    namespace: bytes
    num_bytes: int
    digest: bytes
    saved_s: float

    def is_of(self, key: bytes, namespace: bytes, num_bytes: int) -> bool:
        """Whether this is the block that was asked for, by what its header says."""
        return (self.key, self.namespace, self.num_bytes) == (key, namespace, num_bytes)

    def is_expired(self, ttl_s: float, now_s: float) -> bool:
        return ttl_s > 0 and now_s - self.saved_s >= ttl_s


def pack(record: Record) -> bytes:
    """The header of a block. Raise ValueError for a key longer than MAX_KEY_BYTES."""
    if len(record.key) > MAX_KEY_BYTES:
        raise ValueError(f"a key of {len(record.key)} bytes, more than {MAX_KEY_BYTES}")
    head = _HEADER.pack(
        _MAGIC,
        VERSION,
        len(record.key),
        record.num_bytes,
        record.saved_s,
        record.namespace,
        record.digest,
        record.key,
    )
    check = _CHECK.pack(xxhash.xxh3_64_intdigest(head))
    return (head + check).ljust(HEADER_BYTES, b"\0")


def unpack(header: bytes | bytearray | memoryview) -> Record | None:
    """What a header says; None if it is none, damaged, or of another version."""
    if len(header) < HEADER_BYTES:
        return None
    head = bytes(header[: _HEADER.size])
    (check,) = _CHECK.unpack_from(header, _HEADER.size)
    magic, version, key_bytes, num_bytes, saved_s, namespace, digest, key = _HEADER.unpack(head)
    if (magic, version) != (_MAGIC, VERSION) or check != xxhash.xxh3_64_intdigest(head):
        return None
    return Record(key[:key_bytes], namespace, num_bytes, digest, saved_s)
