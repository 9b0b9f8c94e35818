"""What is particular to transport `nixl`; the rest is in the contract suite."""

from __future__ import annotations

import pytest

from splitserve.errors import ConfigError, TransferFailed
from splitserve.transport.registry import is_installed

from .test_contract import NEVER, NUM_BYTES, SIZE, Peer, Side, offsets

if not is_installed("nixl"):
    pytest.skip("nixl is not installed", allow_module_level=True)

from splitserve.transport.nixl import check_tls


@pytest.mark.parametrize("value", ["tcp", "rc,tcp", "^cma", "^sm", "rc,ud,tcp,self", "^shm,ud"])
def test_what_crosses_hosts_may_be_used(value: str) -> None:
    check_tls(value)


@pytest.mark.parametrize("value", ["all", "tcp,cma", "sm,tcp", "^tcp", "^rc,ud", "shm"])
def test_what_writes_into_a_closed_end_may_not(value: str) -> None:
    with pytest.raises(ConfigError, match="UCX_TLS"):
        check_tls(value)


def test_a_card_of_another_transport_is_refused() -> None:
    peer = Peer("tcp")
    side = Side("nixl")
    with pytest.raises(TransferFailed, match="not one of nixl"):
        side.transport.open(peer.card, [], NUM_BYTES)
    side.close()
    peer.close()


def test_a_pool_gives_its_keys_to_nobody() -> None:
    side = Side("nixl")
    pool = side.transport.make_mover(owner=True, writable=False)  # type: ignore[attr-defined]
    zone = side.transport.make_mover(owner=True, writable=True)  # type: ignore[attr-defined]
    assert len(pool.greeting) == 8 < len(zone.greeting)
    pool.close()
    zone.close()
    side.close()


def test_links_of_one_owner_do_not_disturb_each_other() -> None:
    peer = Peer("nixl")
    sides = [Side("nixl") for _ in range(3)]
    links = [side.open(peer) for side in sides]
    broken = links[0].read(offsets(*range(40)), offsets(*range(40)), SIZE, NEVER)
    next(broken)
    others = [link.read(offsets(1, 2), offsets(3, 4), SIZE, NEVER) for link in links[1:]]
    next(others[0])
    broken.close()
    links[0].close()
    assert [len(list(other)) for other in others] == [1, 2]
    for side in sides:
        side.close()
    peer.close()
