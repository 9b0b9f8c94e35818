"""What is particular to transport `mooncake`; the rest is in the contract suite."""

from __future__ import annotations

import pytest

from splitserve.errors import TransferFailed
from splitserve.transport.registry import is_installed

from .test_contract import NEVER, NUM_BYTES, Peer, Side

if not is_installed("mooncake"):
    pytest.skip("mooncake is not installed", allow_module_level=True)


def test_another_at_the_peers_address_is_not_taken_for_it() -> None:
    peer = Peer("mooncake")
    side = Side("mooncake")
    secret = peer.card.rindex(b"127.0.0.1") - 1
    forged = peer.card[:secret] + bytes([peer.card[secret] ^ 1]) + peer.card[secret + 1 :]
    with pytest.raises(TransferFailed, match="introduced"):
        side.transport.open(forged, [], NUM_BYTES)
    link = side.open(peer)
    assert list(link.read([0], [0], 100, NEVER)) == [0]
    side.close()
    peer.close()


def test_more_pieces_than_the_engine_queues() -> None:
    peer = Peer("mooncake")
    side = Side("mooncake")
    offsets = [i * 100 for i in range(3000)]
    assert len(list(side.open(peer).read(offsets, offsets, 100, NEVER))) == 3000
    assert bytes(side.bytes[:300_000]) == bytes(peer.bytes[:300_000])
    side.close()
    peer.close()
