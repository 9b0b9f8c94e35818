"""What transports have in common whose library needs both ends to take part in each copy.

A link asks over a small connection of its own; a thread of the owner answers. The two ends of the
library, a `Mover` each, do the copying.

    link                                    owner
    hello with the card's token        ──►  as of transport `tcp`
    its mover's greeting               ──►
                                       ◄──  its own
    READ count size, offsets           ──►  the owner gives, several batches may be asked for
                                       ◄──  DONE: given
    WRITE count size, offsets          ──►  the owner takes, one batch at a time
    DONE: given                        ──►
                                       ◄──  DONE: in place

A request has the offsets at the owner, then those at the link. There is no error frame: whoever
finds something wrong ends the connection and its mover. The next transfer makes both anew.
"""

from __future__ import annotations

import abc
import contextlib
import os
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from splitserve.errors import ConfigError, TransferFailed
from splitserve.transport import tcp_wire as wire
from splitserve.transport.base import IO_TIMEOUT_S, Export, Link, Pieces, Transport, check_pieces
from splitserve.transport.mover import PAUSE_S, Look, Mover, MoverFailed, Region
from splitserve.transport.segment import Segment
from splitserve.transport.tcp import CONNECT_TIMEOUT_S, connect
from splitserve.transport.tcp_server import Refused, ServedExport, Session

BATCH_BYTES = 8 << 20
"""Of one request, if its pieces are smaller: how early the first index comes, and how late a
cancellation may end."""
MAX_PIECES = 4096
"""Of one request."""
BATCHES = 2
"""Under way at once, of a read."""
SETTLE_S = 0.5
"""So long a read that was broken off waits for what it had asked for, before it breaks the link."""
_DONE = b"\x06"
_FRAME = struct.Struct("!I")
_MAX_GREETING_BYTES = 1 << 20


class AskedTransport(Transport):
    """By the movers of a library."""

    def __init__(
        self, segment: Segment, host: str = "127.0.0.1", *, io_timeout_s: float = IO_TIMEOUT_S
    ) -> None:
        """host: our address as peers reach it."""
        if host in ("", "0.0.0.0", "::"):
            raise ConfigError(
                f"The {self.name} transport can't tell its peers to reach it at {host!r}.",
                advice="Name the address of one network interface.",
            )
        self.region: Region = segment.blocks.reshape(-1)
        self.host = host
        self.io_timeout_s = io_timeout_s
        self.links: set[AskedLink] = set()
        self._export: Export | None = None

    @abc.abstractmethod
    def make_mover(self, *, owner: bool, writable: bool) -> Mover:
        """An end for a new connection. writable: whether the link may write."""

    def export(self, *, writable: bool = False) -> Export:
        assert self._export is None, "a segment is exported once"
        self._export = _Owner(self, writable)
        return self._export

    def open(
        self, card: bytes, descriptors: list[int], num_bytes: int, *, writable: bool = False
    ) -> Link:
        for fd in descriptors:
            os.close(fd)
        prefix = self.name.encode() + b":"
        if not card.startswith(prefix):
            raise TransferFailed(f"The peer's card is not one of {self.name}.")
        theirs = wire.Card.unpack(card[len(prefix) :])
        if theirs.num_bytes != num_bytes:
            raise TransferFailed(
                f"The peer's region has {theirs.num_bytes} bytes, its format says {num_bytes}."
            )
        if writable and not theirs.writable:
            raise TransferFailed("The peer's region is not to be written.")
        link = AskedLink(theirs, writable, self)
        link.connect(threading.Event())
        self.links.add(link)
        return link

    def close(self) -> None:
        for link in list(self.links):
            link.close()
        if self._export is not None:
            self._export.close()


class AskedLink(Link):
    def __init__(self, card: wire.Card, writable: bool, transport: AskedTransport) -> None:
        self._card = card
        self._writable = writable
        self._transport = transport
        self._closed = False
        self._socket: socket.socket | None = None
        self._mover: Mover | None = None
        self._under_way: deque[int] = deque()
        """Of each batch, the end of the half-open range of its pieces."""

    def connect(self, cancelled: threading.Event) -> None:
        """Open the connection and make our mover meet the owner's."""
        try:
            with self._translated():
                self._connect(cancelled)
        except TransferFailed:
            self._break()
            raise

    def _connect(self, cancelled: threading.Event) -> None:
        deadline = time.monotonic() + CONNECT_TIMEOUT_S
        self._socket = connect(self._card, self._writable, deadline, cancelled)
        self._mover = self._transport.make_mover(owner=False, writable=self._writable)
        self._send(_framed(self._mover.greeting))
        size = _FRAME.unpack(self._receive(_FRAME.size, cancelled))[0]
        if size > _MAX_GREETING_BYTES:
            raise ConnectionError("it speaks another protocol")
        self._mover.meet(self._receive(size, cancelled))

    def read(
        self, there: Sequence[int], here: Sequence[int], size: int, cancelled: threading.Event
    ) -> Pieces:
        check_pieces(there, here, size, self._card.num_bytes, len(self._transport.region))
        return self._transfer(wire.READ, there, here, size, cancelled)

    def write(
        self, there: Sequence[int], here: Sequence[int], size: int, cancelled: threading.Event
    ) -> Pieces:
        if not self._writable:
            raise TransferFailed("The peer's region was not opened for writing.")
        check_pieces(there, here, size, self._card.num_bytes, len(self._transport.region))
        return self._transfer(wire.WRITE, there, here, size, cancelled)

    def close(self) -> None:
        self._closed = True
        self._break()
        self._transport.links.discard(self)

    def _transfer(
        self,
        op: int,
        there: Sequence[int],
        here: Sequence[int],
        size: int,
        cancelled: threading.Event,
    ) -> Pieces:
        if self._closed:
            raise TransferFailed("The link is closed.")
        assert not self._under_way, "one at a time"
        count = len(there)
        if count and self._mover is None:
            self.connect(cancelled)
        at_once = min(max(BATCH_BYTES // size, 1), MAX_PIECES)
        batches = BATCHES if op == wire.READ else 1
        asked = done = 0
        try:
            with self._translated():
                while done < count:
                    while asked < count and len(self._under_way) < batches:
                        upto = min(asked + at_once, count)
                        self._begin(op, there[asked:upto], here[asked:upto], size, upto, cancelled)
                        asked = upto
                    for i in range(done, self._end(cancelled)):
                        done += 1
                        yield i
                        _check(cancelled)
        finally:
            if self._under_way:
                self._settle(op)

    def _begin(
        self,
        op: int,
        there: Sequence[int],
        here: Sequence[int],
        size: int,
        upto: int,
        cancelled: threading.Event,
    ) -> None:
        assert self._mover is not None
        self._under_way.append(upto)
        if op == wire.READ:
            self._mover.take(here, size)
        self._send(wire.pack_request(op, there, size) + wire.pack_offsets(here))
        if op == wire.WRITE:
            self._mover.give(here, there, size)
            self._wait(self._mover.given, cancelled)
            self._send(_DONE)

    def _end(self, cancelled: threading.Event) -> int:
        """Wait for the oldest batch; the end of its range."""
        assert self._mover is not None
        if self._receive(1, cancelled) != _DONE:
            raise ConnectionError("it speaks another protocol")
        self._mover.finish(self._transport.io_timeout_s)
        return self._under_way.popleft()

    def _settle(self, op: int) -> None:
        """Nothing is under way any more, if need be by breaking the link."""
        soon = _Deadline(SETTLE_S)
        try:
            while op == wire.READ and self._under_way:
                self._end(soon)
        except (OSError, MoverFailed, TransferFailed):
            pass
        if self._under_way:
            self._break()

    def _send(self, data: bytes) -> None:
        """Requests are few and small against the socket's buffer, and the owner reads them all."""
        assert self._socket is not None
        sent = memoryview(data)
        deadline = time.monotonic() + self._transport.io_timeout_s
        while sent:
            try:
                sent = sent[self._socket.send(sent) :]
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise TimeoutError("it does not hear us") from None
                time.sleep(PAUSE_S)

    def _receive(self, size: int, cancelled: threading.Event) -> bytes:
        assert self._socket is not None
        got = b""
        while len(got) < size:
            self._wait(lambda: False, cancelled)
            data = self._socket.recv(size - len(got))
            if not data:
                raise ConnectionError("the peer closed it")
            got += data
        return got

    def _wait(self, enough: Callable[[], bool], cancelled: threading.Event) -> None:
        """Until `enough`, or the connection has something."""
        assert self._socket is not None
        look = Look(self._socket, self._mover)
        start = time.monotonic()
        while not (enough() or look()):
            _check(cancelled)
            if time.monotonic() - start >= self._transport.io_timeout_s:
                raise TimeoutError(f"no progress in {self._transport.io_timeout_s:g} s")

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        """What goes wrong breaks the link and is a TransferFailed."""
        try:
            yield
        except (OSError, ValueError, MoverFailed) as error:
            self._break()
            raise TransferFailed(f"The peer can't be reached: {error}.") from error

    def _break(self) -> None:
        sock, self._socket = self._socket, None
        mover, self._mover = self._mover, None
        if sock is not None:
            sock.close()
        if mover is not None:
            mover.close()
        self._under_way.clear()


class _Owner(ServedExport):
    def __init__(self, transport: AskedTransport, writable: bool) -> None:
        self._transport = transport
        super().__init__(len(transport.region), transport.host, writable=writable)

    @property
    def card(self) -> bytes:
        return self._transport.name.encode() + b":" + super().card

    def make_session(self, sock: socket.socket, writable: bool) -> Session:
        return _AskedSession(sock, self._transport, writable, self.ended)


class _AskedSession(Session):
    def __init__(
        self,
        sock: socket.socket,
        transport: AskedTransport,
        writable: bool,
        ended: Callable[[Session], None],
    ) -> None:
        super().__init__(sock, transport.io_timeout_s, ended)
        self._transport = transport
        self._writable = writable

    def serve(self) -> None:
        head = bytearray(_FRAME.size)
        if not self.receive(head):
            return
        mover: Mover | None = None
        try:
            greeting = bytearray(min(_FRAME.unpack(head)[0], _MAX_GREETING_BYTES))
            self._fill(greeting)
            mover = self._transport.make_mover(owner=True, writable=self._writable)
            self.socket.sendall(_framed(mover.greeting))
            mover.meet(bytes(greeting))
            head = bytearray(wire.REQUEST.size)
            while self.receive(head, between_requests=True):
                self._answer(mover, *wire.REQUEST.unpack(head))
        except MoverFailed as error:
            raise Refused from error
        finally:
            if mover is not None:
                mover.close()

    def _answer(self, mover: Mover, op: int, count: int, size: int) -> None:
        num_bytes = len(self._transport.region)
        if not (0 < count <= MAX_PIECES and 0 < size <= num_bytes):
            raise Refused
        packed = bytearray(16 * count)
        self._fill(packed)
        offsets = wire.unpack_offsets(packed)
        ours, theirs = offsets[:count], offsets[count:]
        if max(ours) + size > num_bytes:
            raise Refused
        if op == wire.READ:
            mover.give(ours, theirs, size)
        elif op == wire.WRITE and self._writable:
            mover.take(ours, size)
            self._await_done(mover)
        else:
            raise Refused
        mover.finish(self.io_timeout_s)
        self.socket.sendall(_DONE)

    def _fill(self, into: bytearray) -> None:
        if not self.receive(into):
            raise Refused

    def _await_done(self, mover: Mover) -> None:
        look = Look(self.socket, mover)
        deadline = time.monotonic() + self.io_timeout_s
        while not look():
            if time.monotonic() >= deadline:
                raise Refused
        done = bytearray(1)
        self._fill(done)
        if done != _DONE:
            raise Refused


class _Deadline(threading.Event):
    """Set once its time has come."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._end = time.monotonic() + seconds

    def is_set(self) -> bool:
        return time.monotonic() >= self._end


def _framed(data: bytes) -> bytes:
    return _FRAME.pack(len(data)) + data


def _check(cancelled: threading.Event) -> None:
    if cancelled.is_set():
        raise TransferFailed("The transfer was cancelled.")
