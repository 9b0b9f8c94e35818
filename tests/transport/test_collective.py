"""What is particular to transport `collective`; the rest is in the contract suite."""

from __future__ import annotations

import numpy as np
import pytest
import torch.distributed

from .test_contract import NEVER, NUM_BYTES, Peer, Side


@pytest.mark.parametrize("size", [40_000, 70_000])
def test_pieces_that_are_gathered_and_pieces_that_are_not(size: int) -> None:
    """And both on one link, with a write between them."""
    peer = Peer("collective", writable=True)
    side = Side("collective")
    link = side.open(peer, writable=True)
    there, here = [7, 3 * size], [5 * size + 1, 0]
    assert list(link.read(there, here, size, NEVER)) == [0, 1]
    for a, b in zip(there, here, strict=True):
        assert np.array_equal(side.bytes[b : b + size], peer.bytes[a : a + size])
    assert list(link.write([NUM_BYTES - size], [0], size, NEVER)) == [0]
    assert np.array_equal(peer.dump()[-size:], side.bytes[:size])
    other = 110_000 - size
    assert list(link.read([0], [NUM_BYTES - other], other, NEVER)) == [0]
    assert np.array_equal(side.bytes[-other:], peer.bytes[:other])
    assert not torch.distributed.is_initialized()
    side.close()
    peer.close()


def test_a_broken_link_makes_a_new_group() -> None:
    peer = Peer("collective")
    side = Side("collective")
    link = side.open(peer)
    for _ in range(5):
        link._break()  # type: ignore[attr-defined]
        assert list(link.read([0], [0], 1000, NEVER)) == [0]
    side.close()
    peer.close()
