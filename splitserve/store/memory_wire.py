"""What a process and the host's memory server say to each other, over a Unix socket.

Frames: length (uint32, little endian), then a message as MessagePack. The welcome brings the
segment's descriptor. Version 1: the first.
"""

from __future__ import annotations

import os
import socket
import struct
import time

import msgspec

VERSION = 1
MAX_MESSAGE_BYTES = 4 << 20
DIGEST_BYTES = 16

_LENGTH = struct.Struct("<I")


class Hello(msgspec.Struct, tag=True, frozen=True):
    version: int


class Missing(msgspec.Struct, tag=True, frozen=True):
    """Which of these are not there? The answer is Presence. namespace: its digest."""

    namespace: bytes
    keys: list[bytes]
    num_bytes: int


class Acquire(msgspec.Struct, tag=True, frozen=True):
    """Pin the leading ones of these: Acquired."""

    namespace: bytes
    keys: list[bytes]
    num_bytes: int


class Release(msgspec.Struct, tag=True, frozen=True):
    """Those of a lease are copied; `wrong` of them, by number, have other bytes than their digest
    says. No answer."""

    lease: int
    wrong: list[int]


class Reserve(msgspec.Struct, tag=True, frozen=True):
    """Places for those of these that are not there: Reserved."""

    namespace: bytes
    keys: list[bytes]
    num_bytes: int


class Commit(msgspec.Struct, tag=True, frozen=True):
    """What was reserved is filled: Committed."""

    reservation: int
    digests: list[bytes]


class Counts(msgspec.Struct, frozen=True):
    """What is there, all namespaces."""

    num_blocks: int
    num_bytes: int


class Welcome(msgspec.Struct, tag=True, frozen=True):
    """epoch: of this start of the server. num_bytes: of the segment that comes along."""

    version: int
    epoch: str
    num_bytes: int


class Presence(msgspec.Struct, tag=True, frozen=True):
    missing: list[bool]
    counts: Counts


class Acquired(msgspec.Struct, tag=True, frozen=True):
    lease: int
    offsets: list[int]
    digests: list[bytes]
    counts: Counts


class Reserved(msgspec.Struct, tag=True, frozen=True):
    """indices: into the keys. num_evicted: to make these places."""

    reservation: int
    indices: list[int]
    offsets: list[int]
    num_evicted: int


class Committed(msgspec.Struct, tag=True, frozen=True):
    num_saved: int
    counts: Counts


FromClient = Hello | Missing | Acquire | Release | Reserve | Commit
FromServer = Welcome | Presence | Acquired | Reserved | Committed

_encoder = msgspec.msgpack.Encoder()
_from_client: msgspec.msgpack.Decoder[FromClient] = msgspec.msgpack.Decoder(FromClient)
_from_server: msgspec.msgpack.Decoder[FromServer] = msgspec.msgpack.Decoder(FromServer)


class BadFrame(Exception):
    """The peer sent what is no message."""


def pack(message: FromClient | FromServer) -> bytes:
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


def take_message(received: bytearray) -> FromClient | None:
    """The first message of what a client sent, taken out; None if it is not complete yet. Raise
    BadFrame."""
    if len(received) < _LENGTH.size:
        return None
    (size,) = _LENGTH.unpack_from(received)
    if size > MAX_MESSAGE_BYTES:
        raise BadFrame(f"a message of {size} bytes")
    end = _LENGTH.size + size
    if len(received) < end:
        return None
    body = bytes(received[_LENGTH.size : end])
    del received[:end]
    try:
        return _from_client.decode(body)
    except msgspec.MsgspecError as error:
        raise BadFrame(str(error)) from error


def receive(connection: socket.socket, timeout_s: float) -> tuple[FromServer, list[int]]:
    """The server's next message, and the descriptors that came with it. Raise OSError."""
    deadline_s = time.monotonic() + timeout_s
    descriptors: list[int] = []
    try:
        (size,) = _LENGTH.unpack(_receive(connection, _LENGTH.size, deadline_s, descriptors))
        if size > MAX_MESSAGE_BYTES:
            raise ConnectionError(f"the server sent a message of {size} bytes")
        return _from_server.decode(_receive(connection, size, deadline_s, descriptors)), descriptors
    except BaseException as error:
        for fd in descriptors:
            os.close(fd)
        if isinstance(error, msgspec.MsgspecError):
            raise ConnectionError(f"the server sent something unreadable: {error}") from error
        raise


def _receive(
    connection: socket.socket, size: int, deadline_s: float, descriptors: list[int]
) -> bytes:
    data = b""
    while len(data) < size:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the server did not answer in time")
        connection.settimeout(left_s)
        more, fds, _, _ = socket.recv_fds(connection, size - len(data), 1)
        descriptors += fds
        if not more:
            raise ConnectionResetError("the server closed the connection")
        data += more
    return data


def is_own_user(connection: socket.socket) -> bool:
    """Whether the other end runs as our user: anyone can bind, or reach, an abstract name."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    _, uid, _ = struct.unpack("3i", credentials)
    return bool(uid == os.getuid())
