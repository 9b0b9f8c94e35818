"""A worker's KV pool as memory that others on the host can map: a sealed memfd (design §4).

A memfd has no name: it vanishes with its last holder, whatever killed that. It is allocated in full
at the start, so that lack of memory is an error then. Not `multiprocessing.shared_memory`: on
Python 3.11 an attaching peer's resource tracker unlinks the segment.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from splitserve.errors import ConfigError, TransferFailed

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def available_memory_bytes() -> int:
    """What can still be allocated without swapping, by the machine and by the control group."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) << 10
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        current = Path("/sys/fs/cgroup/memory.current").read_text().strip()
    except OSError:
        return available
    return available if limit == "max" else min(available, int(limit) - int(current))


class Segment:
    """`num_blocks` blocks of `block_bytes` bytes; `blocks` is uint8 [num_blocks, block_bytes]."""

    def __init__(self, fd: int, num_blocks: int, block_bytes: int, *, writable: bool) -> None:
        self.fd = fd
        size = num_blocks * block_bytes
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self._map = mmap.mmap(fd, size, mmap.MAP_SHARED | mmap.MAP_POPULATE, protection)
        flat = np.frombuffer(self._map, dtype=np.uint8)
        self.blocks: npt.NDArray[np.uint8] = flat.reshape(num_blocks, block_bytes)

    @classmethod
    def create(cls, num_blocks: int, block_bytes: int, name: str = "splitserve-kv") -> Segment:
        """Allocate and seal a segment; raise ConfigError if the memory can't be had."""
        size = num_blocks * block_bytes
        available = available_memory_bytes()
        if size > available:
            # Asking the kernel would not fail at once: it hands out pages until none are left.
            raise ConfigError(
                f"A KV pool of {size / 2**20:.0f} MiB can't be allocated: "
                f"{available / 2**20:.0f} MiB are available.",
                advice="Lower --kv-memory.",
            )
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(fd, 0, size)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            return cls(fd, num_blocks, block_bytes, writable=True)
        except OSError as error:
            os.close(fd)
            raise ConfigError(
                f"A KV pool of {size / 2**20:.0f} MiB can't be allocated ({error}).",
                advice="Lower --kv-memory.",
            ) from error

    @classmethod
    def attach(
        cls, fd: int, num_blocks: int, block_bytes: int, *, writable: bool = False
    ) -> Segment:
        """Map a peer's segment; takes over `fd`. Raise TransferFailed if it is not one, or, to be
        written, if the descriptor is for reading only.

        The seals are checked: a segment that could shrink could kill its reader with SIGBUS.
        """
        try:
            if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
                raise TransferFailed("The peer's segment is not sealed against shrinking.")
            size = os.fstat(fd).st_size
            expected = num_blocks * block_bytes
            if size != expected:
                raise TransferFailed(
                    f"The peer's segment has {size} bytes, its format says {expected}."
                )
            return cls(fd, num_blocks, block_bytes, writable=writable)
        except TransferFailed:
            os.close(fd)
            raise
        except OSError as error:
            os.close(fd)
            raise TransferFailed(f"The peer's segment can't be mapped: {error}.") from error

    def close(self) -> None:
        """Drop our descriptor; the mapping goes when the last array on it does."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
