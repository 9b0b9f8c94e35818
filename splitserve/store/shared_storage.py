"""Tier `shared_storage`: a directory that several hosts see, as one of NFS is.

Each block is a safetensors file that anything can read: one tensor `kv`, uint8 [block_bytes], and
metadata that says key, namespace, digest, version and the time of the save. Neither locks nor
process ids mean anything here; only renaming does. Hosts' clocks should agree to some seconds:
they order uses, and date the files.
"""

from __future__ import annotations

import json
import struct

from splitserve.store.base import TierConfig
from splitserve.store.files import ABANDONED_S, Encoding, FileTier
from splitserve.store.record import MAX_KEY_BYTES, Record

SETTLED_S = 5.0
"""More than file systems tick and clocks differ."""

VERSION = "1"
TENSOR = "kv"

_LENGTH = struct.Struct("<Q")


class _Safetensors(Encoding):
    """The header's JSON is padded with spaces to one size, as the format allows."""

    suffix = ".safetensors"
    head_bytes = 512

    def pack(self, record: Record) -> bytes:
        if len(record.key) > MAX_KEY_BYTES:
            raise ValueError(f"a key of {len(record.key)} bytes, more than {MAX_KEY_BYTES}")
        size = record.num_bytes
        metadata = {
            "key": record.key.hex(),
            "namespace": record.namespace.hex(),
            "digest": record.digest.hex(),
            "version": VERSION,
            "saved_s": repr(record.saved_s),
        }
        tensor = {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}
        header = json.dumps({"__metadata__": metadata, TENSOR: tensor}, separators=(",", ":"))
        room = self.head_bytes - _LENGTH.size
        assert len(header) <= room
        return _LENGTH.pack(room) + header.ljust(room).encode()

    def unpack(self, head: bytearray) -> Record | None:
        try:
            (room,) = _LENGTH.unpack_from(head)
            if room != self.head_bytes - _LENGTH.size:
                return None
            header = json.loads(head[_LENGTH.size :])
            metadata, tensor = header["__metadata__"], header[TENSOR]
            size = tensor["shape"][0]
            if tensor != {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}:
                return None
            if metadata["version"] != VERSION:
                return None
            key, namespace, digest = (
                bytes.fromhex(metadata[name]) for name in ("key", "namespace", "digest")
            )
            return Record(key, namespace, size, digest, float(metadata["saved_s"]))
        except (struct.error, ValueError, LookupError, TypeError):
            return None


class SharedStorageTier(FileTier):
    """place: the directory; it is created when it is first written to."""

    def __init__(self, place: str, config: TierConfig) -> None:
        super().__init__("shared_storage", place, config, _Safetensors(), SETTLED_S)

    def _is_abandoned(self, name: str, age_s: float) -> bool:
        return age_s > ABANDONED_S
