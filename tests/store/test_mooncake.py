"""What is particular to tier `mooncake`; the rest is in the contract suite."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from splitserve.errors import ConfigError, StoreError
from splitserve.store.base import Tier
from splitserve.store.registry import make_tier, parse_tier
from tests.store.places import CHILD, SIZE, Mooncake, child, load, make_keys, present, save
from tests.store.test_contract import EIGHT, attempts, eventually


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Mooncake]:
    """A master, and nobody who adds to its pool."""
    pool = Mooncake(tmp_path)
    pool.start_master("-client_ttl=6", "-default_kv_lease_ttl=100")
    yield pool
    pool.close()


@pytest.fixture
def tiers() -> Iterator[list[Tier]]:
    tiers: list[Tier] = []
    yield tiers
    for tier in tiers:
        tier.close()


def opened(tiers: list[Tier], pool: Mooncake, query: str = "") -> Tier:
    tiers.append(make_tier(parse_tier(f"{pool.place}?{query}"), b"model", SIZE))
    return tiers[-1]


def test_what_a_process_adds_is_the_pool_s_and_lost_with_it(
    pool: Mooncake, tiers: list[Tier]
) -> None:
    adds, other = opened(tiers, pool, "limit=16M"), opened(tiers, pool)
    pool.await_holders(1)
    assert save(other, *EIGHT) == 8
    assert load(adds, *EIGHT) == 8
    adds.close()
    assert present(other, EIGHT) == []
    assert load(other, *EIGHT) == 0
    assert save(other, *EIGHT) == 0, "nobody adds anything"


def test_what_adds_to_the_pool_is_started_again(pool: Mooncake, tiers: list[Tier]) -> None:
    tier = opened(tiers, pool, "limit=16M")
    pool.await_holders(1)
    tier._holder._process.kill()  # type: ignore[attr-defined]

    def works() -> bool:
        try:
            save(tier, *EIGHT)
            return load(tier, *EIGHT) == 8
        except StoreError:
            return False

    assert eventually(works)


def test_a_process_may_add_before_there_is_a_master(tmp_path: Path, tiers: list[Tier]) -> None:
    pool = Mooncake(tmp_path)
    tier = opened(tiers, pool, "limit=16M")
    with pytest.raises(StoreError):
        save(tier, 0)
    pool.start_master()
    try:
        pool.await_holders(1)
        assert save(tier, 0) == 1
    finally:
        pool.close()


def test_a_full_pool_keeps_the_newest(pool: Mooncake, tiers: list[Tier]) -> None:
    pool.start_holder("16MB")
    pool.await_holders(1)
    tier = opened(tiers, pool)
    for start in range(0, 600, 20):
        assert save(tier, *range(start, start + 20)) == 20
    there = present(tier, range(600))
    assert 200 < len(there) < 341
    assert load(tier, *range(580, 600)) == 20
    assert tier.stats().corrupt == 0


def test_processes_that_save_load_and_evict_at_once(pool: Mooncake, tiers: list[Tier]) -> None:
    pool.start_holder("16MB")
    pool.await_holders(1)
    work = """
rng = np.random.default_rng({seed})
for _ in range(100):
    numbers = rng.choice(800, 8, replace=False).tolist()
    save(tier, *numbers)
    load(tier, *numbers)
assert tier.stats().corrupt == 0
assert tier.stats().hits > 300
"""
    others = [child(pool.place, work.format(seed=seed)) for seed in range(2)]
    assert [other.wait(60) for other in others] == [0, 0]


@pytest.mark.parametrize("query", ["", "timeout=0.5"])
def test_a_frozen_holder_is_an_error_within_the_timeout(
    pool: Mooncake, tiers: list[Tier], query: str
) -> None:
    """Until the master gives it up, and from when it is back."""
    pool.start_holder()
    pool.await_holders(1)
    tier = opened(tiers, pool, query)
    assert save(tier, 0, 1) == 2
    assert load(tier, 0, 1) == 2
    pool.holders[0].send_signal(signal.SIGSTOP)
    for attempt in attempts(tier)[2:]:
        start = time.monotonic()
        with pytest.raises(StoreError):
            attempt()
        assert time.monotonic() - start < (4 if query else 6), "and another client was started"
    assert eventually(lambda: tier.find(make_keys(0)) == 0), "the master has given it up"
    assert load(tier, 0) == 0
    pool.holders[0].send_signal(signal.SIGCONT)
    pool.await_holders(1)
    assert save(tier, 2, 3) == 2
    assert load(tier, 2, 3) == 2
    assert tier.stats().corrupt == 0


def test_a_holder_that_was_killed_is_an_error_until_the_master_knows(
    pool: Mooncake, tiers: list[Tier]
) -> None:
    pool.start_holder()
    pool.await_holders(1)
    tier = opened(tiers, pool)
    assert save(tier, 0, 1) == 2
    pool.holders[0].kill()
    for attempt in attempts(tier)[2:]:
        with pytest.raises(StoreError):
            attempt()
    assert eventually(lambda: tier.find(make_keys(0)) == 0)
    assert load(tier, 0) == 0
    pool.holders[0].wait()
    pool.start_holder()
    pool.await_holders(1)
    assert save(tier, 0, 1) == 2
    assert load(tier, 0, 1) == 2


def test_a_client_that_was_killed_is_not_noticed(pool: Mooncake, tiers: list[Tier]) -> None:
    pool.start_holder()
    pool.await_holders(1)
    tier = opened(tiers, pool)
    for attempt in (lambda: save(tier, 0), lambda: load(tier, 0)):
        tier._process._process.kill()  # type: ignore[attr-defined]
        assert attempt() == 1
    tier._process._process.send_signal(signal.SIGSTOP)  # type: ignore[attr-defined]
    with pytest.raises(StoreError):
        load(tier, 0)
    assert load(tier, 0) == 1


def test_no_process_outlives_the_one_that_opened_the_tier(pool: Mooncake, tmp_path: Path) -> None:
    work = f"""
ids = [tier._process._process.pid, tier._holder._process.pid]
open({str(tmp_path / "ids")!r}, "w").write(" ".join(map(str, ids)))
save(tier, 0)
die()
"""
    opener = child(f"{pool.place}?limit=16M", work)
    assert opener.wait(60) == -signal.SIGKILL
    ids = (tmp_path / "ids").read_text().split()
    assert len(ids) == 2
    assert eventually(lambda: not any(_is_ours(pid) for pid in ids))


def _is_ours(pid: str) -> bool:
    try:
        return b"mooncake_client" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def test_says_nothing_on_stderr(tmp_path: Path) -> None:
    """Whatever the library has to say of a master that is not there."""
    work = """
try:
    save(tier, 0)
except Exception as error:
    print(type(error).__name__)
"""
    pool = Mooncake(tmp_path)
    environment = dict(os.environ, PYTHONPATH=os.getcwd())
    done = subprocess.run(
        [sys.executable, "-c", CHILD, f"{pool.place}?limit=16M", work],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "StoreError\n", "")


def test_the_policy_is_the_master_s() -> None:
    with pytest.raises(ConfigError, match="policy=frequency"):
        make_tier(parse_tier("mooncake://host:1?policy=frequency"), b"m", SIZE)
