"""The memory tier's index, and its server against clients that die, freeze or talk garbage."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from splitserve.store import memory_wire as wire
from splitserve.store.base import Policy
from splitserve.store.memory import MemoryTier, _Memory, _Session
from splitserve.store.memory_index import ALIGN_BYTES, MemoryIndex, Space
from splitserve.store.record import namespace_digest
from tests.store.places import SIZE, Place, child, load, make_blocks, make_keys, present, save

NAMESPACE = namespace_digest(b"model")


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place("memory", tmp_path)
    yield place
    place.close()


def session(place: Place) -> _Session:
    return _Session(place._socket, 5.0, _Memory())


def reserve(client: _Session, *numbers: int) -> wire.Reserved:
    return client.ask(wire.Reserve(NAMESPACE, make_keys(*numbers), SIZE), wire.Reserved)


def acquire(client: _Session, *numbers: int) -> wire.Acquired:
    return client.ask(wire.Acquire(NAMESPACE, make_keys(*numbers), SIZE), wire.Acquired)


def eventually(holds: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 20
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


# --- the index


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40)), max_size=80))
def test_space_is_given_once(steps: list[tuple[bool, int]]) -> None:
    space, taken = Space(200), dict[int, int]()
    for takes, num in steps:
        if takes:
            offset = space.take(num)
            if offset is not None:
                assert offset not in taken
                taken[offset] = num
            else:
                assert all(width < num for _, width in space.free())
        elif taken:
            offset = sorted(taken)[num % len(taken)]
            space.give(offset, taken.pop(offset))
        at = 0
        free = space.free()
        for offset, width in sorted([*taken.items(), *free]):
            assert offset == at
            at += width
        assert at == 200
        ends = [offset + width for offset, width in free]
        assert not set(ends) & {offset for offset, _ in free}, "free neighbours are joined"


class Model:
    """A few clients that do anything they may, and some things they may not."""

    def __init__(self, policy: Policy, ttl_s: float) -> None:
        self.index = MemoryIndex(10 * ALIGN_BYTES, policy, ttl_s)
        self.now_s = 0.0
        self.leases: dict[int, list[int]] = {n: [] for n in range(3)}
        self.reserved: dict[int, list[tuple[int, int]]] = {n: [] for n in range(3)}

    def step(self, what: str, client: int, number: int, size: int) -> None:
        names = [(b"n", bytes([(number + i) % 12])) for i in range(3)]
        if what == "acquire":
            lease, _, _ = self.index.acquire(client, names, size, self.now_s)
            self.leases[client].append(lease)
        elif what == "release" and self.leases[client]:
            lease = self.leases[client].pop(number % len(self.leases[client]))
            self.index.release(client, lease, [])
        elif what == "reserve":
            reservation, indices, _, _ = self.index.reserve(client, names, size, self.now_s)
            self.reserved[client].append((reservation, len(indices)))
        elif what == "commit" and self.reserved[client]:
            reservation, num = self.reserved[client].pop(number % len(self.reserved[client]))
            self.index.commit(client, reservation, [b"d"] * num, self.now_s)
        elif what == "forget":
            self.index.forget(client)
            self.leases[client], self.reserved[client] = [], []
        elif what == "wait":
            self.now_s += number
        elif what == "wrong":
            with pytest.raises(LookupError):
                self.index.release(client, 10**9, [])
            with pytest.raises(LookupError):
                self.index.commit(client, 10**9, [], self.now_s)


STEPS = ["acquire", "release", "reserve", "commit", "forget", "wait", "wrong"]


@settings(max_examples=200)
@given(
    policy=st.sampled_from(Policy),
    ttl_s=st.sampled_from([0.0, 5.0]),
    steps=st.lists(
        st.tuples(
            st.sampled_from(STEPS),
            st.integers(0, 2),
            st.integers(0, 11),
            st.sampled_from([1, 64, 65, 128, 300]),
        ),
        max_size=60,
    ),
)
def test_each_byte_belongs_to_one(
    policy: Policy, ttl_s: float, steps: list[tuple[str, int, int, int]]
) -> None:
    model = Model(policy, ttl_s)
    for step in steps:
        model.step(*step)
        model.index.check()
    for client in range(3):
        model.index.forget(client)
    model.index.check()


def test_a_larger_block_evicts_until_a_gap_is_wide_enough() -> None:
    index = MemoryIndex(8 * 64, Policy.LRU, 0.0)
    for i in range(8):
        reservation, _, _, _ = index.reserve(0, [(b"n", bytes([i]))], 64, float(i))
        index.commit(0, reservation, [b"d"], float(i))
    _, indices, _, num_evicted = index.reserve(0, [(b"m", b"large")], 3 * 64, 9.0)
    assert (indices, num_evicted) == ([0], 3)
    index.check()


# --- the server and its clients


def test_a_reader_pins_what_it_reads(place: Place) -> None:
    tier = place.open(limit=4 * SIZE)
    save(tier, 0, 1, 2, 3)
    reader = session(place)
    acquired = acquire(reader, 0, 1)
    assert save(tier, 10, 11, 12, 13) == 2, "two places are pinned"
    assert present(tier, range(4)) == [0, 1]
    for number, offset in zip((0, 1), acquired.offsets, strict=True):
        assert (reader.place(offset, SIZE) == make_blocks(number)[0]).all()
    reader.tell(wire.Release(acquired.lease, []))
    assert acquire(reader).offsets == []  # the release came before
    save(tier, 12, 13)
    assert present(tier, range(4)) == []
    reader.close()


def test_what_is_reserved_is_seen_by_nobody(place: Place) -> None:
    tier = place.open()
    writer = session(place)
    reserved = reserve(writer, 0, 1)
    assert tier.find(make_keys(0)) == 0
    assert load(tier, 0) == 0
    for number, offset in zip((0, 1), reserved.offsets, strict=True):
        writer.place(offset, SIZE)[:] = make_blocks(number)[0]
    assert tier.find(make_keys(0)) == 0
    digests = [xxhash.xxh3_128_digest(block) for block in make_blocks(0, 1)]
    writer.ask(wire.Commit(reserved.reservation, digests), wire.Committed)
    assert load(tier, 0, 1) == 2
    writer.close()


def test_of_two_writers_the_first_that_commits_wins(place: Place) -> None:
    tier = place.open(limit=4 * SIZE)
    frozen = session(place)
    reserved = reserve(frozen, 0)
    assert save(tier, 0) == 1, "who is slow keeps nobody from saving"
    committed = frozen.ask(wire.Commit(reserved.reservation, [b"x" * 16]), wire.Committed)
    assert committed.num_saved == 0
    assert load(tier, 0) == 1
    assert save(tier, 1, 2, 3) == 3
    assert present(tier, range(4)) == [0, 1, 2, 3]
    frozen.close()


HOLD = """
from splitserve.store import memory
class Numpy:
    @staticmethod
    def copyto(target, source):
        print("copying", flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)
        target[:] = source
memory.np = Numpy
save(tier, 0, 1)
"""


def test_a_frozen_writer_keeps_its_places_and_a_killed_one_does_not(place: Place) -> None:
    tier = place.open(limit=4 * SIZE)
    writer = child(place.text(), HOLD)
    assert eventually(lambda: Path(f"/proc/{writer.pid}/stat").read_text().split()[2] == "T")
    assert save(tier, 10, 11, 12, 13) == 2
    writer.kill()
    writer.wait()
    assert eventually(lambda: save(tier, 12, 13) == 2)
    assert load(tier, 10, 11, 12, 13) == 4


def test_a_frozen_writer_that_goes_on_saves(place: Place) -> None:
    tier = place.open(limit=4 * SIZE)
    writer = child(place.text(), HOLD)
    state = Path(f"/proc/{writer.pid}/stat")

    def goes_on() -> bool:
        if state.read_text().split()[2] == "T":
            writer.send_signal(signal.SIGCONT)
        return writer.poll() is not None

    save(tier, 10, 11)
    assert eventually(goes_on)
    assert writer.returncode == 0
    assert load(tier, 0, 1) == 2


def test_a_killed_reader_pins_nothing(place: Place) -> None:
    tier = place.open(limit=4 * SIZE)
    save(tier, 0, 1, 2, 3)
    reader = child(
        place.text(), "from splitserve.store import memory\nmemory.np = None\nload(tier, 0)"
    )
    assert reader.wait(60) != 0
    killed = child(
        place.text(),
        "from splitserve.store import memory\nmemory.digest_of = die\nload(tier, 0, 1, 2, 3)",
    )
    assert killed.wait(60) == -signal.SIGKILL
    assert eventually(lambda: save(tier, 10, 11, 12, 13) == 4)


def frame(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


def is_closed(connection: socket.socket) -> bool:
    """By the other end, after whatever it still said."""
    try:
        while connection.recv(4096):
            pass
    except ConnectionResetError:
        pass
    return True


HELLO = wire.pack(wire.Hello(wire.VERSION))


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n" * 4,
        b"\xff" * 100,
        frame(b""),
        frame(b"garbage"),
        frame(b"\x81\xa4type\xa5Hello"),
        struct.pack("<I", wire.MAX_MESSAGE_BYTES + 1),
        wire.pack(wire.Hello(wire.VERSION + 1)),
        wire.pack(wire.Missing(b"n", [b"k"], 1)),
        HELLO + HELLO,
        HELLO + frame(b"\xc1"),
        HELLO + wire.pack(wire.Release(7, [])),
        HELLO + wire.pack(wire.Commit(7, [])),
        HELLO + wire.pack(wire.Reserve(b"n", [b"k"], 0)),
        HELLO + wire.pack(wire.Reserve(b"n", [b"k"], -64)),
        HELLO + wire.pack(wire.Reserve(b"n", [b"k", b"k"], 64)),
        HELLO + wire.pack(wire.Reserve(b"n", [b"k"], 64)) + wire.pack(wire.Commit(1, [b""] * 3)),
        HELLO + wire.pack(wire.Acquire(b"n", [], 1)) + wire.pack(wire.Release(1, [5])),
    ],
)
def test_garbage_closes_its_connection_and_nothing_else(place: Place, data: bytes) -> None:
    tier = place.open()
    save(tier, 0)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(20)
        connection.connect("\0" + place._socket)
        connection.sendall(data)
        assert is_closed(connection)
    assert load(tier, 0) == 1
    assert save(tier, 1) == 1


@settings(max_examples=50, deadline=None)
@given(data=st.binary(max_size=300), greets=st.booleans())
def test_any_bytes_leave_the_server_running(
    data: bytes, greets: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    place = _served_once(tmp_path_factory)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect("\0" + place._socket)
        connection.sendall((HELLO if greets else b"") + data)
    tier = place.open()
    save(tier, 0)
    assert load(tier, 0) == 1
    tier.close()


_places: list[Place] = []


def _served_once(tmp_path_factory: pytest.TempPathFactory) -> Place:
    if not _places:
        _places.append(Place("memory", tmp_path_factory.mktemp("memory")))
        _places[0].open().close()
    return _places[0]


@pytest.fixture(autouse=True, scope="module")
def _close_places() -> Iterator[None]:
    yield
    for place in _places:
        place.close()


def test_who_does_not_read_is_cut_off(place: Place) -> None:
    place.open()
    ask = wire.pack(wire.Missing(b"n", [b"k"] * 50_000, 1))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(20)
        connection.connect("\0" + place._socket)
        connection.sendall(HELLO)
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            connection.sendall(ask * 1000)


def test_another_server_can_not_have_the_name(place: Place) -> None:
    place.open()
    command = [sys.executable, "-m", "splitserve.store.memory_server"]
    command += ["--name", place._socket, "--limit", "1M"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 1
    assert "can't listen" in result.stderr


def test_too_large_a_limit_is_an_error_at_the_start() -> None:
    command = [sys.executable, "-m", "splitserve.store.memory_server"]
    command += ["--name", f"splitserve-test-{os.getpid()}", "--limit", "900T"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 1
    assert "Lower its limit" in result.stderr


@pytest.mark.parametrize("way", ["term", "stdin"])
def test_the_server_ends_when_it_is_told_or_left(place: Place, way: str) -> None:
    place.open()
    assert place.process is not None
    if way == "term":
        place.process.terminate()
    else:
        assert place.process.stdin is not None
        place.process.stdin.close()
    assert place.process.wait(20) == 0


def test_the_segment_vanishes_with_its_holders(place: Place) -> None:
    tier = place.open()
    assert isinstance(tier, MemoryTier)
    save(tier, 0)
    place.kill()
    tier.close()
    assert tier._memory._segment is None
