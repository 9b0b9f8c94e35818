"""What `store.base` promises, for each tier, against real servers and between processes."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
import xxhash

from splitserve.errors import ConfigError, StoreError
from splitserve.store.base import Tier
from splitserve.store.registry import make_tier, parse_tier
from tests.store.places import (
    SERVERS,
    SIZE,
    Place,
    child,
    load,
    make_blocks,
    make_keys,
    make_targets,
    present,
    save,
)

EIGHT = range(8)


def eventually(holds: Callable[[], bool], timeout_s: float = 20.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def test_what_is_saved_is_found_and_loaded(place: Place) -> None:
    tier = place.open()
    assert tier.find(make_keys(*EIGHT)) == 0
    assert tier.missing(make_keys(*EIGHT)) == [True] * 8
    assert load(tier, *EIGHT) == 0
    assert save(tier, *EIGHT) == 8
    assert tier.find(make_keys(*EIGHT)) == 8
    assert tier.missing(make_keys(*EIGHT)) == [False] * 8
    assert load(tier, *EIGHT) == 8
    assert load(tier, *reversed(EIGHT)) == 8
    stats = tier.stats()
    assert (stats.saved, stats.hits, stats.misses, stats.corrupt) == (8, 16, 1, 0)
    if place.promises("counts"):
        assert (stats.num_blocks, stats.num_bytes) == (8, 8 * SIZE)


def test_nothing_to_do_is_done(place: Place) -> None:
    tier = place.open()
    assert tier.find([]) == 0
    assert tier.missing([]) == []
    assert tier.load([], []) == 0
    assert tier.save([], [], []) == 0


def test_stops_at_the_first_that_is_missing(place: Place) -> None:
    tier = place.open()
    save(tier, 0, 1, 2, 4, 5)
    assert tier.find(make_keys(*range(6))) == 3
    assert tier.missing(make_keys(*range(6))) == [False] * 3 + [True] + [False] * 2
    assert load(tier, *range(6)) == 3
    assert load(tier, 9, 0, 1) == 0
    assert tier.stats().misses == 2


def test_touches_no_other_memory(place: Place) -> None:
    tier = place.open()
    save(tier, *EIGHT)
    around = np.full((10, SIZE), 7, np.uint8)
    assert tier.load(make_keys(*EIGHT), list(around[1:9])) == 8
    assert (around[[0, 9]] == 7).all()


def test_what_is_there_is_left_as_it_is(place: Place) -> None:
    tier = place.open()
    assert save(tier, 0, 1) == 2
    other = make_blocks(100)
    assert tier.save(make_keys(0), other, [xxhash.xxh3_128_digest(other[0])]) == 0
    assert save(tier, 0, 1, 2) == 1
    assert load(tier, 0, 1, 2) == 3


def test_a_key_twice_in_a_batch_is_one_block(place: Place) -> None:
    tier = place.open()
    assert save(tier, 0, 1, 0, 1) == 2
    assert load(tier, 0, 1, 0) == 3
    if place.promises("counts"):
        assert tier.stats().num_blocks == 2


def test_many_blocks_at_once(place: Place) -> None:
    tier = place.open(block_bytes=64)
    numbers = range(700)
    assert save(tier, *numbers, size=64) == 700
    assert tier.find(make_keys(*numbers)) == 700
    assert load(tier, *numbers, size=64) == 700


def test_another_process_sees_what_one_saved(place: Place) -> None:
    tier = place.open()
    process = child(place.text(), "assert save(tier, *range(5)) == 5")
    assert process.wait(60) == 0
    assert load(tier, *EIGHT) == 5


def test_stays_when_it_is_closed(place: Place) -> None:
    first = place.open()
    save(first, *EIGHT)
    first.close()
    first.close()
    assert load(place.open(), *EIGHT) == 8


def test_a_namespace_sees_only_its_own_blocks(place: Place) -> None:
    ours, theirs = place.open(b"a model"), place.open(b"another model")
    save(ours, *EIGHT)
    assert theirs.find(make_keys(*EIGHT)) == 0
    assert load(theirs, *EIGHT) == 0
    assert save(theirs, 0, 1) == 2
    assert load(ours, *EIGHT) == 8
    assert load(theirs, *EIGHT) == 2


def test_namespaces_may_have_blocks_of_other_sizes(place: Place) -> None:
    large, small = place.open(b"large", 96 << 10), place.open(b"small", 32 << 10)
    assert save(large, *EIGHT, size=96 << 10) == 8
    assert save(small, *EIGHT, size=32 << 10) == 8
    assert load(large, *EIGHT, size=96 << 10) == 8
    assert load(small, *EIGHT, size=32 << 10) == 8


@pytest.mark.parametrize("policy", ["lru", "frequency"])
def test_the_least_recently_used_are_evicted(place: Place, policy: str) -> None:
    """With either policy, if all were used equally often."""
    place.needs("limit")
    tier = place.open(limit=4 * SIZE, policy=policy)
    for number in EIGHT:
        assert save(tier, number) == 1
    assert present(tier, EIGHT) == [4, 5, 6, 7]
    stats = tier.stats()
    assert (stats.num_blocks, stats.evicted) == (4, 4)


def test_a_load_is_a_use(place: Place) -> None:
    place.needs("limit")
    tier = place.open(limit=4 * SIZE)
    for number in range(4):
        save(tier, number)
    assert load(tier, 0) == 1
    save(tier, 4)
    assert present(tier, range(5)) == [0, 2, 3, 4]


def test_what_is_used_often_outlives_a_scan(place: Place) -> None:
    place.needs("limit")
    tier = place.open(limit=4 * SIZE, policy="frequency")
    save(tier, 0)
    for _ in range(3):
        load(tier, 0)
    for number in range(1, 8):
        save(tier, number)
    assert present(tier, EIGHT) == [0, 5, 6, 7]


def test_the_limit_is_for_all_namespaces(place: Place) -> None:
    place.needs("limit")
    ours, theirs = (place.open(name, limit=4 * SIZE) for name in (b"ours", b"theirs"))
    for number in range(4):
        save(ours, number)
    for number in range(3):
        save(theirs, number)
    assert present(ours, range(4)) == [3]
    assert present(theirs, range(3)) == [0, 1, 2]


def test_a_batch_larger_than_the_limit_keeps_its_head(place: Place) -> None:
    place.needs("limit")
    tier = place.open(limit=4 * SIZE)
    save(tier, 100, 101)
    assert save(tier, *EIGHT) == 4
    assert present(tier, EIGHT) == [0, 1, 2, 3]


def test_of_one_batch_the_tail_is_evicted_first(place: Place) -> None:
    place.needs("limit")
    tier = place.open(limit=4 * SIZE)
    save(tier, *range(4))
    save(tier, 10)
    assert present(tier, range(4)) == [0, 1, 2]
    assert load(tier, 0, 1, 2) == 3
    save(tier, 11, 12)
    assert present(tier, [0, 1, 2, 10, 11, 12]) == [0, 1, 11, 12]


def test_a_block_larger_than_the_limit_is_not_kept(place: Place) -> None:
    place.needs("limit")
    tier = place.open(limit=SIZE - 64)
    assert save(tier, 0) == 0
    assert load(tier, 0) == 0


def test_old_blocks_are_a_miss(place: Place) -> None:
    tier = place.open(ttl=0.3)
    save(tier, 0, 1)
    assert eventually(lambda: tier.find(make_keys(0)) == 0)
    assert tier.missing(make_keys(0, 1)) == [True, True]
    assert load(tier, 0) == 0
    assert save(tier, 0, 1) == 2
    assert tier.stats().corrupt == 0


def test_young_blocks_are_not(place: Place) -> None:
    tier = place.open(ttl=3600)
    save(tier, 0, 1)
    assert tier.find(make_keys(0, 1)) == 2
    assert load(tier, 0, 1) == 2


def test_a_flipped_bit_is_a_miss_and_is_removed(place: Place) -> None:
    tier = place.open()
    save(tier, *EIGHT)
    place.flip(tier, 5)
    assert load(tier, *EIGHT) == 5
    assert load(tier, *EIGHT) == 5
    stats = tier.stats()
    assert (stats.corrupt, stats.misses) == (1, 2)
    assert present(tier, EIGHT) == [0, 1, 2, 3, 4, 6, 7]
    assert save(tier, 5) == 1
    assert load(tier, *EIGHT) == 8


def test_bytes_that_are_not_what_their_digest_says_are_never_given(place: Place) -> None:
    """As when a block's memory is used anew while it is being saved."""
    tier = place.open()
    assert tier.save(make_keys(0), make_blocks(1), [xxhash.xxh3_128_digest(b"other")]) == 1
    assert load(tier, 0) == 0
    assert tier.stats().corrupt == 1
    assert save(tier, 0) == 1


DIE_WHILE_SAVING = {
    "disk": "os.replace = die",
    "shared_storage": "os.replace = die",
    "memory": """
from splitserve.store import memory
class Numpy:
    num = 0
    @classmethod
    def copyto(cls, target, source):
        cls.num += 1
        target[: SIZE // 2] = source[: SIZE // 2]
        if cls.num == 3:
            die()
        target[:] = source
memory.np = Numpy
""",
    "redis": """
from splitserve.store import redis
def send(self, *commands):
    self._socket.sendall(b"".join(redis.pack(commands))[: SIZE * 5])
    die()
redis._Session.send = send
tier.missing = lambda keys: [True] * len(keys)
""",
    "mooncake": """
import threading
def die_while_the_holder_is_frozen():
    tier._process.kill()
    os.kill(HOLDER, signal.SIGCONT)
    die()
os.kill(HOLDER, signal.SIGSTOP)
threading.Timer(1.0, die_while_the_holder_is_frozen).start()
""",
}


def test_a_writer_killed_in_the_middle_leaves_nothing(place: Place) -> None:
    tier = place.open(limit=8 * SIZE)
    save(tier, 100)
    work = DIE_WHILE_SAVING[place.name] + "\nsave(tier, *range(6))"
    if place.pool is not None:
        work = work.replace("HOLDER", str(place.pool.holders[0].pid))
    assert child(place.text(limit=8 * SIZE), work).wait(60) == -signal.SIGKILL
    assert eventually(lambda: present(tier, EIGHT) == [])
    assert load(tier, *EIGHT) == 0
    assert load(tier, 100) == 1
    if place.promises("at once"):
        assert save(tier, *EIGHT) == 8, "its places are free again"
    else:
        assert eventually(lambda: save(tier, *EIGHT) >= 0 and present(tier, EIGHT) == [*EIGHT])
    assert load(tier, *EIGHT) == 8
    assert tier.stats().corrupt == 0


@pytest.mark.parametrize("policy", ["lru", "frequency"])
def test_processes_that_save_load_and_evict_at_once(place: Place, policy: str) -> None:
    place.needs("limit")
    options = {"limit": 6 * SIZE, "policy": policy}
    tier = place.open(**options)
    work = """
rng = np.random.default_rng({seed})
for _ in range(60):
    numbers = rng.choice(16, 3, replace=False).tolist()
    save(tier, *numbers)
    load(tier, *numbers)
assert tier.stats().corrupt == 0
assert tier.stats().evicted > 0
"""
    others = [child(place.text(**options), work.format(seed=seed)) for seed in range(2)]
    assert [other.wait(60) for other in others] == [0, 0]
    there = present(tier, range(16))
    assert 3 <= len(there) <= 6
    assert load(tier, *there) == len(there)


def test_one_thread_loads_while_another_saves(place: Place) -> None:
    tier = place.open(limit=32 * SIZE)
    failures: list[BaseException] = []

    def keep(work: Callable[[Tier, int], object]) -> None:
        try:
            for number in range(40):
                work(tier, number)
        except BaseException as error:
            failures.append(error)

    threads = [
        threading.Thread(target=keep, args=(lambda tier, n: save(tier, n, n + 1, n + 2),)),
        threading.Thread(target=keep, args=(lambda tier, n: load(tier, n, n + 1, n + 2),)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert tier.stats().corrupt == 0


def attempts(tier: Tier) -> list[Callable[[], object]]:
    return [
        lambda: tier.find(make_keys(0)),
        lambda: tier.missing(make_keys(0)),
        lambda: tier.load(make_keys(0), make_targets(1)),
        lambda: save(tier, 50),
    ]


served = pytest.mark.parametrize("place", SERVERS, indirect=True)


@served
def test_a_server_that_was_killed_is_an_error_until_it_is_back(place: Place) -> None:
    tier = place.open()
    save(tier, 0, 1)
    load(tier, 0)
    place.kill()
    for attempt in attempts(tier):
        with pytest.raises(StoreError):
            attempt()
    tier.stats()
    place.start()
    assert tier.find(make_keys(0)) == 0, "it kept nothing"
    assert save(tier, 0, 1) == 2
    assert load(tier, 0, 1) == 2
    assert tier.stats().corrupt == 0


@served
def test_a_server_that_was_started_anew_is_not_noticed(place: Place) -> None:
    tier = place.open()
    save(tier, 0, 1)
    load(tier, 0)
    place.kill()
    place.start()
    assert load(tier, 0) == 0
    assert save(tier, 0, 1) == 2
    assert load(tier, 0, 1) == 2


@served
def test_a_frozen_server_is_an_error_within_the_timeout(place: Place) -> None:
    tier = place.open(timeout=0.3)
    save(tier, 0, 1)
    load(tier, 0)
    assert place.process is not None
    place.process.send_signal(signal.SIGSTOP)
    start = time.monotonic()
    for attempt in attempts(tier):
        with pytest.raises(StoreError):
            attempt()
    tier.stats()
    assert time.monotonic() - start < 15
    place.process.send_signal(signal.SIGCONT)
    assert load(tier, 0, 1) == 2
    assert save(tier, 2) == 1
    assert load(tier, 0, 1, 2) == 3


@served
def test_a_server_that_is_not_there_yet_is_no_error_at_the_start(place: Place) -> None:
    place.open().close()
    place.kill()
    tier = place.open()
    with pytest.raises(StoreError):
        tier.find(make_keys(0))
    place.start()
    assert save(tier, 0) == 1


def test_an_unusable_place_is_refused(place: Place) -> None:
    (place.root / "file").touch()
    text = {
        "memory": "memory:",
        "redis": "redis:localhost",
        "mooncake": "mooncake://localhost",
    }.get(place.name, f"{place.name}:{place.root}/file")
    with pytest.raises(ConfigError):
        make_tier(parse_tier(text), b"model", SIZE)
