"""What `transport.base` promises, for each transport that installs here, between two processes.

The peer is a real process with a segment of its own: it can be killed and stopped.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from splitserve.errors import ConfigError, TransferFailed
from splitserve.transport.base import IO_TIMEOUT_S, Link, Transport
from splitserve.transport.registry import TRANSPORTS, is_installed, make_transport
from splitserve.transport.segment import Segment

CROSS_HOST = [name for name in TRANSPORTS if name != "shm"]
NUM_PIECES = 64
SIZE = 24 << 10
NUM_BYTES = NUM_PIECES * SIZE
NEVER = threading.Event()

PEER = """
import os, socket, sys
import numpy as np
from splitserve.transport.registry import make_transport
from splitserve.transport.segment import Segment
name, control, writable, num_bytes, seed = sys.argv[1:]
control = socket.socket(fileno=int(control))
segment = Segment.create(1, int(num_bytes))
segment.blocks[0] = np.random.default_rng(int(seed)).integers(0, 256, int(num_bytes), np.uint8)
transport = make_transport(name, segment)
export = transport.export(writable=writable == "1")
socket.send_fds(control, [export.card or b"-"], export.descriptors())
while True:
    said = control.recv(1)
    if said == b"d":  # dump
        control.sendall(segment.blocks[0].tobytes())
    elif said == b"z":
        segment.blocks[0] = 0
        control.sendall(b"z")
    else:
        break
transport.close()
segment.close()
"""


READER = """
import sys, threading
from splitserve.transport.registry import make_transport
from splitserve.transport.segment import Segment
name, num_bytes, size, card, *descriptors = sys.argv[1:]
segment = Segment.create(1, int(num_bytes))
transport = make_transport(name, segment)
link = transport.open(bytes.fromhex(card), [int(fd) for fd in descriptors], int(num_bytes))
offsets = list(range(0, int(num_bytes), int(size)))
print("open", flush=True)
while True:
    for _ in link.read(offsets, offsets, int(size), threading.Event()):
        pass
"""


class Peer:
    """A process that exports a region of random bytes."""

    def __init__(
        self, name: str, *, writable: bool = False, seed: int = 1, num_bytes: int = NUM_BYTES
    ) -> None:
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.control.settimeout(60)
        arguments = [name, str(theirs.fileno()), str(int(writable)), str(num_bytes), str(seed)]
        self.process = subprocess.Popen(
            [sys.executable, "-c", PEER, *arguments], pass_fds=[theirs.fileno()]
        )
        theirs.close()
        card, self.descriptors, _, _ = socket.recv_fds(self.control, 1 << 16, 8)
        if not card:
            raise RuntimeError(f"the peer of {name} exited with {self.process.wait()}")
        self.card = b"" if card == b"-" else card
        self.bytes = np.random.default_rng(seed).integers(0, 256, num_bytes, np.uint8)

    def dump(self) -> np.ndarray:
        """What its region holds now."""
        self.control.sendall(b"d")
        data = bytearray()
        while len(data) < NUM_BYTES:
            data += self.control.recv(1 << 20)
        return np.frombuffer(data, np.uint8)

    def close(self) -> None:
        for fd in self.descriptors:
            with contextlib.suppress(OSError):
                os.close(fd)
        self.control.close()
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGCONT)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Side:
    """Our segment and transport."""

    def __init__(self, name: str, num_bytes: int = NUM_BYTES) -> None:
        self.segment = Segment.create(1, num_bytes)
        self.bytes = self.segment.blocks[0]
        self.transport: Transport = make_transport(name, self.segment)

    def open(self, peer: Peer, *, writable: bool = False, num_bytes: int = NUM_BYTES) -> Link:
        descriptors, peer.descriptors = peer.descriptors, []
        return self.transport.open(peer.card, descriptors, num_bytes, writable=writable)

    def open_again(self, peer: Peer, copies: list[int]) -> Link:
        """A second time, by copies of the descriptors that the first one took over."""
        return self.transport.open(peer.card, copies, len(peer.bytes))

    def close(self) -> None:
        self.transport.close()
        self.segment.close()


@pytest.fixture(params=list(TRANSPORTS))
def name(request: pytest.FixtureRequest) -> str:
    if not is_installed(request.param):
        pytest.skip(f"what {request.param} needs is not installed")
    return str(request.param)


@pytest.fixture
def side(name: str) -> Iterator[Side]:
    side = Side(name)
    yield side
    side.close()


@pytest.fixture
def peer(name: str, side: Side) -> Iterator[Peer]:
    peer = Peer(name)
    yield peer
    peer.close()


@pytest.fixture
def zone(name: str, side: Side) -> Iterator[Peer]:
    """A peer whose region may be written."""
    peer = Peer(name, writable=True)
    yield peer
    peer.close()


def offsets(*pieces: int) -> list[int]:
    return [piece * SIZE for piece in pieces]


def piece(array: np.ndarray, index: int) -> np.ndarray:
    return array[index * SIZE : (index + 1) * SIZE]


def test_reads_pieces_to_other_places(side: Side, peer: Peer) -> None:
    link = side.open(peer)
    there = np.random.default_rng(0).permutation(NUM_PIECES).tolist()
    here = list(range(NUM_PIECES))
    seen = []
    for i in link.read(offsets(*there), offsets(*here), SIZE, NEVER):
        seen.append(i)
        assert np.array_equal(piece(side.bytes, here[i]), piece(peer.bytes, there[i])), i
    assert sorted(seen) == here
    assert np.array_equal(peer.dump(), peer.bytes)


def test_touches_nothing_but_the_pieces(side: Side, peer: Peer) -> None:
    side.bytes[:] = 7
    link = side.open(peer)
    assert list(link.read(offsets(3), offsets(5), SIZE, NEVER)) == [0]
    expected = np.full(NUM_BYTES, 7, np.uint8)
    piece(expected, 5)[:] = piece(peer.bytes, 3)
    assert np.array_equal(side.bytes, expected)


@pytest.mark.parametrize("size", [1, 17, 4096, 100_003])
def test_any_size_at_any_offset(side: Side, peer: Peer, size: int) -> None:
    link = side.open(peer)
    there, here = [5, 300_001, 700_000], [900_000, 11, 450_007]
    assert sorted(link.read(there, here, size, NEVER)) == [0, 1, 2]
    for a, b in zip(there, here, strict=True):
        assert np.array_equal(side.bytes[b : b + size], peer.bytes[a : a + size])


def test_nothing_to_do_is_done(side: Side, peer: Peer) -> None:
    assert list(side.open(peer).read([], [], SIZE, NEVER)) == []


def test_one_link_serves_many_reads(side: Side, peer: Peer) -> None:
    link = side.open(peer)
    rng = np.random.default_rng(2)
    for _ in range(50):
        there, here = (rng.choice(NUM_PIECES, 3, replace=False).tolist() for _ in range(2))
        assert sorted(link.read(offsets(*there), offsets(*here), SIZE, NEVER)) == [0, 1, 2]
        for a, b in zip(there, here, strict=True):
            assert np.array_equal(piece(side.bytes, b), piece(peer.bytes, a))


def test_writes_to_a_zone(side: Side, zone: Peer) -> None:
    side.bytes[:] = np.random.default_rng(5).integers(0, 256, NUM_BYTES, np.uint8)
    link = side.open(zone, writable=True)
    there, here = [9, 2, 40], [0, 63, 7]
    assert sorted(link.write(offsets(*there), offsets(*here), SIZE, NEVER)) == [0, 1, 2]
    expected = zone.bytes.copy()
    for a, b in zip(there, here, strict=True):
        piece(expected, a)[:] = piece(side.bytes, b)
    assert np.array_equal(zone.dump(), expected)
    assert sorted(link.read(offsets(40), offsets(1), SIZE, NEVER)) == [0]
    assert np.array_equal(piece(side.bytes, 1), piece(side.bytes, 7))


def test_a_pool_can_not_be_written(side: Side, peer: Peer) -> None:
    with pytest.raises(TransferFailed):
        list(side.open(peer).write(offsets(0), offsets(0), SIZE, NEVER))
    assert np.array_equal(peer.dump(), peer.bytes)


def test_a_pool_can_not_be_opened_for_writing(side: Side, peer: Peer) -> None:
    def write() -> None:
        link = side.open(peer, writable=True)
        list(link.write(offsets(0), offsets(0), SIZE, NEVER))

    with pytest.raises(TransferFailed):
        write()
    assert np.array_equal(peer.dump(), peer.bytes)


@pytest.mark.parametrize(
    ("there", "here"), [(-1, 0), (0, -1), (NUM_BYTES - SIZE + 1, 0), (0, NUM_BYTES)]
)
def test_pieces_outside_a_region_are_refused(side: Side, peer: Peer, there: int, here: int) -> None:
    link = side.open(peer)
    with pytest.raises(TransferFailed, match="outside"):
        list(link.read([0, there], [0, here], SIZE, NEVER))
    assert not side.bytes.any()
    assert list(link.read(offsets(1), offsets(1), SIZE, NEVER)) == [0]


def test_a_region_of_another_size_is_refused(side: Side, peer: Peer) -> None:
    with pytest.raises(TransferFailed):
        side.open(peer, num_bytes=NUM_BYTES + SIZE)


def test_an_unreadable_card_is_refused(name: str, side: Side) -> None:
    with pytest.raises(TransferFailed):
        side.transport.open(b"nonsense", [], NUM_BYTES)


def test_a_cancelled_read_fails_and_touches_nothing_more(side: Side, peer: Peer) -> None:
    link = side.open(peer)
    cancelled = threading.Event()
    everything = list(range(NUM_PIECES))
    pieces = link.read(offsets(*everything), offsets(*everything), SIZE, cancelled)
    next(pieces)
    cancelled.set()
    with pytest.raises(TransferFailed):
        list(pieces)
    side.bytes[:] = 9
    time.sleep(0.1)
    assert (side.bytes == 9).all()


def test_a_closed_iterator_touches_nothing_more(side: Side, peer: Peer) -> None:
    link = side.open(peer)
    everything = list(range(NUM_PIECES))
    pieces = link.read(offsets(*everything), offsets(*everything), SIZE, NEVER)
    next(pieces)
    pieces.close()
    side.bytes[:] = 9
    time.sleep(0.1)
    assert (side.bytes == 9).all()


def test_after_a_cancellation_the_peer_can_be_read_again(side: Side, peer: Peer) -> None:
    """By the same link, or by one opened anew if the transport had to break it."""
    copies = [os.dup(fd) for fd in peer.descriptors]
    link = side.open(peer)
    pieces = link.read(offsets(0, 1, 2), offsets(0, 1, 2), SIZE, NEVER)
    next(pieces)
    pieces.close()
    try:
        got = list(link.read(offsets(4), offsets(6), SIZE, NEVER))
    except TransferFailed:
        link.close()
        link, copies = side.open_again(peer, copies), []
        got = list(link.read(offsets(4), offsets(6), SIZE, NEVER))
    for fd in copies:
        os.close(fd)
    assert got == [0]
    assert np.array_equal(piece(side.bytes, 6), piece(peer.bytes, 4))


@pytest.mark.parametrize("way", [signal.SIGKILL, signal.SIGSTOP])
def test_a_dead_or_frozen_peer_is_an_error_or_a_whole_answer(
    name: str, side: Side, peer: Peer, way: signal.Signals
) -> None:
    """Memory that is mapped outlives its owner; what needs the owner fails within the timeout."""
    copies = [os.dup(fd) for fd in peer.descriptors]
    link = side.open(peer)
    assert list(link.read(offsets(1), offsets(1), SIZE, NEVER)) == [0]
    peer.process.send_signal(way)
    if way is signal.SIGKILL:
        peer.process.wait()
    start = time.monotonic()
    everything = list(range(NUM_PIECES))
    try:
        got = list(link.read(offsets(*everything), offsets(*everything), SIZE, NEVER))
    except TransferFailed:
        side.bytes[:] = 9
        peer.process.send_signal(signal.SIGCONT)
        time.sleep(0.3)
        assert (side.bytes == 9).all(), "written after the failure was reported"
    else:
        assert sorted(got) == everything
        assert np.array_equal(side.bytes, peer.bytes)
    assert time.monotonic() - start < 15
    if way is signal.SIGSTOP:
        peer.process.send_signal(signal.SIGCONT)
        link.close()
        assert_served(side, peer, copies)
    else:
        for fd in copies:
            os.close(fd)


BIG_BYTES = 64 << 20
BIG_SIZE = 32 << 10


def assert_served(side: Side, peer: Peer, copies: list[int]) -> None:
    """The peer lives and a new link can read it."""
    link = side.open_again(peer, copies)
    side.bytes[:] = 0
    there = list(range(0, len(peer.bytes), SIZE))[:NUM_PIECES]
    assert sorted(link.read(there, there, SIZE, NEVER)) == list(range(NUM_PIECES))
    end = there[-1] + SIZE
    assert np.array_equal(side.bytes[:end], peer.bytes[:end])
    link.close()
    assert peer.process.poll() is None


@pytest.fixture
def big(name: str) -> Iterator[tuple[Side, Peer]]:
    """With a region that isn't read within a few milliseconds."""
    side = Side(name, BIG_BYTES)
    peer = Peer(name, num_bytes=BIG_BYTES)
    yield side, peer
    side.close()
    peer.close()


@pytest.mark.parametrize("way", ["closed", "cancelled"])
def test_a_peer_survives_readers_that_break_off(big: tuple[Side, Peer], way: str) -> None:
    side, peer = big
    everything = list(range(0, BIG_BYTES, BIG_SIZE))
    for taken in (1, 2, 50, 800):
        copies = [os.dup(fd) for fd in peer.descriptors]
        link = side.open_again(peer, copies)
        cancelled = threading.Event()
        pieces = link.read(everything, everything, BIG_SIZE, cancelled)
        for _ in range(taken):
            next(pieces)
        if way == "closed":
            pieces.close()
        else:
            cancelled.set()
            with pytest.raises(TransferFailed):
                list(pieces)
        side.bytes[:] = 9
        time.sleep(0.05)
        assert (side.bytes == 9).all()
        link.close()
    assert_served(side, peer, [os.dup(fd) for fd in peer.descriptors])


def test_a_peer_survives_readers_that_are_killed(name: str, big: tuple[Side, Peer]) -> None:
    side, peer = big
    arguments = [name, str(BIG_BYTES), str(BIG_SIZE), peer.card.hex(), *map(str, peer.descriptors)]
    for number in range(8):
        reader = subprocess.Popen(
            [sys.executable, "-c", READER, *arguments],
            pass_fds=peer.descriptors,
            stdout=subprocess.PIPE,
        )
        with reader:
            assert reader.stdout is not None
            assert reader.stdout.readline() == b"open\n"
            time.sleep(0.02 + 0.013 * number)
            assert reader.poll() is None
            reader.kill()
    time.sleep(0.3)
    assert_served(side, peer, [os.dup(fd) for fd in peer.descriptors])


def test_a_peer_survives_being_outwaited(big: tuple[Side, Peer]) -> None:
    """Frozen while much is under way, and continued when its reader has given up."""
    side, peer = big
    copies = [os.dup(fd) for fd in peer.descriptors]
    everything = list(range(0, BIG_BYTES, BIG_SIZE))
    link = side.open(peer, num_bytes=BIG_BYTES)
    side.transport.io_timeout_s = 1.0  # type: ignore[attr-defined]
    pieces = link.read(everything, everything, BIG_SIZE, NEVER)
    next(pieces)
    peer.process.send_signal(signal.SIGSTOP)
    with contextlib.suppress(TransferFailed):
        list(pieces)
    side.bytes[:] = 9
    peer.process.send_signal(signal.SIGCONT)
    time.sleep(0.3)
    assert (side.bytes == 9).all(), "written after the iterator's end"
    link.close()
    side.transport.io_timeout_s = IO_TIMEOUT_S  # type: ignore[attr-defined]
    assert_served(side, peer, copies)


def test_a_peer_that_is_gone_can_not_be_opened(name: str, side: Side, peer: Peer) -> None:
    if name == "shm":
        pytest.skip("its memory outlives it")
    peer.process.kill()
    peer.process.wait()
    start = time.monotonic()
    with pytest.raises(TransferFailed):
        list(side.open(peer).read(offsets(0), offsets(0), SIZE, NEVER))
    assert time.monotonic() - start < 15


def test_closing_twice_is_harmless_and_leaves_no_thread(name: str) -> None:
    before = set(threading.enumerate())
    side = Side(name)
    peer = Peer(name)
    link = side.open(peer)
    assert list(link.read(offsets(0), offsets(0), SIZE, NEVER)) == [0]
    link.close()
    link.close()
    side.close()
    peer.close()
    assert peer.process.returncode == 0
    deadline = time.monotonic() + 5
    while set(threading.enumerate()) - before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not set(threading.enumerate()) - before


def test_an_unknown_name_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="shm"):
        make_transport("carrier-pigeon", Segment.create(1, 4096))
