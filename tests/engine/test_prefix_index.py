"""The gateway's index of who has which blocks, against a plain dictionary."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from splitserve.router.prefix_index import PrefixIndex

KEYS = [bytes([i]) * 16 for i in range(8)]
WORKERS = ["a", "b", "c"]

changes = st.tuples(
    st.sampled_from(["add", "remove", "drop"]),
    st.sampled_from(WORKERS),
    st.lists(st.sampled_from(KEYS), max_size=4),
)


@given(st.lists(changes, max_size=40), st.lists(st.sampled_from(KEYS), max_size=8))
def test_it_is_what_workers_told(history: list[tuple[str, str, list[bytes]]], prompt: list) -> None:  # type: ignore[type-arg]
    index = PrefixIndex()
    model: dict[str, set[bytes]] = {worker: set() for worker in WORKERS}
    for what, worker, keys in history:
        if what == "add":
            index.add(worker, keys)
            model[worker] |= set(keys)
        elif what == "remove":
            index.remove(worker, keys)
            model[worker] -= set(keys)
        else:
            index.drop(worker)
            model[worker] = set()
        index.check()
    expected = {}
    for worker, held in model.items():
        num = 0
        while num < len(prompt) and prompt[num] in held:
            num += 1
        if num:
            expected[worker] = num
    assert index.leading(prompt) == expected
    assert len(index) == len(set().union(*model.values()))
    assert {worker: index.num_keys(worker) for worker in WORKERS} == {
        worker: len(held) for worker, held in model.items()
    }
