"""A client that does not read its stream: ended in time, and counted as what it is."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from pathlib import Path

import pytest

from splitserve.config import Deadlines, GatewayConfig, ServeConfig
from tests.support.served import Served

pytestmark = pytest.mark.processes


def test_it_is_counted_as_slow_and_its_stream_has_no_end(tmp_path: Path, tiny: Path) -> None:
    config = ServeConfig(
        num_mixed=1,
        kv_memory_bytes=1 << 22,
        gateway=GatewayConfig(deadlines=Deadlines(slow_client_s=0.05)),
    )
    with contextlib.closing(Served(tiny, tmp_path, config)) as served, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        client.settimeout(30)
        client.connect(("127.0.0.1", served.port))
        body = json.dumps(
            {
                "model": "tiny",
                "prompt": "hello",
                "max_tokens": 200,
                "n": 64,
                "logprobs": 20,
                "stream": True,
                "ignore_eos": True,
            }
        )
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        client.sendall((head + body).encode())
        end_s = time.monotonic() + 60
        outcome = 'splitserve_requests_total{outcome="slow_client"}'
        while not served.metrics().get(outcome):
            assert time.monotonic() < end_s, served.metrics()
            time.sleep(0.05)
        received = b""
        with contextlib.suppress(ConnectionError):
            while more := client.recv(1 << 16):
                received += more
        assert received.startswith(b"HTTP/1.1 200")
        assert not received.endswith(b"0\r\n\r\n"), "it looks like a whole answer"
        assert not served.metrics().get('splitserve_requests_total{outcome="cancelled"}')
        served.settle()
