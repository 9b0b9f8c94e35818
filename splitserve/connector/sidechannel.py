"""The side channel between two workers: handshake, confirm, done. Control only, never KV.

Messages are a 4-byte length and msgpack; the handshake compares versions, identity, format and
epoch before anything else. Who may connect at all: `connector.endpoint`.
"""

from __future__ import annotations

import itertools
import logging
import os
import select
import selectors
import socket
import struct
import threading
from collections.abc import Callable, Sequence

import msgspec

from splitserve.connector import endpoint
from splitserve.errors import FormatMismatch, TransferFailed
from splitserve.kv.format import KVFormat
from splitserve.wire import Part

log = logging.getLogger(__name__)

SIDE_CHANNEL_VERSION = 3
"""2: the welcome carries the transport's card; landing zones. 3: Find; formats may be unequal."""
_MAX_MESSAGE_BYTES = 1 << 22  # keys or digests of two million tokens
_RECEIVE_BYTES = 1 << 16
_MAX_DESCRIPTORS = 8
_MAX_STRANGERS = 32  # connections over tcp that have not proved the token yet


class PeerHello(msgspec.Struct, frozen=True, tag="hello"):
    """The first message, of a reader of the pool or of a writer to the zone."""

    version: int
    epoch: str  # the owner's epoch that the offer or the landing named
    transport: str
    identity: bytes
    format: KVFormat
    to_zone: bool = False
    is_question: bool = False  # the region is not wanted, only answers


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """Accepted; the transport's descriptors come with it.

    card: what opens the region, opaque to all but the transport. format: of its blocks.
    """

    num_blocks: int
    card: bytes
    format: KVFormat


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    reason: str


class Confirm(msgspec.Struct, frozen=True, tag="confirm"):
    """Did this lease hold until now?"""

    lease_id: str


class Confirmed(msgspec.Struct, frozen=True, tag="confirmed"):
    held: bool


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """May I write to this landing, until I say `Ended` or my connection closes?"""

    landing_id: str


class Begun(msgspec.Struct, frozen=True, tag="begun"):
    granted: bool


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """This writer touches the landing no more. No answer."""

    landing_id: str


class Done(msgspec.Struct, frozen=True, tag="done"):
    """This reader needs the lease no more. No answer."""

    lease_id: str


class Find(msgspec.Struct, frozen=True, tag="find"):
    """Which of these blocks, leading ones of a prompt, do you have? first: index of keys[0].

    Several may be asked before the first is answered; number tells their answers apart.
    """

    number: int
    keys: list[bytes]
    first: int


class FoundHere(msgspec.Struct, frozen=True, tag="found"):
    """The answer, after the owner's step: leased blocks, or none."""

    number: int
    part: Part | None


FromReader = PeerHello | Confirm | Done | Begin | Ended | Find
FromSource = Welcome | Refused | Confirmed | Begun | FoundHere
_encoder = msgspec.msgpack.Encoder()
_from_reader = msgspec.msgpack.Decoder(FromReader)
_from_source = msgspec.msgpack.Decoder(FromSource)


def _pack(message: FromReader | FromSource) -> bytes:
    payload = _encoder.encode(message)
    return struct.pack("<I", len(payload)) + payload


class SideChannelServer:
    """The source's end: one thread answers all readers, also in the middle of an engine step."""

    def __init__(
        self,
        name: str,
        answer: Callable[[FromReader, int], tuple[FromSource | None, list[int]]],
        closed: Callable[[int], None] = lambda peer: None,
        host: str = "",
        token: bytes = b"",
    ) -> None:
        self._answer = answer
        self._closed = closed
        self._numbers = itertools.count()
        self._peers: dict[socket.socket, int] = {}  # a number for each connection, never used again
        self._lock = threading.Lock()
        self._connections: dict[int, socket.socket] = {}  # the other way round, under the lock
        self._token = token
        self._listener, self.address = endpoint.listen(host, name)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._stop_read, self._stop_write = os.pipe2(os.O_CLOEXEC)
        self._selector.register(self._stop_read, selectors.EVENT_READ)
        self._buffers: dict[socket.socket, bytearray] = {}
        self._strangers: dict[socket.socket, endpoint.Challenge] = {}  # oldest first
        self._thread = threading.Thread(target=self._serve, name="kv-side-channel", daemon=True)
        self._thread.start()

    def send(self, peer: int, message: FromSource) -> bool:
        """Answer a connection later than at once; any thread. False if it is gone. It waits for
        nothing else, so no two answers of it can mix."""
        with self._lock:
            connection = self._connections.get(peer)
            if connection is None:
                return False
            try:
                connection.sendall(_pack(message))
            except OSError as error:
                log.warning("side channel: an answer was lost: %s", error)
                return False
        return True

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
        try:
            connection, _ = self._listener.accept()
        except OSError as error:  # it gave up before, or we are out of descriptors
            log.warning("side channel: no connection accepted: %s", error)
            return
        try:
            self._greet(connection)
        except OSError as error:
            log.warning("side channel: dropped a reader: %s", error)
            self._strangers.pop(connection, None)
            connection.close()

    def _greet(self, connection: socket.socket) -> None:
        # A reader that does not read its answers must not block the others: they are small and
        # fit the socket's buffer, and one that sends without reading is dropped.
        connection.settimeout(1.0)
        if connection.family is not socket.AF_UNIX:
            challenge = endpoint.Challenge(self._token)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(challenge.nonce)
            while len(self._strangers) >= _MAX_STRANGERS:
                self._drop(next(iter(self._strangers)))
            self._strangers[connection] = challenge
        elif not endpoint.is_own_user(connection):
            log.warning("side channel: refused a process of another user")
            connection.close()
            return
        self._buffers[connection] = bytearray()
        peer = self._peers[connection] = next(self._numbers)
        with self._lock:
            self._connections[peer] = connection
        self._selector.register(connection, selectors.EVENT_READ)

    def _admit(self, connection: socket.socket, buffer: bytearray) -> None:
        """The first bytes over tcp prove that the reader has the token."""
        if len(buffer) < endpoint.PROOF_SIZE:
            return
        reply = self._strangers[connection].answer(bytes(buffer[: endpoint.PROOF_SIZE]))
        if reply is None:
            raise ConnectionError("it does not have the cluster's token")
        del buffer[: endpoint.PROOF_SIZE]
        del self._strangers[connection]
        connection.sendall(reply)

    def _receive(self, connection: socket.socket) -> None:
        if connection not in self._buffers:  # dropped since the selector saw it
            return
        try:
            data = connection.recv(_RECEIVE_BYTES)
            if not data:
                raise ConnectionError("closed")
            buffer = self._buffers[connection]
            buffer += data
            if connection in self._strangers:
                self._admit(connection, buffer)
            while connection not in self._strangers and len(buffer) >= 4:
                (length,) = struct.unpack_from("<I", buffer)
                if length > _MAX_MESSAGE_BYTES:
                    raise ConnectionError(f"a message of {length} bytes")
                if len(buffer) < 4 + length:
                    break
                message = _from_reader.decode(bytes(buffer[4 : 4 + length]))
                del buffer[: 4 + length]
                reply, descriptors = self._answer(message, self._peers[connection])
                if descriptors and connection.family is not socket.AF_UNIX:
                    raise ConnectionError("descriptors can't be passed over tcp")
                if descriptors:
                    socket.send_fds(connection, [_pack(reply)] if reply else [], descriptors)
                elif reply is not None:
                    connection.sendall(_pack(reply))
        except (OSError, msgspec.MsgspecError) as error:
            if str(error) != "closed":
                log.warning("side channel: dropped a reader: %s", error)
            self._drop(connection)

    def _drop(self, connection: socket.socket) -> None:
        self._buffers.pop(connection, None)
        self._strangers.pop(connection, None)
        self._selector.unregister(connection)
        peer = self._peers.pop(connection, None)
        with self._lock:
            if peer is not None:
                del self._connections[peer]
            connection.close()
        if peer is not None:
            self._closed(peer)


class SideChannel:
    """The reader's end: a connection to one source. Thread-safe, one exchange at a time."""

    def __init__(
        self, address: str, hello: PeerHello, timeout_s: float, token: bytes = b""
    ) -> None:
        self._lock = threading.Lock()
        self._unread = bytearray()
        try:
            self._socket = endpoint.connect(address, token, timeout_s)
        except OSError as error:
            raise TransferFailed(f"The source is gone ({error}).") from error
        try:
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
        self.format = reply.format

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
        self._tell(Done(lease_id))

    def begin(self, landing_id: str) -> bool:
        """The owner's leave to write to a landing; False also if it can't be reached."""
        try:
            reply, _ = self._exchange(Begin(landing_id))
        except OSError:
            self.close()
            return False
        return isinstance(reply, Begun) and reply.granted

    def find(self, questions: Sequence[tuple[list[bytes], int]]) -> list[Part | None]:
        """What the source lends us of the blocks of each (keys, first), asked all at once; raise
        TransferFailed if it does not answer them all in time."""
        answers: dict[int, Part | None] = {}
        try:
            with self._lock:
                for number, (keys, first) in enumerate(questions):
                    self._socket.sendall(_pack(Find(number, keys, first)))
                while len(answers) < len(questions):
                    reply, _ = self._receive()
                    if isinstance(reply, FoundHere):
                        answers[reply.number] = reply.part
        except OSError as error:
            self.close()
            raise TransferFailed(f"The source did not answer ({error}).") from error
        return [answers[number] for number in range(len(questions))]

    def ended(self, landing_id: str) -> None:
        """Tell the owner; if it is gone, so is the landing."""
        self._tell(Ended(landing_id))

    def _tell(self, message: FromReader) -> None:
        try:
            with self._lock:
                self._socket.sendall(_pack(message))
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

    def _exchange(self, message: FromReader) -> tuple[FromSource, list[int]]:
        with self._lock:
            self._socket.sendall(_pack(message))
            return self._receive()

    def _unread_size(self) -> int:
        """Of the message that begins the unread bytes, as far as that is known."""
        if len(self._unread) < 4:
            return 4
        return 4 + int(struct.unpack_from("<I", self._unread)[0])

    def _receive(self) -> tuple[FromSource, list[int]]:
        """The next message; what came with it of the one after is kept. Raise OSError."""
        descriptors: list[int] = []
        while len(self._unread) < (size := self._unread_size()):
            data, passed, _, _ = socket.recv_fds(self._socket, _RECEIVE_BYTES, _MAX_DESCRIPTORS)
            descriptors += passed
            if not data:
                raise ConnectionError("the source closed the connection")
            self._unread += data
        payload = bytes(self._unread[4:size])
        del self._unread[:size]
        try:
            return _from_source.decode(payload), descriptors
        except msgspec.MsgspecError as error:
            raise ConnectionError(f"an unreadable answer: {error}") from error
