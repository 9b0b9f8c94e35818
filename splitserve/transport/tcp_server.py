"""The exporter's side of transport `tcp`: serves pieces of a region from where they lie.

One thread accepts and hears hellos, from all who knock; who has the token gets a thread of its own,
which is mostly inside system calls (the transports of `asked` are served so too). A request is
checked against the region here too, whatever the peer may have checked.
"""

from __future__ import annotations

import abc
import contextlib
import hmac
import secrets
import select
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice

from splitserve.errors import ConfigError
from splitserve.transport import tcp_wire as wire
from splitserve.transport.base import IO_TIMEOUT_S, Export

HELLO_TIMEOUT_S = 2.0
MAX_KNOCKING = 32
"""Connections that have not said hello. One more ends the oldest: a real hello takes no time."""
MAX_CONNECTIONS = 1024
_RECEIVE_BYTES = 256 << 10
"""About as much per system call. A writer that went away is noticed between two of them."""


class ServedExport(Export):
    """Listens from the start until it is closed; each that has the token is served by a Session."""

    def __init__(self, num_bytes: int, host: str, *, writable: bool) -> None:
        listener = listen(host)
        port = listener.getsockname()[1]
        token = secrets.token_bytes(wire.TOKEN_BYTES)
        self._card = wire.Card(host, port, num_bytes, writable, token)
        self._lock = threading.Lock()
        self._sessions: set[Session] = set()
        self._door = Door(listener, self._card, self._serve)

    @abc.abstractmethod
    def make_session(self, sock: socket.socket, writable: bool) -> Session:
        """To be started. writable: whether the peer wants to write, and may."""

    @property
    def card(self) -> bytes:
        return self._card.pack()

    def descriptors(self) -> list[int]:
        return []

    def close(self) -> None:
        self._door.close()
        with self._lock:
            sessions = list(self._sessions)
        for session in sessions:
            session.close()

    def ended(self, session: Session) -> None:
        """By the session itself, at the very end."""
        with self._lock:
            self._sessions.discard(session)

    def _serve(self, sock: socket.socket, writable: bool) -> None:
        session = self.make_session(sock, writable)
        with self._lock:
            welcome = len(self._sessions) < MAX_CONNECTIONS
            if welcome:
                self._sessions.add(session)
        try:
            if welcome:
                session.start()
        except RuntimeError:  # no more threads
            self.ended(session)
            welcome = False
        if not welcome:
            sock.close()


class TcpExport(ServedExport):
    """Serves the region by the sockets themselves."""

    def __init__(
        self, region: memoryview, host: str, *, writable: bool, io_timeout_s: float = IO_TIMEOUT_S
    ) -> None:
        self._region = region
        self._io_timeout_s = io_timeout_s
        super().__init__(len(region), host, writable=writable)

    def make_session(self, sock: socket.socket, writable: bool) -> Session:
        region = self._region if writable else self._region.toreadonly()
        return _TcpSession(sock, region, self._io_timeout_s, self.ended)


@dataclass(slots=True)
class _Knock:
    """Who has not said hello yet, and what was heard."""

    deadline: float
    heard: bytearray = field(default_factory=bytearray)


class Door:
    """Accepts connections and passes on those that present the card's token.

    The others cost no thread, and are few and short-lived.
    """

    def __init__(
        self,
        listener: socket.socket,
        card: wire.Card,
        enter: Callable[[socket.socket, bool], None],
    ) -> None:
        self._listener = listener
        self._card = card
        self._enter = enter
        self._knocks: dict[socket.socket, _Knock] = {}  # the oldest first
        self._selector = selectors.DefaultSelector()
        self._closing, self._closer = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="kv-tcp-accept", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Idempotent."""
        self._closer.close()
        self._thread.join()

    def _run(self) -> None:
        with self._selector as selector, self._closing, self._listener:
            selector.register(self._closing, selectors.EVENT_READ)
            selector.register(self._listener, selectors.EVENT_READ, self._accept)
            while True:
                for key, _ in selector.select(self._wait_s()):
                    if key.data is None:
                        for sock in self._knocks:
                            sock.close()
                        return
                    key.data(key.fileobj)
                now = time.monotonic()
                for sock in [s for s, knock in self._knocks.items() if knock.deadline <= now]:
                    self._forget(sock).close()

    def _wait_s(self) -> float | None:
        for knock in self._knocks.values():
            return max(knock.deadline - time.monotonic(), 0)
        return None

    def _accept(self, listener: socket.socket) -> None:
        if len(self._knocks) >= MAX_KNOCKING:
            self._forget(next(iter(self._knocks))).close()
        try:
            sock, _ = listener.accept()
        except BlockingIOError:
            return
        except OSError:
            # Out of descriptors, most likely: the listener stays readable, so don't spin on it.
            pause = select.poll()
            pause.register(self._closing, select.POLLIN)
            pause.poll(50)
            return
        sock.setblocking(False)
        self._knocks[sock] = _Knock(time.monotonic() + HELLO_TIMEOUT_S)
        self._selector.register(sock, selectors.EVENT_READ, self._hear)

    def _hear(self, sock: socket.socket) -> None:
        knock = self._knocks.get(sock)
        if knock is None:  # it made room for another in this very round
            return
        try:
            data = sock.recv(wire.HELLO.size - len(knock.heard))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        knock.heard += data
        if not data or not wire.MAGIC.startswith(knock.heard[: len(wire.MAGIC)]):
            self._forget(sock).close()
        elif len(knock.heard) == wire.HELLO.size:
            self._forget(sock)
            writable = self._judge(knock.heard)
            if writable is None:
                sock.close()
            else:
                self._enter(sock, writable)

    def _judge(self, hello: bytearray) -> bool | None:
        """Whether the peer may write; None if it may do nothing."""
        _, version, flags, num_bytes, token = wire.HELLO.unpack(hello)
        known = hmac.compare_digest(token, self._card.token)
        if not known or version != wire.VERSION or num_bytes != self._card.num_bytes:
            return None
        writable = bool(flags & wire.WRITABLE)
        return None if writable and not self._card.writable else writable

    def _forget(self, sock: socket.socket) -> socket.socket:
        self._selector.unregister(sock)
        del self._knocks[sock]
        return sock


class Refused(Exception):
    """The peer asked for what it can't have, or went away in the middle of something."""


class Session(abc.ABC):
    """One connection, from its hello on, and the thread that serves it."""

    def __init__(
        self, sock: socket.socket, io_timeout_s: float, ended: Callable[[Session], None]
    ) -> None:
        self.socket = sock
        self.io_timeout_s = io_timeout_s
        self._ended = ended
        self._lock = threading.Lock()  # so that close() never meets a descriptor used anew
        self._thread = threading.Thread(target=self._run, name="kv-serve", daemon=True)

    @abc.abstractmethod
    def serve(self) -> None:
        """Until the peer has ended, or something is wrong: Refused or an OSError."""

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        with self._lock, contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()

    def receive(self, into: bytearray, *, between_requests: bool = False) -> bool:
        """Fill `into`. False if the peer ended where it may, between requests, for which there is
        no timeout either."""
        view = memoryview(into)
        while view:
            try:
                got = self.socket.recv_into(view)
            except BlockingIOError:
                if between_requests and len(view) == len(into):
                    continue
                raise
            if not got:
                return False
            view = view[got:]
        return True

    def _run(self) -> None:
        try:
            self._prepare()
            self.socket.sendall(wire.WELCOME.pack(wire.WELCOME_MAGIC, wire.VERSION))
            self.serve()
        except (OSError, Refused):
            pass
        finally:
            with self._lock:
                self.socket.close()
            self._ended(self)

    def _prepare(self) -> None:
        # The kernel's own timeouts: Python's would add a poll to each call.
        self.socket.setblocking(True)
        seconds, rest = divmod(self.io_timeout_s, 1)
        timeout = struct.pack("@ll", int(seconds), int(rest * 1e6))
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
        wire.tune(self.socket)


class _TcpSession(Session):
    """A region that is read-only is not written."""

    def __init__(
        self,
        sock: socket.socket,
        region: memoryview,
        io_timeout_s: float,
        ended: Callable[[Session], None],
    ) -> None:
        super().__init__(sock, io_timeout_s, ended)
        self._region = region
        self._gone = select.poll()
        self._gone.register(sock, select.POLLRDHUP)

    def serve(self) -> None:
        head = bytearray(wire.REQUEST.size)
        while self.receive(head, between_requests=True):
            self._answer(*wire.REQUEST.unpack(head))

    def _answer(self, op: int, count: int, size: int) -> None:
        if not (0 < count <= wire.MAX_PIECES and 0 < size <= len(self._region)):
            raise Refused
        packed = bytearray(8 * count)
        if not self.receive(packed):
            raise Refused
        offsets = wire.unpack_offsets(packed)
        if max(offsets) + size > len(self._region):
            raise Refused
        views = deque(self._region[offset : offset + size] for offset in offsets)
        if op == wire.READ:
            while views:
                wire.advance(views, self.socket.sendmsg(views))
        elif op == wire.WRITE and not self._region.readonly:
            self._fill(views, max(_RECEIVE_BYTES // size, 1))
        else:
            raise Refused

    def _fill(self, views: deque[memoryview], at_once: int) -> None:
        while views:
            if self._gone.poll(0):
                raise Refused  # what is still in our buffer is not to be written any more
            got = self.socket.recvmsg_into(list(islice(views, at_once)))[0]
            if not got:
                raise Refused
            if ended := wire.advance(views, got):
                self.socket.sendall(wire.ACK * ended)


def listen(host: str) -> socket.socket:
    """A non-blocking listener on a free port of the host's address. Raise ConfigError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setblocking(False)
            listener.bind(address)
            listener.listen(256)
        except OSError:
            listener.close()
            raise
        return listener
    except OSError as error:
        raise ConfigError(f"Workers can't listen on {host}: {error}.") from error
