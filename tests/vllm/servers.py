"""Two real vLLM servers with NIXL between them, on this machine's CPU, and the gateway before them.

vLLM has a virtual environment of its own, since it pins versions that are not ours: `make
test-vllm` makes it; VLLM_PYTHON names its interpreter.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

MODEL = "smol"
START_S = 240.0
LEASE_S = 15  # of KV that nobody has fetched; vLLM's own default is 30
REQUEST_S = 90.0


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class Process:
    """A server in a process group of its own."""

    def __init__(self, command: list[str], log: Path, port: int, **env: str) -> None:
        self.port = port
        self.log = log
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={**os.environ, **env},
            )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def kill(self, signum: int = signal.SIGKILL) -> None:
        """The whole group."""
        try:
            os.killpg(self._process.pid, signum)
        except ProcessLookupError:
            pass
        if signum == signal.SIGKILL:
            self._process.wait(30)

    def wait_ready(self, path: str) -> None:
        until_s = time.monotonic() + START_S
        while time.monotonic() < until_s:
            if self._process.poll() is not None:
                break
            try:
                if get(self.port, path)[0] == 200:
                    return
            except OSError:
                pass
            time.sleep(0.5)
        raise AssertionError(f"not up:\n{self.log.read_text()[-4000:]}")


def start_vllm(model_dir: Path, log: Path, core: int) -> Process:
    python = os.environ.get("VLLM_PYTHON", "")
    assert python, "VLLM_PYTHON: the interpreter of vLLM's environment; `make test-vllm` sets it"
    port = free_port()
    transfer = {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_both",
        "kv_buffer_device": "cpu",
        "kv_connector_extra_config": {"kv_lease_duration": LEASE_S},
    }
    command = [python, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(model_dir), "--served-model-name", MODEL]
    command += ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", "1024"]
    command += ["--enforce-eager", "--dtype", "float32", "--enable-prompt-tokens-details"]
    command += ["--kv-transfer-config", json.dumps(transfer)]
    return Process(
        ["nice", "-n", "10", *command],
        log,
        port,
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_CPU_OMP_THREADS_BIND=str(core),
        VLLM_NIXL_SIDE_CHANNEL_PORT=str(free_port()),
        VLLM_NO_USAGE_STATS="1",
        HF_HUB_OFFLINE="1",
    )


def start_gateway(log: Path, *options: str) -> Process:
    port = free_port()
    command = [sys.executable, "-m", "splitserve", "serve", "--port", str(port), *options]
    return Process(command, log, port)


def get(port: int, path: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def post(port: int, kind: str, **fields: Any) -> http.client.HTTPResponse:
    """The response, to be read: a stream's comes before its end."""
    path = {"completion": "/v1/completions", "chat": "/v1/chat/completions"}[kind]
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=REQUEST_S)
    body = json.dumps({"model": MODEL, "temperature": 0, **fields})
    connection.request("POST", path, body, {"content-type": "application/json"})
    return connection.getresponse()


def ask(port: int, kind: str, **fields: Any) -> dict[str, Any]:
    """A whole answer; of a stream its chunks, put together: its choices have `text`."""
    response = post(port, kind, **fields)
    raw = response.read()
    assert response.status == 200, raw
    if not fields.get("stream"):
        return dict(json.loads(raw))
    *events, done = [x.removeprefix(b"data: ") for x in raw.split(b"\n\n") if x]
    assert done == b"[DONE]", raw[-500:]
    return joined([json.loads(event) for event in events])


def joined(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    logprobs: dict[int, list[Any]] = {}
    for chunk in chunks:
        assert "error" not in chunk, chunk
        for choice in chunk["choices"]:
            index = choice["index"]
            text = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            texts[index] = texts.get(index, "") + text
            if choice["finish_reason"]:
                reasons[index] = choice["finish_reason"]
            if choice["logprobs"]:
                news = choice["logprobs"]
                logprobs.setdefault(index, []).extend(news.get("content") or news["tokens"])
    choices = [
        {"index": i, "text": texts[i], "finish_reason": reasons[i], "tokens": logprobs.get(i)}
        for i in sorted(texts)
    ]
    return {"choices": choices, "usage": chunks[-1].get("usage")}


def texts(answer: dict[str, Any]) -> list[str]:
    return [
        choice["text"] if "text" in choice else choice["message"]["content"]
        for choice in answer["choices"]
    ]


def metric(port: int, name: str) -> float:
    """Summed over labels."""
    lines = get(port, "/metrics")[1].decode().splitlines()
    found = [line for line in lines if line.startswith((f"{name} ", f"{name}{{"))]
    assert found, name
    return sum(float(line.rpartition(" ")[2]) for line in found)
