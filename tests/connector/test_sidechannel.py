"""The reader's end of a side channel: what it knows of the source's end."""

from __future__ import annotations

import secrets
import threading
import time

from splitserve.connector.sidechannel import (
    SIDE_CHANNEL_VERSION,
    Confirm,
    Confirmed,
    PeerHello,
    SideChannel,
    SideChannelServer,
    Welcome,
)
from splitserve.model.simulated import simulated_format

HELLO = PeerHello(SIDE_CHANNEL_VERSION, "epoch", "shm", b"identity", simulated_format(16))


def test_a_look_at_a_living_peer_takes_no_time() -> None:
    address = f"splitserve/test/{secrets.token_hex(6)}"
    server = SideChannelServer(address, lambda message: (Welcome(1, b""), []))
    channel = SideChannel(address, HELLO, timeout_s=30.0)
    start = time.monotonic()
    assert channel.is_open
    assert time.monotonic() - start < 10
    server.close()
    assert not channel.is_open
    channel.close()


def test_a_late_confirmation_is_not_taken_for_the_next_one() -> None:
    address = f"splitserve/test/{secrets.token_hex(6)}"
    release = threading.Event()

    def answer(message: object) -> tuple[Welcome | Confirmed, list[int]]:
        if isinstance(message, Confirm):
            release.wait(30)
            return Confirmed(message.lease_id == "held"), []
        return Welcome(1, b""), []

    server = SideChannelServer(address, answer)  # type: ignore[arg-type]
    channel = SideChannel(address, HELLO, timeout_s=0.1)
    assert not channel.confirm("held")  # the answer comes when nobody waits for it
    release.set()
    assert channel.is_broken
    assert not channel.is_open
    assert not channel.confirm("expired")
    server.close()
