"""The side channel between two workers: handshake, confirm, done. Control only, never KV.

A Unix socket in the abstract namespace: it has no file, so nothing stays behind, and it is gone
when its owner dies. Only processes of our own user are answered (SO_PEERCRED). Messages are a
4-byte length and msgpack; the handshake compares versions, identity, format and epoch before
anything else.
"""

from __future__ import annotations

import logging
import os
import select
import selectors
import socket
import struct
import threading
from collections.abc import Callable

import msgspec

from splitserve.errors import FormatMismatch, TransferFailed
from splitserve.kv.format import KVFormat

log = logging.getLogger(__name__)

SIDE_CHANNEL_VERSION = 2  # 2: the welcome carries the transport's card
_MAX_MESSAGE_BYTES = 1 << 16
_MAX_DESCRIPTORS = 8


class PeerHello(msgspec.Struct, frozen=True, tag="hello"):
    """The reader's first message."""

    version: int
    epoch: str  # the source's epoch that the offer named
    transport: str
    identity: bytes
    format: KVFormat


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """Accepted; the transport's descriptors come with it.

    card: what opens the region, opaque to all but the transport.
    """

    num_blocks: int
    card: bytes


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    reason: str


class Confirm(msgspec.Struct, frozen=True, tag="confirm"):
    """Did this lease hold until now?"""

    lease_id: str


class Confirmed(msgspec.Struct, frozen=True, tag="confirmed"):
    held: bool


class Done(msgspec.Struct, frozen=True, tag="done"):
    """This reader needs the lease no more. No answer."""

    lease_id: str


_FromReader = PeerHello | Confirm | Done
_FromSource = Welcome | Refused | Confirmed
_encoder = msgspec.msgpack.Encoder()
_from_reader = msgspec.msgpack.Decoder(_FromReader)
_from_source = msgspec.msgpack.Decoder(_FromSource)


def _pack(message: _FromReader | _FromSource) -> bytes:
    payload = _encoder.encode(message)
    return struct.pack("<I", len(payload)) + payload


class SideChannelServer:
    """The source's end: one thread answers all readers, also in the middle of an engine step."""

    def __init__(
        self,
        address: str,
        answer: Callable[[_FromReader], tuple[_FromSource | None, list[int]]],
    ) -> None:
        self.address = address
        self._answer = answer
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._listener.bind("\0" + address)
        self._listener.listen(64)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._stop_read, self._stop_write = os.pipe2(os.O_CLOEXEC)
        self._selector.register(self._stop_read, selectors.EVENT_READ)
        self._buffers: dict[socket.socket, bytearray] = {}
        self._thread = threading.Thread(target=self._serve, name="kv-side-channel", daemon=True)
        self._thread.start()

    def close(self) -> None:
        os.write(self._stop_write, b"x")
        self._thread.join(timeout=5)
        for connection in list(self._buffers):
            self._drop(connection)
        self._selector.close()
        self._listener.close()
        os.close(self._stop_read)
        os.close(self._stop_write)

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._listener:
                    self._accept()
                elif isinstance(key.fileobj, socket.socket):
                    self._receive(key.fileobj)
                else:
                    return

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        _, uid, _ = struct.unpack("3i", credentials)
        if uid != os.getuid():
            log.warning("side channel: refused a process of user %d", uid)
            connection.close()
            return
        # A reader that does not read its answers must not block the others: they are small and
        # fit the socket's buffer, and one that sends without reading is dropped.
        connection.settimeout(1.0)
        self._buffers[connection] = bytearray()
        self._selector.register(connection, selectors.EVENT_READ)

    def _receive(self, connection: socket.socket) -> None:
        try:
            data = connection.recv(_MAX_MESSAGE_BYTES)
            if not data:
                raise ConnectionError("closed")
            buffer = self._buffers[connection]
            buffer += data
            while len(buffer) >= 4:
                (length,) = struct.unpack_from("<I", buffer)
                if length > _MAX_MESSAGE_BYTES:
                    raise ConnectionError(f"a message of {length} bytes")
                if len(buffer) < 4 + length:
                    break
                message = _from_reader.decode(bytes(buffer[4 : 4 + length]))
                del buffer[: 4 + length]
                reply, descriptors = self._answer(message)
                if reply is not None:
                    socket.send_fds(connection, [_pack(reply)], descriptors)
        except (OSError, msgspec.MsgspecError) as error:
            if str(error) != "closed":
                log.warning("side channel: dropped a reader: %s", error)
            self._drop(connection)

    def _drop(self, connection: socket.socket) -> None:
        self._buffers.pop(connection, None)
        self._selector.unregister(connection)
        connection.close()


class SideChannel:
    """The reader's end: a connection to one source. Thread-safe, one exchange at a time."""

    def __init__(self, address: str, hello: PeerHello, timeout_s: float) -> None:
        self._lock = threading.Lock()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._socket.settimeout(timeout_s)
        try:
            self._socket.connect("\0" + address)
            reply, self.descriptors = self._exchange(hello)
        except OSError as error:
            self._socket.close()
            raise TransferFailed(f"The source is gone ({error}).") from error
        if not isinstance(reply, Welcome):
            self._socket.close()
            reason = reply.reason if isinstance(reply, Refused) else f"unexpected {reply}"
            raise FormatMismatch(f"The source refused the handshake: {reason}")
        self.num_blocks = reply.num_blocks
        self.card = reply.card

    def confirm(self, lease_id: str) -> bool:
        """The source's word that the lease held until now; False also if it can't be reached."""
        try:
            reply, _ = self._exchange(Confirm(lease_id))
        except OSError:
            self.close()
            return False
        return isinstance(reply, Confirmed) and reply.held

    def done(self, lease_id: str) -> None:
        """Tell the source; if it is gone, so is the lease."""
        try:
            with self._lock:
                self._socket.sendall(_pack(Done(lease_id)))
        except OSError:
            pass

    @property
    def is_open(self) -> bool:
        """Neither end has closed it. The source never speaks unasked: readable means closed."""
        if self.is_broken:
            return False
        poller = select.poll()  # not recv with MSG_DONTWAIT: a socket with a timeout still waits
        poller.register(self._socket, select.POLLIN)
        return not poller.poll(0)

    @property
    def is_broken(self) -> bool:
        """An exchange failed half way: a late answer would be taken for that of another."""
        return self._socket.fileno() < 0

    def close(self) -> None:
        self._socket.close()

    def _exchange(self, message: _FromReader) -> tuple[_FromSource, list[int]]:
        with self._lock:
            self._socket.sendall(_pack(message))
            data, descriptors, _, _ = socket.recv_fds(
                self._socket, _MAX_MESSAGE_BYTES, _MAX_DESCRIPTORS
            )
            while data and (len(data) < 4 or len(data) < 4 + struct.unpack_from("<I", data)[0]):
                more = self._socket.recv(_MAX_MESSAGE_BYTES)
                if not more:
                    break
                data += more
        if not data:
            raise ConnectionError("the source closed the connection")
        try:
            return _from_source.decode(data[4:]), descriptors
        except msgspec.MsgspecError as error:
            raise ConnectionError(f"an unreadable answer: {error}") from error
