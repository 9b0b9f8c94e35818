"""What is `tcp`'s own: who may enter, what a hostile peer can't do, and that it all goes on."""

from __future__ import annotations

import contextlib
import gc
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitserve.errors import ConfigError, TransferFailed
from splitserve.transport import tcp_server
from splitserve.transport import tcp_wire as wire
from splitserve.transport.segment import Segment
from splitserve.transport.tcp import TcpTransport

from .test_contract import NEVER, NUM_BYTES, NUM_PIECES, SIZE, Peer, offsets

REGION = 1 << 20


class Owner:
    """A region exported in this process, and what it held."""

    def __init__(self, *, writable: bool = False, host: str = "127.0.0.1") -> None:
        self.segment = Segment.create(1, REGION)
        self.bytes = self.segment.blocks[0]
        self.bytes[:] = np.random.default_rng(3).integers(0, 256, REGION, np.uint8)
        self.before = self.bytes.copy()
        self.transport = TcpTransport(self.segment, host, io_timeout_s=1.0)
        self.packed = self.transport.export(writable=writable).card
        self.card = wire.Card.unpack(self.packed)

    def knock(self) -> socket.socket:
        sock = socket.create_connection((self.card.host, self.card.port), 5)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock

    def enter(self, *, writable: bool = False) -> socket.socket:
        """A welcomed connection, to say on it what our reader never would."""
        sock = self.knock()
        sock.sendall(self.card.hello(writable=writable))
        assert wire.WELCOME.unpack(receive(sock, wire.WELCOME.size))[1] == wire.VERSION
        return sock

    def check_it_serves(self) -> None:
        with contextlib.closing(Reader()) as reader:
            link = reader.transport.open(self.packed, [], REGION)
            assert sorted(link.read([0, 5000], [7, 90_000], 4096, NEVER)) == [0, 1]
            assert np.array_equal(reader.bytes[7:4103], self.bytes[:4096])
            assert np.array_equal(reader.bytes[90_000:94_096], self.bytes[5000:9096])

    def close(self) -> None:
        self.transport.close()
        self.segment.close()


class Reader:
    def __init__(self) -> None:
        self.segment = Segment.create(1, REGION)
        self.bytes = self.segment.blocks[0]
        self.transport = TcpTransport(self.segment)

    def close(self) -> None:
        self.transport.close()
        self.segment.close()


def receive(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size and (more := sock.recv(size - len(data))):
        data += more
    return data


def is_ended(sock: socket.socket) -> bool:
    """Whether the other side ends the connection without a word."""
    sock.settimeout(5)
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


@pytest.fixture
def owner() -> Iterator[Owner]:
    owner = Owner()
    yield owner
    owner.close()


@pytest.fixture
def zone() -> Iterator[Owner]:
    zone = Owner(writable=True)
    yield zone
    zone.close()


@pytest.fixture
def reader() -> Iterator[Reader]:
    reader = Reader()
    yield reader
    reader.close()


@pytest.fixture
def frozen() -> Iterator[Peer]:
    """A process that exports a region, and will be stopped."""
    peer = Peer("tcp", writable=True)
    yield peer
    peer.close()


def hello(card: wire.Card, **changed: object) -> bytes:
    fields: dict[str, object] = {
        "magic": wire.MAGIC,
        "version": wire.VERSION,
        "flags": 0,
        "size": card.num_bytes,
        "token": card.token,
    }
    return wire.HELLO.pack(*(fields | changed).values())


@pytest.mark.parametrize(
    "changed",
    [
        {"token": bytes(wire.TOKEN_BYTES)},
        {"token": secrets.token_bytes(wire.TOKEN_BYTES)},
        {"magic": b"HTTP"},
        {"version": wire.VERSION + 1},
        {"size": REGION + 1},
        {"flags": wire.WRITABLE},
    ],
)
def test_a_wrong_hello_is_not_answered(owner: Owner, changed: dict[str, object]) -> None:
    with owner.knock() as sock:
        sock.sendall(hello(owner.card, **changed))
        assert is_ended(sock)
    owner.check_it_serves()


@pytest.mark.parametrize(
    "garbage", [b"GET / HTTP/1.1\r\n\r\n", b"\x00", b"SsKX", secrets.token_bytes(5000)]
)
def test_garbage_is_not_answered(owner: Owner, garbage: bytes) -> None:
    with owner.knock() as sock:
        sock.sendall(garbage)
        assert is_ended(sock)
    owner.check_it_serves()


def test_a_reader_with_a_wrong_token_is_refused(owner: Owner, reader: Reader) -> None:
    card = wire.Card(**{**fields(owner.card), "token": bytes(wire.TOKEN_BYTES)})
    with pytest.raises(TransferFailed):
        reader.transport.open(card.pack(), [], REGION)
    owner.check_it_serves()


def fields(card: wire.Card) -> dict[str, object]:
    return {name: getattr(card, name) for name in wire.Card.__slots__}


def test_who_says_half_a_hello_is_dropped_in_time(owner: Owner) -> None:
    with owner.knock() as silent, owner.knock() as half:
        half.sendall(owner.card.hello(writable=False)[:20])
        start = time.monotonic()
        owner.check_it_serves()
        assert is_ended(silent)
        assert is_ended(half)
        assert time.monotonic() - start < tcp_server.HELLO_TIMEOUT_S + 1


def test_a_crowd_at_the_door_keeps_nobody_out(owner: Owner) -> None:
    threads = threading.active_count()
    with contextlib.ExitStack() as stack:
        crowd = [stack.enter_context(owner.knock()) for _ in range(3 * tcp_server.MAX_KNOCKING)]
        assert threading.active_count() == threads
        owner.check_it_serves()
        assert is_ended(crowd[0])


def test_a_card_of_another_version_is_refused(owner: Owner, reader: Reader) -> None:
    packed = bytearray(owner.packed)
    packed[5] += 1
    with pytest.raises(TransferFailed, match="version"):
        reader.transport.open(bytes(packed), [], REGION)


@pytest.mark.parametrize("host", ["a\0b", "." * 300, "no such host", "192.0.2.300"])
def test_a_card_that_leads_nowhere_is_refused(owner: Owner, reader: Reader, host: str) -> None:
    card = wire.Card(**{**fields(owner.card), "host": host})
    with pytest.raises(TransferFailed):
        reader.transport.open(card.pack(), [], REGION)


@pytest.mark.parametrize("op", [wire.READ, wire.WRITE])
@pytest.mark.parametrize(
    ("at", "size"),
    [
        ([REGION - 99], 100),
        ([0, REGION], 1),
        ([0], REGION + 1),
        ([2**64 - 50], 100),
        ([0], 2**64 - 1),
        ([0], 0),
        ([], 100),
        ([0] * (wire.MAX_PIECES + 1), 100),
    ],
)
def test_a_request_beyond_the_region_ends_the_connection(
    zone: Owner, op: int, at: list[int], size: int
) -> None:
    with zone.enter(writable=True) as sock:
        sock.sendall(wire.pack_request(op, at, size))
        with contextlib.suppress(OSError):
            sock.sendall(b"\xee" * 200)
        assert is_ended(sock)
    assert np.array_equal(zone.bytes, zone.before)
    zone.check_it_serves()


def test_an_unknown_request_ends_the_connection(owner: Owner) -> None:
    with owner.enter() as sock:
        sock.sendall(wire.pack_request(77, [0], 100))
        assert is_ended(sock)
    owner.check_it_serves()


def test_who_did_not_ask_to_write_can_not(zone: Owner) -> None:
    with zone.enter(writable=False) as sock:
        sock.sendall(wire.pack_request(wire.WRITE, [0], 100) + b"\xee" * 100)
        assert is_ended(sock)
    assert np.array_equal(zone.bytes, zone.before)


def test_a_client_that_stops_in_the_middle_is_let_go(zone: Owner) -> None:
    """One that doesn't read its answer, one that doesn't finish its request or its bytes."""
    with zone.enter() as deaf, zone.enter() as dumb, zone.enter(writable=True) as slow:
        deaf.sendall(wire.pack_request(wire.READ, [0] * wire.MAX_PIECES, REGION))
        dumb.sendall(wire.pack_request(wire.READ, [0, 1], 100)[:-3])
        slow.sendall(wire.pack_request(wire.WRITE, [0], 1000) + b"\xee" * 10)
        zone.check_it_serves()
        assert is_ended(dumb)
        assert is_ended(slow)
        deadline = time.monotonic() + 5
        while any(t.name == "kv-serve" for t in threading.enumerate()):
            assert time.monotonic() < deadline, "still serves who does not read"
            time.sleep(0.02)
    assert np.array_equal(zone.bytes[10:], zone.before[10:])
    zone.check_it_serves()


def test_an_idle_link_stays(owner: Owner, reader: Reader) -> None:
    link = reader.transport.open(owner.packed, [], REGION)
    time.sleep(1.5)  # the owner's I/O timeout is 1 s
    assert list(link.read([0], [0], 100, NEVER)) == [0]


def test_a_writer_that_goes_away_writes_nothing_more(zone: Owner) -> None:
    with zone.enter(writable=True) as sock:
        sock.sendall(wire.pack_request(wire.WRITE, [0], REGION) + b"\xee" * 1000)
    deadline = time.monotonic() + 5
    while any(t.name == "kv-serve" for t in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert np.array_equal(zone.bytes[1000:], zone.before[1000:])
    zone.check_it_serves()


def test_a_broken_link_reconnects_for_the_next_transfer(owner: Owner, reader: Reader) -> None:
    link = reader.transport.open(owner.packed, [], REGION)
    everything = list(range(0, REGION, 4096))
    pieces = link.read(everything, everything, 4096, NEVER)
    next(pieces)
    pieces.close()
    assert list(link.read([0], [5], 100, NEVER)) == [0]
    link.close()
    with pytest.raises(TransferFailed, match="closed"):
        list(link.read([0], [5], 100, NEVER))


@pytest.mark.parametrize("way", ["read", "write"])
def test_a_frozen_peer_does_not_delay_a_cancellation(frozen: Peer, way: str) -> None:
    segment = Segment.create(1, NUM_BYTES)
    transport = TcpTransport(segment)
    link = transport.open(frozen.card, [], NUM_BYTES, writable=True)
    frozen.process.send_signal(signal.SIGSTOP)
    cancelled = threading.Event()
    timer = threading.Timer(0.3, cancelled.set)
    timer.start()
    at = offsets(*range(NUM_PIECES)) * 20  # more than the kernel's buffers hold
    start = time.monotonic()
    with pytest.raises(TransferFailed, match="cancelled"):
        list(getattr(link, way)(at, at, SIZE, cancelled))
    assert 0.25 < time.monotonic() - start < 0.6
    timer.join()
    segment.blocks[:] = 9
    frozen.process.send_signal(signal.SIGCONT)
    time.sleep(0.2)
    assert (segment.blocks == 9).all()
    transport.close()
    segment.close()


def test_a_frozen_peer_can_not_be_opened_for_long(frozen: Peer, reader: Reader) -> None:
    frozen.process.send_signal(signal.SIGSTOP)
    start = time.monotonic()
    with pytest.raises(TransferFailed, match="no answer"):
        reader.transport.open(frozen.card, [], NUM_BYTES)
    assert time.monotonic() - start < 3


def test_many_links_at_once(owner: Owner) -> None:
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(3):
                owner.check_it_serves()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_nothing_stays_behind() -> None:
    gc.collect()
    threads, descriptors = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    owner = Owner()
    owner.check_it_serves()
    knocking, entered = owner.knock(), owner.enter()
    owner.close()
    owner.close()
    assert is_ended(knocking)
    assert is_ended(entered)
    knocking.close()
    entered.close()
    assert set(threading.enumerate()) == threads
    del owner  # its mapping has a descriptor of its own
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_serves_on_ipv6() -> None:
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    try:
        owner = Owner(host="::1")
    except ConfigError:
        pytest.skip("no IPv6 here")
    owner.check_it_serves()
    owner.close()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", ""])
def test_an_address_that_peers_can_not_reach_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match="reach"):
        TcpTransport(Segment.create(1, 4096), host)


def test_an_address_that_is_not_ours_is_refused() -> None:
    with pytest.raises(ConfigError, match="listen"):
        TcpTransport(Segment.create(1, 4096), "192.0.2.1").export()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_pieces_arrive_and_nothing_else_changes(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 20_000), "size")
    slots = REGION // size
    count = data.draw(st.integers(0, min(slots, 600)), "count")
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32), "seed"))
    slack = int(rng.integers(0, REGION - slots * size + 1))
    there = [int(x) for x in rng.integers(0, REGION - size + 1, count)]
    here = [int(x) * size + slack for x in rng.choice(slots, count, replace=False)]
    with contextlib.closing(Owner(writable=True)) as owner, contextlib.closing(Reader()) as reader:
        streams = data.draw(st.integers(1, 4), "streams")
        reader.transport.num_streams = streams
        reader.bytes[:] = 7
        link = reader.transport.open(owner.packed, [], REGION, writable=True)
        if data.draw(st.booleans(), "write"):
            source, target, move = reader.bytes, owner.bytes, link.write
            source[:] = rng.integers(0, 256, REGION, np.uint8)
            pairs = list(zip(there, here, strict=True))  # the disjoint ones are the targets
            there, here = [b for _, b in pairs], [a for a, _ in pairs]
            froms, tos = here, there
        else:
            source, target, move = owner.bytes, reader.bytes, link.read
            froms, tos = there, here
        expected, unchanged = target.copy(), source.copy()
        for a, b in zip(froms, tos, strict=True):
            expected[b : b + size] = source[a : a + size]
        assert sorted(move(there, here, size, NEVER)) == list(range(count))
        assert np.array_equal(target, expected)
        assert np.array_equal(source, unchanged)
