"""What is particular to redis: values of others, its limits, and the protocol's parser."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitserve.errors import ConfigError, StoreError
from splitserve.store.redis_scripts import INDEX
from splitserve.store.redis_wire import BadReply, Reader, RedisRefused, pack
from splitserve.store.registry import make_tier, parse_tier
from tests.store.places import SIZE, Place, load, make_keys, present, save


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place("redis", tmp_path)
    yield place
    place.close()


@pytest.mark.parametrize("value", [b"", b"hello", b"x" * SIZE, b"y" * (SIZE + 136), b"z" * 10**6])
def test_a_value_of_someone_else_is_a_miss_and_is_removed(place: Place, value: bytes) -> None:
    tier = place.open()
    save(tier, 0, 1, 2)
    place.redis_client().set(tier._name(make_keys(1)[0]), value)  # type: ignore[attr-defined]
    assert load(tier, 0, 1, 2) == 1
    assert tier.stats().corrupt == 1
    assert present(tier, range(3)) == [0, 2]
    assert save(tier, 1) == 1
    assert load(tier, 0, 1, 2) == 3


def test_a_value_of_another_type_is_a_miss_and_is_removed(place: Place) -> None:
    tier = place.open()
    save(tier, 0)
    name = tier._name(make_keys(0)[0])  # type: ignore[attr-defined]
    client = place.redis_client()
    client.delete(name)
    client.rpush(name, "a list")
    assert load(tier, 0) == 0
    assert tier.stats().corrupt == 1
    assert save(tier, 0) == 1
    assert load(tier, 0) == 1


def test_the_index_says_what_is_there(place: Place) -> None:
    tier = place.open(limit=4 * SIZE)
    for number in range(6):
        save(tier, number)
    save(tier, 3, 4)
    client = place.redis_client()
    index, _, num_bytes = INDEX
    assert client.zcard(index) == 4
    assert int(client.get(num_bytes)) == 4 * SIZE
    assert len(client.keys("splitserve:kv:*:*")) == 4


def test_what_is_saved_again_evicts_nothing(place: Place) -> None:
    tier = place.open(limit=4 * SIZE)
    save(tier, 0, 1, 2, 3)
    assert save(tier, 3, 2) == 0
    assert save(tier, 3, 4) == 1
    assert present(tier, range(5)) == [0, 1, 3, 4]
    assert tier.stats().evicted == 1


def test_what_expired_makes_room(place: Place) -> None:
    tier = place.open(limit=4 * SIZE, ttl=0.05)
    save(tier, 0, 1, 2, 3)
    while present(tier, range(4)):
        threading.Event().wait(0.01)
    assert save(tier, 4) == 1
    client = place.redis_client()
    index, expiry, num_bytes = INDEX
    assert (client.zcard(index), client.zcard(expiry)) == (1, 1)
    assert int(client.get(num_bytes)) == SIZE
    assert tier.stats().evicted == 0


def test_without_a_limit_there_is_no_index(place: Place) -> None:
    place.open().close()
    tier = make_tier(parse_tier(f"redis:{place.root}/redis.sock"), b"model", SIZE)
    assert save(tier, *range(4)) == 4
    assert load(tier, *range(4)) == 4
    assert not place.redis_client().exists(*INDEX)
    tier.close()


def test_a_server_that_was_emptied_counts_from_nothing(place: Place) -> None:
    tier = place.open(limit=4 * SIZE)
    save(tier, 0, 1, 2, 3)
    place.redis_client().flushall()
    assert save(tier, 4, 5, 6, 7) == 4
    assert load(tier, 4, 5, 6, 7) == 4


def test_values_that_redis_evicted_by_itself_are_a_miss(place: Place) -> None:
    tier = place.open(limit=4 * SIZE)
    save(tier, 0, 1, 2, 3)
    place.redis_client().delete(tier._name(make_keys(0)[0]))  # type: ignore[attr-defined]
    assert load(tier, 0) == 0
    assert tier.stats().corrupt == 0
    assert save(tier, 0) == 1
    assert load(tier, 0) == 1
    assert int(place.redis_client().get(INDEX[2])) <= 4 * SIZE


def test_a_server_without_memory_is_an_error_that_passes(place: Place) -> None:
    tier = place.open()
    client = place.redis_client()
    client.config_set("maxmemory", 1)
    with pytest.raises(StoreError, match="OOM"):
        save(tier, 0)
    assert load(tier, 0) == 0
    client.config_set("maxmemory", 0)
    assert save(tier, 0) == 1
    assert load(tier, 0) == 1


def test_a_server_that_wants_a_password(place: Place) -> None:
    place.open().close()
    client = place.redis_client()
    client.config_set("requirepass", "secret")
    tier = place.open()
    with pytest.raises(StoreError):
        tier.find(make_keys(0))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def test_by_tcp_with_a_password_and_a_database(place: Place) -> None:
    place.open().close()
    client = place.redis_client()
    port = free_port()
    client.config_set("port", port)
    client.config_set("requirepass", "secret")
    at = f"127.0.0.1:{port}"
    tier = make_tier(parse_tier(f"redis://:secret@{at}/3?limit=1M"), b"model", SIZE)
    assert save(tier, 0, 1) == 2
    assert load(tier, 0, 1) == 2
    other = make_tier(parse_tier(f"redis://:secret@{at}/2"), b"model", SIZE)
    assert other.find(make_keys(0)) == 0
    wrong = make_tier(parse_tier(f"redis://:password@{at}/3"), b"model", SIZE)
    with pytest.raises(StoreError) as caught:
        wrong.find(make_keys(0))
    assert at in caught.value.message
    assert "password@" not in caught.value.message
    for opened in (tier, other, wrong):
        opened.close()


@pytest.mark.parametrize("at", ["localhost", "//localhost:port", "//localhost:99999999"])
def test_an_address_that_is_none_is_refused(at: str) -> None:
    with pytest.raises(ConfigError):
        make_tier(parse_tier(f"redis:{at}"), b"model", SIZE)


# --- the parser


def read(data: bytes, num: int = 1) -> list[object]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(20)
        sender = threading.Thread(target=lambda: (theirs.sendall(data), theirs.shutdown(1)))
        sender.start()
        try:
            reader = Reader(ours)
            return [reader.reply() for _ in range(num)]
        finally:
            sender.join()


def encode(value: object) -> bytes:
    if value is None:
        return b"$-1\r\n"
    if isinstance(value, int):
        return b":%d\r\n" % value
    if isinstance(value, bytes):
        return b"$%d\r\n%s\r\n" % (len(value), value)
    assert isinstance(value, list)
    return b"*%d\r\n" % len(value) + b"".join(map(encode, value))


REPLIES = st.recursive(
    st.none() | st.integers(-(10**9), 10**9) | st.binary(max_size=40_000),
    lambda inner: st.lists(inner, max_size=5),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(st.lists(REPLIES, max_size=6))
def test_any_replies_are_read(replies: list[object]) -> None:
    assert read(b"".join(map(encode, replies)), len(replies)) == replies


def test_lines_and_errors() -> None:
    ok, error = read(b"+OK\r\n-ERR no\r\n", 2)
    assert ok == b"OK"
    assert isinstance(error, RedisRefused)
    assert str(error) == "ERR no"


@pytest.mark.parametrize("data", [b"hello\r\n", b"$x\r\n", b"*\r\n", b"+" + b"x" * 9000, b"\r\n"])
def test_garbage_is_an_error(data: bytes) -> None:
    with pytest.raises(BadReply):
        read(data)


@pytest.mark.parametrize("data", [b"", b"$5\r\nhel", b"+O", b"*2\r\n:1\r\n"])
def test_an_end_in_the_middle_is_an_error(data: bytes) -> None:
    with pytest.raises(ConnectionResetError):
        read(data)


@given(st.lists(st.lists(st.binary(max_size=9000), min_size=1, max_size=4), max_size=4))
def test_commands_are_arrays_of_values(commands: list[list[bytes]]) -> None:
    packed = b"".join(bytes(buffer) for buffer in pack(commands))
    assert packed == b"".join(encode(command) for command in commands)
    halves = [[(a[: len(a) // 2], memoryview(a)[len(a) // 2 :]) for a in c] for c in commands]
    assert b"".join(bytes(buffer) for buffer in pack(halves)) == packed
