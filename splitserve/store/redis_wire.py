"""The redis protocol (RESP2) without copies: a value goes out from where it lies and comes in to
where it belongs.

The redis client makes three copies of a value that it reads, at 0.5 to 0.8 GB/s, where the socket
brings 2.8. So it opens the connection here (address, password, database), and this reads and
writes it.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence

Buffer = bytes | memoryview
Argument = Buffer | tuple[Buffer, ...]
"""Of a command; a tuple is one value in pieces."""

_SCRATCH_BYTES = 16 << 10
_SMALL_BYTES = 4 << 10


class RedisRefused(Exception):
    """The server answered with an error."""


class BadReply(ConnectionError):
    """What came is not RESP2."""


def pack(commands: Sequence[Sequence[Argument]]) -> list[Buffer]:
    """Buffers to send one after the other: large values as they are, the rest joined."""
    out: list[Buffer] = []
    joined = bytearray()
    for command in commands:
        joined += b"*%d\r\n" % len(command)
        for argument in command:
            pieces = argument if isinstance(argument, tuple) else (argument,)
            joined += b"$%d\r\n" % sum(len(piece) for piece in pieces)
            for piece in pieces:
                if len(piece) <= _SMALL_BYTES:
                    joined += piece
                    continue
                out += [bytes(joined), piece]
                joined.clear()
            joined += b"\r\n"
    return [*out, bytes(joined)]


def limit_waiting(connection: socket.socket, timeout_s: float) -> None:
    """By the kernel's own timeouts: Python's would add a poll to each call, and read by halves."""
    seconds, rest = divmod(timeout_s, 1)
    limit = struct.pack("@ll", int(seconds), int(rest * 1e6))
    connection.setblocking(True)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


Reply = bytes | int | list["Reply"] | RedisRefused | None


class Reader:
    """Replies of one connection, in the order of the commands. Raise OSError."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        self._unread = self._scratch[:0]

    def reply(self) -> Reply:
        """Errors within an answer are values, as in that of EXEC."""
        line = self._line()
        kind, rest = line[:1], line[1:]
        if kind == b"+":
            return rest
        if kind == b"-":
            return RedisRefused(rest.decode(errors="replace"))
        number = _number(rest)
        if kind == b":":
            return number
        if kind == b"*":
            return None if number < 0 else [self.reply() for _ in range(number)]
        if kind == b"$":
            return None if number < 0 else self._value(number)
        raise BadReply(f"an unreadable reply {bytes(line[:40])!r}")

    def array_length(self) -> int:
        """Of the array whose elements come next. Raise RedisRefused."""
        line = self._line()
        if line[:1] == b"-":
            raise RedisRefused(line[1:].decode(errors="replace"))
        if line[:1] != b"*":
            raise BadReply(f"an unreadable reply {bytes(line[:40])!r}")
        return _number(line[1:])

    def value_into(self, head: memoryview, target: memoryview) -> bool | None:
        """Read one value, whose first bytes are `head`'s and the others `target`'s. None: there is
        none; False: it has another size, and is skipped."""
        line = self._line()
        if line[:1] != b"$":
            raise BadReply(f"an unreadable value {bytes(line[:40])!r}")
        size = _number(line[1:])
        if size < 0:
            return None
        fits = size == len(head) + len(target)
        if fits:
            self._fill(head)
            self._fill(target)
        else:
            self._skip(size)
        self._skip(2)
        return fits

    def _value(self, size: int) -> bytes:
        data = bytearray(size)
        self._fill(memoryview(data))
        self._skip(2)
        return bytes(data)

    def _line(self) -> bytes:
        line = b""
        while not line.endswith(b"\r\n"):
            if not self._unread:
                self._receive()
            data = bytes(self._unread[:_SMALL_BYTES])
            cut = data.find(b"\n") + 1 or len(data)
            line += data[:cut]
            self._unread = self._unread[cut:]
            if len(line) > _SMALL_BYTES:
                raise BadReply("an endless line")
        return line[:-2]

    def _fill(self, view: memoryview) -> None:
        num = min(len(view), len(self._unread))
        view[:num] = self._unread[:num]
        self._unread = self._unread[num:]
        while num < len(view):
            more = self._connection.recv_into(view[num:], flags=socket.MSG_WAITALL)
            if not more:
                raise ConnectionResetError("the server closed the connection")
            num += more

    def _skip(self, num_bytes: int) -> None:
        while num_bytes:
            if not self._unread:
                self._receive()
            num = min(num_bytes, len(self._unread))
            self._unread = self._unread[num:]
            num_bytes -= num

    def _receive(self) -> None:
        num = self._connection.recv_into(self._scratch)
        if not num:
            raise ConnectionResetError("the server closed the connection")
        self._unread = self._scratch[:num]


def _number(text: bytes) -> int:
    try:
        return int(text)
    except ValueError:
        raise BadReply(f"a length of {text[:40]!r}") from None
