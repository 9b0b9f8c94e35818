"""Transport `nixl`: NVIDIA's NIXL and its UCX, that is RDMA between hosts that have it, else tcp.

The link asks and the owner writes into the link's region: a read is the owner's PUT. Not the link's
GET, though NIXL has that, because UCX emulates it over tcp, and the emulation ends the owner's
process when a reader is killed (decision 0014). A PUT's failure is its poster's alone. Each end of
a link has an agent of its own, without a thread: it moves on while ours looks.

What the library does not do, and what is done instead:

  - Nothing posted can be cancelled: releasing a UCX request forgets it, the bytes still come. So a
    read that is broken off waits for the batches that it had asked for; if that takes too long, and
    after any failure, the link's agent is destroyed. With it go its sockets and queue pairs, which
    the owner's bytes needed, and the next transfer makes another.
  - That doesn't hold for CMA, by which an owner that was frozen would write into our memory later,
    so UCX may not use it. On one host transport `shm` is the better one anyway.
  - A `write` that was broken off may have bytes in the peer's socket buffer, which a peer that had
    been frozen still puts into its zone: a zone's blocks need their digests (decision 0013).
  - There is no read-only registration. A pool can't be written because its agent's keys are never
    given away; but each owner that is read gets those of our region, and is trusted to write only
    what it was asked for.
  - Python's lock is held throughout each call into NIXL, as long as the sockets have something.
  - UCX listens on all interfaces that UCX_NET_DEVICES allows and checks nobody's identity.
"""

from __future__ import annotations

import contextlib
import os
import struct
import time
import uuid
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

# Not `_api`: it asks for a progress thread that never sleeps (one core per worker), and logs.
from nixl_cu12 import _bindings as nixl

from splitserve.errors import ConfigError
from splitserve.transport.asked import AskedTransport
from splitserve.transport.base import IO_TIMEOUT_S
from splitserve.transport.mover import Mover, MoverFailed, Region, pause
from splitserve.transport.segment import Segment

_TLS = "^cma"
"""What UCX may use, unless the environment has UCX_TLS."""
_INTO_OTHERS = {"cma", "knem", "xpmem", "sm", "shm", "all"}
"""Names in UCX_TLS that bring a way to write into a process that has closed its end."""
_BASE = struct.Struct("!Q")
_ERRORS = tuple(getattr(nixl, name) for name in dir(nixl) if name.endswith("Error"))


class NixlTransport(AskedTransport):
    """Between hosts, by whatever UCX finds there."""

    name = "nixl"

    def __init__(
        self, segment: Segment, host: str = "127.0.0.1", *, io_timeout_s: float = IO_TIMEOUT_S
    ) -> None:
        """host: of the small connections; for the bytes UCX chooses the interfaces."""
        super().__init__(segment, host, io_timeout_s=io_timeout_s)
        check_tls(os.environ.get("UCX_TLS", _TLS))

    def make_mover(self, *, owner: bool, writable: bool) -> Mover:
        return _NixlMover(self.region, exposed=writable or not owner)


def check_tls(value: str) -> None:
    """Raise ConfigError if UCX_TLS allows ways that outlive the end they write to."""
    names = set(value.lstrip("^").split(","))
    allowed = not names & {"cma", "sm", "shm"} if value.startswith("^") else names & _INTO_OTHERS
    if allowed:
        raise ConfigError(
            f"Transport nixl can't be used with UCX_TLS={value}: by shared memory a peer that was "
            "frozen could write blocks that are no longer its own.",
            advice="Name what crosses hosts (rc,tcp or tcp), or unset it; on one host use shm.",
        )


class _NixlMover(Mover):
    poll_ms = 0

    def __init__(self, region: Region, *, exposed: bool) -> None:
        self._base = int(region.ctypes.data)
        self._posted: deque[Any] = deque()
        self._begun: deque[bool] = deque()
        """What was begun and not finished: whether it is something that we posted."""
        self._peer = ""
        self._their_base = 0
        config = nixl.nixlAgentConfig()
        config.useProgThread = False
        config.syncMode = nixl.NIXL_THREAD_SYNC_NONE
        name = f"splitserve-{os.getpid()}-{uuid.uuid4().hex[:12]}"
        try:
            self._agent: Any = nixl.nixlAgent(name, config)
            self._backends = [self._agent.createBackend("UCX", {"engine_config": f"TLS={_TLS}"})]
            regions = [(self._base, region.nbytes, 0, "")]
            self._agent.registerMem(nixl.nixlRegDList(nixl.DRAM_SEG, regions), self._backends)
            metadata = bytes(self._agent.getLocalMD()) if exposed else b""
        except _ERRORS as error:
            raise MoverFailed(f"NIXL can't be set up: {error}") from error
        self._greeting = _BASE.pack(self._base) + metadata

    @property
    def greeting(self) -> bytes:
        return self._greeting

    def meet(self, greeting: bytes) -> None:
        metadata = greeting[_BASE.size :]
        if not metadata:
            return
        self._their_base = _BASE.unpack_from(greeting)[0]
        try:
            self._peer = self._agent.loadRemoteMD(metadata)
        except _ERRORS as error:
            raise MoverFailed(f"NIXL refuses the peer: {error}") from error

    def give(self, ours: Sequence[int], theirs: Sequence[int], size: int) -> None:
        try:
            handle = self._agent.createXferReq(
                nixl.NIXL_WRITE,
                nixl.nixlXferDList(nixl.DRAM_SEG, _rows(ours, size, self._base)),
                nixl.nixlXferDList(nixl.DRAM_SEG, _rows(theirs, size, self._their_base)),
                self._peer,
                b"",
                self._backends,
            )
            self._posted.append(handle)
            self._begun.append(True)
            self._agent.postXferReq(handle, b"")
        except _ERRORS as error:
            raise MoverFailed(f"NIXL lost the peer: {error}") from error

    def take(self, ours: Sequence[int], size: int) -> None:
        self._begun.append(False)

    def given(self) -> bool:
        try:
            if not self._posted:
                self._agent.getNotifs({}, self._backends)  # nothing else makes it look
                return True
            return all(
                self._agent.getXferStatus(handle) != nixl.NIXL_IN_PROG for handle in self._posted
            )
        except _ERRORS as error:
            raise MoverFailed(f"NIXL lost the peer: {error}") from error

    def finish(self, timeout_s: float) -> None:
        if not self._begun.popleft():
            return
        start = time.monotonic()
        while not self.given():
            if time.monotonic() - start >= timeout_s:
                raise MoverFailed(f"no progress in {timeout_s:g} s")
            pause(start)
        self._agent.releaseXferReq(self._posted.popleft())

    def close(self) -> None:
        agent, self._agent = self._agent, None
        while self._posted:
            with contextlib.suppress(*_ERRORS):
                agent.releaseXferReq(self._posted.popleft())


def _rows(offsets: Sequence[int], size: int, base: int) -> npt.NDArray[np.uint64]:
    """Descriptors as the library takes them: uint64 [n, 3] of address, length, device."""
    rows = np.zeros((len(offsets), 3), np.uint64)
    rows[:, 0] = np.asarray(offsets, np.uint64) + np.uint64(base)
    rows[:, 1] = size
    return rows
