"""Tier `disk`: a directory of this host, shared by all its processes that use it."""

from __future__ import annotations

import contextlib
import os

from splitserve.store import record
from splitserve.store.base import TierConfig
from splitserve.store.files import ABANDONED_S, Encoding, FileTier
from splitserve.store.record import Record

SETTLED_S = 0.1
"""More than a tick of the kernel's clock, by which the file system keeps mtimes."""


class _Plain(Encoding):
    suffix = ".kv"
    head_bytes = record.HEADER_BYTES

    def pack(self, record_: Record) -> bytes:
        return record.pack(record_)

    def unpack(self, head: bytearray) -> Record | None:
        return record.unpack(head)


class DiskTier(FileTier):
    """place: the directory; it is created when it is first written to."""

    def __init__(self, place: str, config: TierConfig) -> None:
        super().__init__("disk", place, config, _Plain(), SETTLED_S)

    def _is_abandoned(self, name: str, age_s: float) -> bool:
        pid = name.partition("-")[0]
        if age_s > ABANDONED_S or not pid.isdigit():
            return True
        with contextlib.suppress(PermissionError):
            try:
                os.kill(int(pid), 0)
            except ProcessLookupError:
                return True
        return False
