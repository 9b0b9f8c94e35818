"""Transport `collective`: a process group of two ranks for each link, by torch.distributed's gloo.

The library that trainers and older engines move KV with, two-sided: the owner sends what the link
asked for straight from its region, and the link receives into its own. Small pieces go as one
message for each batch, through a buffer at both ends. A group can't be cancelled: it is destroyed,
which closes its sockets and waits for its thread, and the next transfer makes another, with a store
of its own and under another name (its epoch). The default process group is left alone.

gloo tells a sender nothing of a receiver that is gone. So a thread of the owner that sends to one
ends only by the timeout, and so long its transport's close may wait; a link watches its connection.
Neither gloo nor the store knows tokens: who can connect to their ports between a greeting and the
meeting that follows could take the peer's place. The network between the workers has to be trusted.

Not nccl: it takes tensors on a GPU, and what transports move are segments of the host's memory
(decision 0010).
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed

from splitserve.errors import ConfigError
from splitserve.transport.asked import AskedTransport
from splitserve.transport.mover import Mover, MoverFailed, Region
from splitserve.transport.tcp_server import listen

_c10d: Any = torch.distributed  # its types leave out what is used here

GATHER_BYTES = 64 << 10
"""Smaller pieces share a message: each costs tens of microseconds, its copy less."""
_EPOCH_BYTES = 16
_TAG = 0


class CollectiveTransport(AskedTransport):
    """Between hosts, over tcp."""

    name = "collective"

    def make_mover(self, *, owner: bool, writable: bool) -> Mover:
        return _GlooMover(self.region, self.host, owner, timedelta(seconds=self.io_timeout_s))


@dataclass
class _Batch:
    """What was begun: the library's handles and, if pieces were gathered, where they belong."""

    works: list[Any]
    size: int
    buffer: Region | None = None
    offsets: Sequence[int] = ()


class _GlooMover(Mover):
    poll_ms = 20

    def __init__(self, region: Region, host: str, owner: bool, timeout: timedelta) -> None:
        self._region = region
        self._tensor = torch.from_numpy(region)
        self._host = host
        self._timeout = timeout
        self._batches: deque[_Batch] = deque()
        self._group: Any = None
        self._store: Any = None
        self._epoch = secrets.token_bytes(_EPOCH_BYTES)
        if owner:
            with _translated():
                self._store = self._make_store()

    @property
    def greeting(self) -> bytes:
        """Of the owner: where its store is, and the group's name in it."""
        if self._store is None:
            return b""
        return self._epoch + f"{self._store.port} {self._host}".encode()

    def meet(self, greeting: bytes) -> None:
        options = _c10d.ProcessGroupGloo._Options()
        options._threads = 1
        options._timeout = self._timeout
        store, epoch, rank = self._store, self._epoch, 0
        with _translated():
            options._devices = [_c10d.ProcessGroupGloo.create_device(hostname=self._host)]
            if store is None:
                epoch, rank = greeting[:_EPOCH_BYTES], 1
                port, _, host = greeting[_EPOCH_BYTES:].decode().partition(" ")
                store = _c10d.TCPStore(
                    host, int(port), is_master=False, timeout=self._timeout, wait_for_workers=False
                )
            self._group = _c10d.ProcessGroupGloo(
                _c10d.PrefixStore(epoch.hex(), store), rank, 2, options
            )

    def give(self, ours: Sequence[int], theirs: Sequence[int], size: int) -> None:
        if size >= GATHER_BYTES:
            tensors = [self._tensor[at : at + size] for at in ours]
        else:
            buffer = np.empty(len(ours) * size, np.uint8)
            for i, at in enumerate(ours):
                buffer[i * size : (i + 1) * size] = self._region[at : at + size]
            tensors = [torch.from_numpy(buffer)]
        group, other = self._group, 1 - self._group.rank()
        with _translated():
            works = [group.send([tensor], other, _TAG) for tensor in tensors]
        self._batches.append(_Batch(works, size))

    def take(self, ours: Sequence[int], size: int) -> None:
        buffer = None
        if size >= GATHER_BYTES:
            tensors = [self._tensor[at : at + size] for at in ours]
        else:
            buffer = np.empty(len(ours) * size, np.uint8)
            tensors = [torch.from_numpy(buffer)]
        group, other = self._group, 1 - self._group.rank()
        with _translated():
            works = [group.recv([tensor], other, _TAG) for tensor in tensors]
        self._batches.append(_Batch(works, size, buffer, ours))

    def given(self) -> bool:
        return True  # gloo's own thread sends

    def finish(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        batch = self._batches.popleft()
        with _translated():
            for work in batch.works:
                work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
        if batch.buffer is not None:
            size = batch.size
            for i, at in enumerate(batch.offsets):
                self._region[at : at + size] = batch.buffer[i * size : (i + 1) * size]

    def close(self) -> None:
        self._group = None
        self._store = None
        self._batches.clear()

    def _make_store(self) -> Any:
        """On our address only: left to itself it listens on all."""
        listener = listen(self._host)
        port = listener.getsockname()[1]
        return _c10d.TCPStore(
            self._host,
            port,
            is_master=True,
            timeout=self._timeout,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except (RuntimeError, ValueError, ConfigError) as error:
        raise MoverFailed(str(error).partition("\n")[0]) from error
