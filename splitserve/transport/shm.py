"""Transport `shm`: the peer's sealed memfd, mapped read-only; a block is one copy."""

from __future__ import annotations

import numpy as np

from splitserve.errors import TransferFailed
from splitserve.kv.format import KVFormat
from splitserve.transport.base import Export, Reader, Transport
from splitserve.transport.segment import Segment


class _ShmExport(Export):
    name = "shm"

    def __init__(self, segment: Segment) -> None:
        self._segment = segment

    def descriptors(self) -> list[int]:
        return [self._segment.fd]

    def close(self) -> None:
        self._segment.close()


class _ShmReader(Reader):
    def __init__(self, theirs: Segment, ours: Segment) -> None:
        self._theirs = theirs
        self._ours = ours

    def read(self, source: int, target: int) -> None:
        if not 0 <= source < len(self._theirs.blocks):
            raise TransferFailed(f"The peer's pool has no block {source}.")
        np.copyto(self._ours.blocks[target], self._theirs.blocks[source])

    def close(self) -> None:
        self._theirs.close()


class ShmTransport(Transport):
    """Between pools on one host, whoever owns them."""

    name = "shm"

    def __init__(self, segment: Segment) -> None:
        self._segment = segment

    def export(self) -> Export:
        return _ShmExport(self._segment)

    def open(self, descriptors: list[int], num_blocks: int, kv_format: KVFormat) -> Reader:
        if len(descriptors) != 1:
            raise TransferFailed(f"shm expects 1 descriptor, the peer sent {len(descriptors)}.")
        theirs = Segment.attach(descriptors[0], num_blocks, kv_format.block_bytes)
        return _ShmReader(theirs, self._segment)
