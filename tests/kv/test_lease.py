"""Every lease ends exactly once (invariant 2), in each way that it can end."""

from __future__ import annotations

import threading

from hypothesis import given, settings
from hypothesis import strategies as st

from splitserve.kv.lease import Lease, LeaseEnd, LeaseTable


def ends(leases: list[Lease]) -> list[LeaseEnd | None]:
    return [lease.ended for lease in leases]


def test_read() -> None:
    table = LeaseTable("e", term_s=10)
    lease = table.grant("r", [1], now_s=0, latest_s=100, readers=2)
    table.done(lease.lease_id)
    assert table.confirm(lease.lease_id, 5)
    table.done(lease.lease_id)
    assert not table.confirm(lease.lease_id, 5)
    assert ends(table.collect(5)) == [LeaseEnd.READ]
    assert table.collect(50) == []


def test_released() -> None:
    table = LeaseTable("e", term_s=10)
    lease = table.grant("r", [1], now_s=0, latest_s=100)
    table.release(lease.lease_id)
    table.done(lease.lease_id)
    assert ends(table.collect(1)) == [LeaseEnd.RELEASED]


def test_expired() -> None:
    table = LeaseTable("e", term_s=10)
    lease = table.grant("r", [1], now_s=0, latest_s=100)
    assert table.collect(10) == []
    assert table.confirm(lease.lease_id, 10)
    assert not table.confirm(lease.lease_id, 10.1), "past the deadline nothing is confirmed"
    assert ends(table.collect(10.1)) == [LeaseEnd.EXPIRED]
    assert not table.renew(lease.lease_id, 10.2)


def test_renewal_is_bounded_by_the_request() -> None:
    table = LeaseTable("e", term_s=10)
    lease = table.grant("r", [1], now_s=0, latest_s=25)
    for now in (8, 16, 24):
        assert table.renew(lease.lease_id, now)
    assert lease.deadline_s == 25
    assert ends(table.collect(26)) == [LeaseEnd.EXPIRED]


def test_the_owner_dies() -> None:
    """The table dies with its process; a new epoch confirms nothing of the old one."""
    lease = LeaseTable("old", term_s=10).grant("r", [1], now_s=0, latest_s=100)
    assert not LeaseTable("new", term_s=10).confirm(lease.lease_id, 1)


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["grant", "done", "release", "renew", "collect"]),
        st.integers(0, 5),
        st.floats(0, 8),
    ),
    max_size=60,
)


@given(OPERATIONS)
@settings(max_examples=200, deadline=None)
def test_any_order_ends_each_once(operations: list[tuple[str, int, float]]) -> None:
    table = LeaseTable("e", term_s=10)
    now = 0.0
    granted: list[Lease] = []
    collected: list[Lease] = []
    for name, which, step in operations:
        now += step
        if name == "grant":
            granted.append(table.grant(f"r{len(granted)}", [len(granted)], now, now + 40, 1))
        elif name == "collect":
            collected += table.collect(now)
        elif which < len(granted):
            lease_id = granted[which].lease_id
            if name == "renew":
                table.renew(lease_id, now)
            elif name == "done":
                table.done(lease_id)
            else:
                table.release(lease_id)
        table.check()
    collected += table.collect(now + 1000)
    assert sorted(x.lease_id for x in collected) == sorted(x.lease_id for x in granted)
    assert table.num_active == 0
    assert table.next_deadline_s() is None


def test_two_threads_end_each_once() -> None:
    table = LeaseTable("e", term_s=1000)
    leases = [table.grant(f"r{i}", [i], 0, 5000) for i in range(2000)]
    threads = [
        threading.Thread(target=lambda f=f: [f(x.lease_id) for x in leases])  # type: ignore[misc]
        for f in (table.done, table.release)
    ]
    collected: list[Lease] = []
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        collected += table.collect(1)
    collected += table.collect(1)
    assert len(collected) == len({x.lease_id for x in collected}) == 2000
    table.check()
