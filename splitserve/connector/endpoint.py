"""Where a side channel listens, and how the two ends know each other.

On one host: a Unix socket in the abstract namespace. It has no file, so nothing stays behind, and
it is gone when its owner dies; only processes of our own user are answered (SO_PEERCRED). Between
hosts, or network namespaces: tcp, where each end proves that it has the cluster's token before
anything else is said (HMAC-SHA256 over both ends' nonces), so that nobody who merely reaches the
port can read or end a lease. The token itself never travels.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import socket
import struct
import time

from splitserve.transport import tcp_server

_NONCE_BYTES = 16
_PROOF_BYTES = 32
PROOF_SIZE = _NONCE_BYTES + _PROOF_BYTES  # what a reader sends first over tcp


def listen(host: str, name: str) -> tuple[socket.socket, str]:
    """A listening socket and its address; `host` empty means a Unix socket called `name`.

    Raise ConfigError if the host's address can't be had.
    """
    if not host:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        listener.bind("\0" + name)
        listener.listen(64)
        return listener, f"unix:{name}"
    listener = tcp_server.listen(host)
    return listener, f"tcp:{host}:{listener.getsockname()[1]}"


def is_own_user(connection: socket.socket) -> bool:
    """Whether the other end of a Unix socket runs as our user."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    _, uid, _ = struct.unpack("3i", credentials)
    return bool(uid == os.getuid())


def connect(address: str, token: bytes, timeout_s: float) -> socket.socket:
    """A connection to a source that has the token too; raise OSError."""
    kind, _, rest = address.partition(":")
    if kind == "unix":
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        connection.settimeout(timeout_s)
        try:
            connection.connect("\0" + rest)
        except OSError:
            connection.close()
            raise
        return connection
    host, _, port = rest.rpartition(":")
    if kind != "tcp" or not port.isdigit():
        raise ConnectionError(f"an unreadable address {address!r}")
    connection = socket.create_connection((host, int(port)), timeout_s)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _prove_to_source(connection, token, time.monotonic() + timeout_s)
        connection.settimeout(timeout_s)
    except OSError:
        connection.close()
        raise
    return connection


def _prove_to_source(connection: socket.socket, token: bytes, deadline_s: float) -> None:
    theirs = _receive(connection, _NONCE_BYTES, deadline_s)
    ours = secrets.token_bytes(_NONCE_BYTES)
    connection.sendall(ours + _proof(token, b"reader", theirs, ours))
    proof = _receive(connection, _PROOF_BYTES, deadline_s)
    if not hmac.compare_digest(proof, _proof(token, b"source", ours, theirs)):
        raise ConnectionError("the source does not have the cluster's token")


class Challenge:
    """The source's side of the tcp handshake, for one connection."""

    def __init__(self, token: bytes) -> None:
        self.nonce = secrets.token_bytes(_NONCE_BYTES)
        self._token = token

    def answer(self, data: bytes) -> bytes | None:
        """What to send back to a reader that sent these PROOF_SIZE bytes; None: close."""
        theirs, proof = data[:_NONCE_BYTES], data[_NONCE_BYTES:]
        if not hmac.compare_digest(proof, _proof(self._token, b"reader", self.nonce, theirs)):
            return None
        return _proof(self._token, b"source", theirs, self.nonce)


def _proof(token: bytes, who: bytes, theirs: bytes, ours: bytes) -> bytes:
    return hmac.digest(token, who + theirs + ours, hashlib.sha256)


def _receive(connection: socket.socket, size: int, deadline_s: float) -> bytes:
    data = b""
    while len(data) < size:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the source did not answer in time")
        connection.settimeout(left_s)
        more = connection.recv(size - len(data))
        if not more:
            raise ConnectionError("the source closed the connection")
        data += more
    return data
