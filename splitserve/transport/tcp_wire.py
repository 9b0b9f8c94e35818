"""What transport `tcp` puts on the wire. All numbers are big-endian.

    reader                                    exporter
    HELLO magic version flags size token ──►          nothing is said before this is right
                       ◄── WELCOME magic version
    REQUEST op count size, count offsets ──►          many may be under way
                       ◄── READ: the pieces' bytes, one after the other, in the request's order
    WRITE: the pieces' bytes likewise    ──►
                       ◄── WRITE: one ACK byte for each piece that is in place

There is no status and no error frame: whoever finds something wrong ends the connection.
The token proves that the side channel's welcome was received. It hides nothing from those who can
listen on the network between the workers: that network has to be trusted, as for RDMA.

Versions: 1, the first.
"""

from __future__ import annotations

import array
import socket
import struct
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from splitserve.errors import TransferFailed

MAGIC = b"SsKV"
WELCOME_MAGIC = b"SsKW"
"""Not the same: a socket that the kernel connected to itself must not be welcomed by its hello."""
VERSION = 1
TOKEN_BYTES = 32
WRITABLE = 1
"""The only flag, of a card and of a hello."""

HELLO = struct.Struct(f"!4sHHQ{TOKEN_BYTES}s")
WELCOME = struct.Struct("!4sH")
REQUEST = struct.Struct("!BHQ")
READ, WRITE = 1, 2
ACK = b"\x06"
MAX_PIECES = 256
"""Of one request."""

_CARD = struct.Struct(f"!4sHHHQ{TOKEN_BYTES}s")


@dataclass(frozen=True, slots=True)
class Card:
    """How to reach a region, for those who may."""

    host: str
    port: int
    num_bytes: int
    writable: bool
    token: bytes

    def pack(self) -> bytes:
        fields = (MAGIC, VERSION, self.writable * WRITABLE, self.port, self.num_bytes, self.token)
        return _CARD.pack(*fields) + self.host.encode()

    @classmethod
    def unpack(cls, data: bytes) -> Card:
        """Raise TransferFailed if it is not a card of this version."""
        try:
            magic, version, flags, port, num_bytes, token = _CARD.unpack_from(data)
            host = data[_CARD.size :].decode()
        except (struct.error, UnicodeDecodeError) as error:
            raise TransferFailed("The peer's tcp card can't be read.") from error
        if magic != MAGIC or not host:
            raise TransferFailed("The peer's tcp card can't be read.")
        if version != VERSION:
            raise TransferFailed(f"The peer's tcp transport has version {version}, ours {VERSION}.")
        return cls(host, port, num_bytes, bool(flags & WRITABLE), token)

    def hello(self, *, writable: bool) -> bytes:
        """What opens a connection to it."""
        return HELLO.pack(MAGIC, VERSION, writable * WRITABLE, self.num_bytes, self.token)


def pack_request(op: int, offsets: Sequence[int], size: int) -> bytes:
    """`size` bytes at each of the peer's `offsets`."""
    return REQUEST.pack(op, len(offsets), size) + pack_offsets(offsets)


def pack_offsets(offsets: Sequence[int]) -> bytes:
    return _swapped(array.array("Q", offsets)).tobytes()


def unpack_offsets(data: bytes | bytearray) -> Sequence[int]:
    """The offsets behind a request's head."""
    return _swapped(array.array("Q", bytes(data)))


def _swapped(offsets: array.array[int]) -> array.array[int]:
    if sys.byteorder == "little":
        offsets.byteswap()
    return offsets


def advance(views: deque[memoryview], num_bytes: int) -> int:
    """Take the first `num_bytes` off `views`, in place; how many of them that ended."""
    ended = 0
    while num_bytes:
        size = len(views[0])
        if num_bytes < size:
            views[0] = views[0][num_bytes:]
            break
        num_bytes -= size
        views.popleft()
        ended += 1
    return ended


def tune(sock: socket.socket) -> None:
    """Requests and acknowledgements leave at once; a peer whose host vanished is noticed.

    The buffers are left to the kernel, which makes them larger than we are allowed to ask for.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
