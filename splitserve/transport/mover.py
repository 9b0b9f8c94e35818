"""One end of a library that needs both ends of a connection for each copy; see `asked`."""

from __future__ import annotations

import abc
import select
import socket
import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Region = npt.NDArray[np.uint8]

PAUSE_S = 20e-6
_POLL_MS = 20
_SPIN_S = 200e-6


class MoverFailed(Exception):
    """What the library reported, or that it timed out."""


class Mover(abc.ABC):
    """One end of one connection. Used by one thread; raises MoverFailed."""

    poll_ms: int
    """How long our thread may sleep on the connection while something is under way."""

    @property
    @abc.abstractmethod
    def greeting(self) -> bytes:
        """What the other end needs."""

    @abc.abstractmethod
    def meet(self, greeting: bytes) -> None:
        """The other end's greeting has come; it has, or will get, ours."""

    @abc.abstractmethod
    def give(self, ours: Sequence[int], theirs: Sequence[int], size: int) -> None:
        """Begin to copy from our offsets to theirs."""

    @abc.abstractmethod
    def take(self, ours: Sequence[int], size: int) -> None:
        """Begin to let the other end's bytes into our offsets."""

    @abc.abstractmethod
    def given(self) -> bool:
        """Let the library go on; whether all that we gave can be finished by the other end."""

    @abc.abstractmethod
    def finish(self, timeout_s: float) -> None:
        """Wait until the oldest that was begun is over: what was taken is in place."""

    @abc.abstractmethod
    def close(self) -> None:
        """After it nothing of this end moves. Idempotent."""


class Look:
    """Whether a connection has something; meanwhile its mover goes on."""

    def __init__(self, sock: socket.socket, mover: Mover | None) -> None:
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._mover = mover
        self._start = time.monotonic()

    def __call__(self) -> bool:
        if self._mover is None:
            return bool(self._poll.poll(_POLL_MS))
        self._mover.given()
        if self._poll.poll(self._mover.poll_ms):
            return True
        if not self._mover.poll_ms:
            pause(self._start)
        return False


def pause(start: float) -> None:
    """For who looks again and again since `start`."""
    if time.monotonic() - start > _SPIN_S:
        time.sleep(PAUSE_S)
