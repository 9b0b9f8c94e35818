"""Transport `tcp`: a peer's region over several sockets, from its memory into ours.

The reader has no thread: the one that iterates polls its sockets, so that nothing arrives while it
looks elsewhere, and ending a transfer is closing them. They are opened anew by the next transfer.
A consumer that pauses for longer than IO_TIMEOUT_S in the middle of one finds them closed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice

from splitserve.errors import ConfigError, TransferFailed
from splitserve.transport import tcp_wire as wire
from splitserve.transport.base import IO_TIMEOUT_S, Export, Link, Pieces, Transport, check_pieces
from splitserve.transport.segment import Segment
from splitserve.transport.tcp_server import TcpExport

CONNECT_TIMEOUT_S = 2.0
NUM_STREAMS = 2
FRAME_BYTES = 1 << 20
"""Of one request, if its pieces are smaller. Each stream has one to two of them under way: enough
for 25 Gbit/s over 1 ms by two streams. Twice as much was mostly slower (benchmarks/log)."""
_CALL_BYTES = 1 << 20
"""About as much per system call."""
_POLL_MS = 20
"""How long a silent peer may keep us from looking whether we are cancelled."""
_RESET = struct.pack("@ii", 1, 0)
_EITHER = select.POLLIN | select.POLLOUT


class TcpTransport(Transport):
    """Between hosts, or on one where memory can't be shared."""

    name = "tcp"

    def __init__(
        self,
        segment: Segment,
        host: str = "127.0.0.1",
        *,
        num_streams: int = NUM_STREAMS,
        io_timeout_s: float = IO_TIMEOUT_S,
    ) -> None:
        """host: our address as peers reach it."""
        if host in ("", "0.0.0.0", "::"):
            raise ConfigError(
                f"The tcp transport can't tell its peers to reach it at {host!r}.",
                advice="Name the address of one network interface.",
            )
        self.region = segment.blocks.reshape(-1).data
        self.num_streams = num_streams
        self.io_timeout_s = io_timeout_s
        self.links: set[_TcpLink] = set()
        self._host = host
        self._export: Export | None = None

    def export(self, *, writable: bool = False) -> Export:
        assert self._export is None, "a segment is exported once"
        self._export = TcpExport(
            self.region, self._host, writable=writable, io_timeout_s=self.io_timeout_s
        )
        return self._export

    def open(
        self, card: bytes, descriptors: list[int], num_bytes: int, *, writable: bool = False
    ) -> Link:
        for fd in descriptors:
            os.close(fd)
        theirs = wire.Card.unpack(card)
        if theirs.num_bytes != num_bytes:
            raise TransferFailed(
                f"The peer's region has {theirs.num_bytes} bytes, its format says {num_bytes}."
            )
        if writable and not theirs.writable:
            raise TransferFailed("The peer's region is not to be written.")
        link = _TcpLink(theirs, writable, self)
        link.connect(threading.Event())
        self.links.add(link)
        return link

    def close(self) -> None:
        for link in list(self.links):
            link.close()
        if self._export is not None:
            self._export.close()


class _Stream:
    """One socket: what is still to go out on it, and where what comes in belongs."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self.outgoing: deque[memoryview] = deque()
        self._incoming: deque[memoryview] = deque()
        self._indices: deque[int] = deque()

    @property
    def under_way(self) -> int:
        """Pieces asked for that are not in place."""
        return len(self._indices)

    def expect(self, index: int, view: memoryview) -> None:
        """When `view` is full, the piece is in place."""
        self._incoming.append(view)
        self._indices.append(index)

    def send(self, at_once: int) -> None:
        """Send what the socket takes now."""
        with contextlib.suppress(BlockingIOError):
            sent = self.socket.sendmsg(list(islice(self.outgoing, at_once)))
            wire.advance(self.outgoing, sent)

    def receive(self, at_once: int) -> list[int]:
        """Receive what has come; the pieces that are in place by it."""
        into = list(islice(self._incoming, at_once)) or [memoryview(bytearray(1))]
        try:
            got = self.socket.recvmsg_into(into)[0]
        except BlockingIOError:
            return []
        if not got:
            raise ConnectionError("the peer closed it")
        if not self._incoming:
            raise ConnectionError("the peer sent what nobody asked for")
        return [self._indices.popleft() for _ in range(wire.advance(self._incoming, got))]


class _TcpLink(Link):
    def __init__(self, card: wire.Card, writable: bool, transport: TcpTransport) -> None:
        self._card = card
        self._writable = writable
        self._transport = transport
        self._ours = transport.region
        self._closed = False
        self._streams: dict[int, _Stream] = {}  # by descriptor
        self._poll = select.poll()

    def connect(self, cancelled: threading.Event) -> None:
        """Open the streams, all or none."""
        deadline = time.monotonic() + CONNECT_TIMEOUT_S
        self._poll = select.poll()
        try:
            for _ in range(self._transport.num_streams):
                sock = connect(self._card, self._writable, deadline, cancelled)
                self._streams[sock.fileno()] = _Stream(sock)
                self._poll.register(sock, select.POLLIN)
        except (OSError, ValueError) as error:  # ValueError: a host that can't be a name
            self._break()
            raise TransferFailed(f"The peer can't be reached: {error}.") from error
        except TransferFailed:
            self._break()
            raise

    def read(
        self, there: Sequence[int], here: Sequence[int], size: int, cancelled: threading.Event
    ) -> Pieces:
        check_pieces(there, here, size, self._card.num_bytes, len(self._ours))

        def ask(stream: _Stream, start: int, end: int) -> None:
            request = wire.pack_request(wire.READ, there[start:end], size)
            stream.outgoing.append(memoryview(request))
            for i in range(start, end):
                stream.expect(i, self._ours[here[i] : here[i] + size])

        return self._transfer(ask, len(there), size, cancelled)

    def write(
        self, there: Sequence[int], here: Sequence[int], size: int, cancelled: threading.Event
    ) -> Pieces:
        if not self._writable:
            raise TransferFailed("The peer's region was not opened for writing.")
        check_pieces(there, here, size, self._card.num_bytes, len(self._ours))

        def ask(stream: _Stream, start: int, end: int) -> None:
            request = wire.pack_request(wire.WRITE, there[start:end], size)
            stream.outgoing.append(memoryview(request))
            for i in range(start, end):
                stream.outgoing.append(self._ours[here[i] : here[i] + size])
                stream.expect(i, memoryview(bytearray(1)))

        return self._transfer(ask, len(there), size, cancelled)

    def close(self) -> None:
        self._closed = True
        self._break()
        self._transport.links.discard(self)

    def _transfer(
        self,
        ask: Callable[[_Stream, int, int], None],
        count: int,
        size: int,
        cancelled: threading.Event,
    ) -> Pieces:
        """The pieces' indices; `ask` puts a request for a half-open range of them on a stream."""
        if self._closed:
            raise TransferFailed("The link is closed.")
        assert not any(stream.under_way for stream in self._streams.values()), "one at a time"
        per_request = min(max(FRAME_BYTES // size, 1), wire.MAX_PIECES)
        at_once = min(max(_CALL_BYTES // size, 1), wire.MAX_PIECES)
        asked = done = 0
        try:
            if count and not self._streams:
                self.connect(cancelled)
            ready = list(self._streams)
            while done < count:
                for fd in ready:
                    stream = self._streams[fd]
                    while asked < count and stream.under_way <= per_request:
                        upto = min(asked + per_request, count)
                        ask(stream, asked, upto)
                        asked = upto
                    if stream.outgoing:
                        stream.send(at_once)
                    self._poll.modify(fd, _EITHER if stream.outgoing else select.POLLIN)
                events = self._await(cancelled)
                ready = [fd for fd, _ in events]
                for fd, event in events:
                    if event == select.POLLOUT:
                        continue
                    for i in self._streams[fd].receive(at_once):
                        done += 1
                        yield i
                        _check(cancelled)
        except OSError as error:
            raise TransferFailed(f"The connection to the peer was lost: {error}.") from error
        finally:
            if any(stream.under_way for stream in self._streams.values()):
                self._break()

    def _await(self, cancelled: threading.Event) -> list[tuple[int, int]]:
        """What the sockets are ready for."""
        _check(cancelled)
        events = self._poll.poll(_POLL_MS)
        if events:
            return events
        deadline = time.monotonic() + self._transport.io_timeout_s
        while not events:
            _check(cancelled)
            if time.monotonic() >= deadline:
                raise TimeoutError(f"no progress in {self._transport.io_timeout_s:g} s")
            events = self._poll.poll(_POLL_MS)
        return events

    def _break(self) -> None:
        """Close the streams so that nothing moves on them any more, in either direction."""
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            if stream.under_way:
                # A reset instead of an orderly end: the kernel drops what we had sent to it.
                stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            stream.socket.close()


def connect(
    card: wire.Card, writable: bool, deadline: float, cancelled: threading.Event
) -> socket.socket:
    """A welcomed connection. Raise OSError, or TransferFailed once cancelled."""
    failure = OSError(f"{card.host} has no address")
    for family, kind, protocol, _, address in socket.getaddrinfo(
        card.host, card.port, type=socket.SOCK_STREAM
    ):
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setblocking(False)
            wire.tune(sock)
            code = sock.connect_ex(address)
            if code == errno.EINPROGRESS:
                _wait(sock, select.POLLOUT, deadline, cancelled)
                code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                raise OSError(code, os.strerror(code))
            sock.send(card.hello(writable=writable))  # fits: nothing is in the buffer yet
            welcome = b""
            while len(welcome) < wire.WELCOME.size:
                _wait(sock, select.POLLIN, deadline, cancelled)
                data = sock.recv(wire.WELCOME.size - len(welcome))
                if not data:
                    raise ConnectionError("it does not welcome us")
                welcome += data
            if welcome != wire.WELCOME.pack(wire.WELCOME_MAGIC, wire.VERSION):
                raise ConnectionError("it speaks another protocol")
            return sock
        except OSError as error:
            sock.close()
            failure = error
        except BaseException:
            sock.close()
            raise
    raise failure


def _wait(sock: socket.socket, event: int, deadline: float, cancelled: threading.Event) -> None:
    poll = select.poll()
    poll.register(sock, event)
    while not poll.poll(_POLL_MS):
        _check(cancelled)
        if time.monotonic() >= deadline:
            raise TimeoutError(f"no answer in {CONNECT_TIMEOUT_S:g} s")


def _check(cancelled: threading.Event) -> None:
    if cancelled.is_set():
        raise TransferFailed("The transfer was cancelled.")
