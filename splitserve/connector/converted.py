"""A fetch from a pool of another format: read into scratch, proved there, converted from there."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence

import xxhash

from splitserve.connector.convert import Bytes, Converter
from splitserve.connector.jobs import FetchJob
from splitserve.connector.peers import Scratch
from splitserve.errors import TransferFailed
from splitserve.transport.base import Link
from splitserve.transport.registry import make_transport
from splitserve.transport.segment import Segment

_UNITS = 16  # read at a time


def make_scratch(converter: Converter, transport: str, host: str) -> Scratch:
    num_blocks = _UNITS * converter.source_per_unit
    segment = Segment.create(num_blocks, converter.source.block_bytes, "splitserve-scratch")
    return Scratch(segment, make_transport(transport, segment, host), converter)


def copy_converted(
    link: Link,
    scratch: Scratch,
    job: FetchJob,
    targets: Sequence[Bytes],
    cancelled: threading.Event,
) -> None:
    """Fill targets, of which the first is for block job.first of the prompt. The job has all of the
    offer's block_ids and digests, of the source's block size. Raise TransferFailed."""
    converter = scratch.converter
    per_unit, size = converter.source_per_unit, converter.source.block_bytes
    for first, units in _batches(job.first, targets, converter):
        ids = job.block_ids[first * per_unit : (first + len(units)) * per_unit]
        digests = job.digests[first * per_unit : (first + len(units)) * per_unit]
        there = [block * size for block in ids]
        here = [i * size for i in range(len(ids))]
        with contextlib.closing(link.read(there, here, size, cancelled)) as pieces:
            for i in pieces:
                block = scratch.segment.blocks[i]
                if digests and xxhash.xxh3_128_digest(block) != digests[i]:
                    raise TransferFailed(f"Block {i} of the fetch has the wrong digest.")
        for number, wanted in enumerate(units):
            stop = min((number + 1) * per_unit, len(ids))
            sources = [scratch.segment.blocks[i] for i in range(number * per_unit, stop)]
            converter.convert(sources, wanted)


def _batches(
    first: int, targets: Sequence[Bytes], converter: Converter
) -> Iterator[tuple[int, list[list[Bytes | None]]]]:
    """(index of the first unit, targets of each unit), so many units as fit the scratch."""
    per_unit = converter.target_per_unit
    places: list[Bytes | None] = [None] * (first % per_unit) + list(targets)
    units = [places[i : i + per_unit] for i in range(0, len(places), per_unit)]
    start = first // per_unit
    for i in range(0, len(units), _UNITS):
        yield start + i, units[i : i + _UNITS]
