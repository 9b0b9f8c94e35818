"""The reader's end of a side channel: what it knows of the source's end."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time

import pytest

from splitserve.connector.sidechannel import (
    SIDE_CHANNEL_VERSION,
    Confirm,
    Confirmed,
    PeerHello,
    SideChannel,
    SideChannelServer,
    Welcome,
)
from splitserve.errors import TransferFailed
from splitserve.model.simulated import simulated_format

HELLO = PeerHello(SIDE_CHANNEL_VERSION, "epoch", "shm", b"identity", simulated_format(16))


def name() -> str:
    return f"splitserve/test/{secrets.token_hex(6)}"


def welcome(message: object, peer: int) -> tuple[Welcome | Confirmed, list[int]]:
    return (
        Confirmed(True) if isinstance(message, Confirm) else Welcome(7, b"card", HELLO.format)
    ), []


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_over_tcp_both_ends_prove_the_token(host: str) -> None:
    server = SideChannelServer(name(), welcome, host=host, token=b"secret")  # type: ignore[arg-type]
    assert server.address.startswith(f"tcp:{host}:")
    channel = SideChannel(server.address, HELLO, 5.0, b"secret")
    assert (channel.num_blocks, channel.card) == (7, b"card")
    assert channel.confirm("lease")
    with pytest.raises(TransferFailed):
        SideChannel(server.address, HELLO, 5.0, b"another")
    assert channel.confirm("lease")
    server.close()
    assert not channel.is_open
    channel.close()


def test_strangers_over_tcp_get_nothing_and_cost_nothing() -> None:
    """Garbage, silence, a flood of connections, a message without proof: readers go on."""
    server = SideChannelServer(name(), welcome, host="127.0.0.1", token=b"secret")  # type: ignore[arg-type]
    port = int(server.address.rpartition(":")[2])
    channel = SideChannel(server.address, HELLO, 5.0, b"secret")
    strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(100)]
    for i, stranger in enumerate(strangers):
        with contextlib.suppress(OSError):
            stranger.sendall([b"GET / HTTP/1.1\r\n\r\n", b"", bytes(range(256)) * 40][i % 3])
    assert channel.confirm("lease")
    received = b""
    strangers[2].settimeout(5)
    with contextlib.suppress(ConnectionError):
        while more := strangers[2].recv(4096):
            received += more
    assert len(received) <= 16, "more than the nonce"
    for stranger in strangers:
        stranger.close()
    again = SideChannel(server.address, HELLO, 5.0, b"secret")
    assert again.confirm("lease")
    server.close()


def test_a_source_without_the_token_is_not_believed() -> None:
    listener = socket.create_server(("127.0.0.1", 0))

    def pretend() -> None:
        connection, _ = listener.accept()
        connection.sendall(bytes(16))
        connection.recv(48)
        connection.sendall(bytes(32))
        connection.recv(1)
        connection.close()

    thread = threading.Thread(target=pretend)
    thread.start()
    address = f"tcp:127.0.0.1:{listener.getsockname()[1]}"
    with pytest.raises(TransferFailed, match="token"):
        SideChannel(address, HELLO, 5.0, b"secret")
    thread.join(5)
    listener.close()


def test_a_look_at_a_living_peer_takes_no_time() -> None:
    server = SideChannelServer(name(), lambda message, peer: (Welcome(1, b"", HELLO.format), []))
    channel = SideChannel(server.address, HELLO, timeout_s=30.0)
    start = time.monotonic()
    assert channel.is_open
    assert time.monotonic() - start < 10
    server.close()
    assert not channel.is_open
    channel.close()


def test_a_late_confirmation_is_not_taken_for_the_next_one() -> None:
    release = threading.Event()

    def answer(message: object, peer: int) -> tuple[Welcome | Confirmed, list[int]]:
        if isinstance(message, Confirm):
            release.wait(30)
            return Confirmed(message.lease_id == "held"), []
        return Welcome(1, b"", HELLO.format), []

    server = SideChannelServer(name(), answer)  # type: ignore[arg-type]
    channel = SideChannel(server.address, HELLO, timeout_s=0.1)
    assert not channel.confirm("held")  # the answer comes when nobody waits for it
    release.set()
    assert channel.is_broken
    assert not channel.is_open
    assert not channel.confirm("expired")
    server.close()
