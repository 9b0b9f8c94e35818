"""Keys name what was computed: same tokens, same root, same keys; anything else, others."""

from __future__ import annotations

import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from splitserve.kv.keys import GRANULE, extend_keys, granule_keys, root_key

TOKENS = st.lists(st.integers(0, 60_000), max_size=100)


@given(TOKENS, TOKENS)
def test_common_prefix_gives_common_keys(a: list[int], b: list[int]) -> None:
    root = root_key(b"model")
    common = 0
    while common < min(len(a), len(b)) and a[common] == b[common]:
        common += 1
    keys_a, keys_b = granule_keys(root, a), granule_keys(root, b)
    assert keys_a[: common // GRANULE] == keys_b[: common // GRANULE]
    assert not set(keys_a[common // GRANULE :]) & set(keys_b[common // GRANULE :])


@given(TOKENS, st.lists(st.integers(1, 40), max_size=10))
def test_extending_in_pieces_equals_at_once(tokens: list[int], pieces: list[int]) -> None:
    root = root_key(b"model")
    keys: list[bytes] = []
    stop = 0
    for piece in [*pieces, len(tokens)]:
        stop = min(len(tokens), stop + piece)
        extend_keys(keys, root, tokens[:stop])
    assert keys == granule_keys(root, tokens)


def test_the_unfinished_tail_has_no_key() -> None:
    root = root_key(b"model")
    assert granule_keys(root, list(range(GRANULE - 1))) == []
    assert len(granule_keys(root, list(range(2 * GRANULE + 15)))) == 2


def test_roots_differ_by_identity_and_salt() -> None:
    roots = {root_key(b"a"), root_key(b"b"), root_key(b"a", "tenant"), root_key(b"a", "other")}
    assert len(roots) == 4


def test_keys_are_the_same_in_another_process() -> None:
    code = (
        "from splitserve.kv.keys import granule_keys, root_key;"
        "print(granule_keys(root_key(b'm', 's'), list(range(48)))[-1].hex())"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    # the value itself is part of the contract: stores keep keys for longer than a process lives
    expected = "c2790aebaa2d2b2d3bdf414e238e4009cc52343845bf32f132744d7b2780b0c9"
    assert out.stdout.strip() == expected
    assert granule_keys(root_key(b"m", "s"), list(range(48)))[-1].hex() == expected
