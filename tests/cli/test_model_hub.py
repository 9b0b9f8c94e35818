"""The hub, played by a small HTTP server; huggingface_hub reads HF_ENDPOINT at import, so each
case is a process of its own."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

COMMIT = "a" * 40
CODE = (
    "import functools, sys\n"
    "from splitserve.cli import model\n"
    "model.resolve_model = functools.partial(model.resolve_model, hub_timeout_s=1.0)\n"
    "model.app(sys.argv[1:])"
)


def splitserve_model(
    endpoint: str, *arguments: str, env: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", CODE, *arguments],
        env={**env, "HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_TELEMETRY": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def env(offline: Path) -> dict[str, str]:
    return dict(os.environ)


@pytest.fixture
def hub(model_dir: Path) -> Iterator[ThreadingHTTPServer]:
    """Serves model_dir as org/good, the same without safetensors as org/pickled."""
    (model_dir / "pytorch_model.bin").write_bytes(b"pickle")
    (model_dir / "modeling.py").write_text("raise SystemExit")
    fetched: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.answer(with_body=False)

        def do_GET(self) -> None:
            self.answer(with_body=True)

        def answer(self, with_body: bool) -> None:
            path = self.path.split("?")[0]
            kind, _, rest = path.lstrip("/").partition("/models/")
            if kind == "api":
                repo = "/".join(rest.split("/")[:2])
                return self.about(repo, rest)
            repo, _, name = path.lstrip("/").partition("/resolve/")
            data = (model_dir / name.split("/", 1)[1]).read_bytes()
            if with_body:
                fetched.append(name.split("/", 1)[1])
            return self.reply(200, data, with_body)

        def about(self, repo: str, rest: str) -> None:
            if repo not in ("org/good", "org/pickled"):
                return self.reply(404, b"{}", True, {"X-Error-Code": "RepoNotFound"})
            names = sorted(p.name for p in model_dir.iterdir())
            if repo == "org/pickled":
                names = [n for n in names if not n.endswith(".safetensors")]
            files = [(n, (model_dir / n).stat().st_size) for n in names]
            if "/tree/" in rest:
                listed = [
                    {"type": "file", "path": n, "size": size, "oid": "0" * 40} for n, size in files
                ]
                return self.reply(200, json.dumps(listed).encode(), True)
            siblings = [{"rfilename": n, "size": size} for n, size in files]
            body = {"id": repo, "modelId": repo, "sha": COMMIT, "siblings": siblings, "tags": []}
            return self.reply(200, json.dumps(body).encode(), True)

        def reply(
            self, status: int, data: bytes, with_body: bool, more: dict[str, str] | None = None
        ) -> None:
            self.send_response(status)
            headers = {
                "Content-Length": str(len(data)),
                "ETag": f'"{hashlib.sha256(data).hexdigest()}"',
                "X-Repo-Commit": COMMIT,
                "Content-Type": "application/json",
                **(more or {}),
            }
            for key, value in headers.items():
                self.send_header(key, value)
            self.end_headers()
            if with_body and self.command != "HEAD":
                self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.fetched = fetched  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def endpoint_of(server: ThreadingHTTPServer) -> str:
    return f"http://127.0.0.1:{server.server_port}"


def test_a_hub_model_without_its_pickles_and_code(
    hub: ThreadingHTTPServer, env: dict[str, str], offline: Path
) -> None:
    done = splitserve_model(endpoint_of(hub), "pull", "org/good", env=env)
    assert done.returncode == 0, done.stderr
    kept = sorted(p.name for p in (offline / "org--good").iterdir())
    assert kept == ["config.json", "model.safetensors", "tokenizer.json"]
    assert sorted(hub.fetched) == kept  # type: ignore[attr-defined]
    assert "org/good" in done.stdout
    assert "100 %" in done.stderr

    again = splitserve_model("http://127.0.0.1:9", "pull", "org/good", env=env)
    assert (again.returncode, "(cache)" in again.stdout) == (0, True)
    listed = splitserve_model("http://127.0.0.1:9", "list", env=env)
    assert "org/good" in listed.stdout
    assert "smollm2-135m-q4" in listed.stdout


@pytest.mark.parametrize(
    ("name", "expected"),
    [("org/pickled", "no safetensors"), ("org/unknown", "no model org/unknown")],
)
def test_what_the_hub_does_not_have(
    hub: ThreadingHTTPServer, env: dict[str, str], name: str, expected: str
) -> None:
    done = splitserve_model(endpoint_of(hub), "pull", name, env=env)
    assert done.returncode == 1
    assert expected in done.stderr
    assert "Traceback" not in done.stderr


def test_a_hub_that_never_answers_is_given_up_soon(env: dict[str, str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        start = time.monotonic()
        done = splitserve_model(
            f"http://127.0.0.1:{silent.getsockname()[1]}", "pull", "org/good", env=env
        )
    assert time.monotonic() - start < 4
    assert done.returncode == 1
    assert "can't be fetched" in done.stderr
    assert len([line for line in done.stderr.splitlines() if line.startswith("error:")]) == 1
    assert "Traceback" not in done.stderr


def test_an_unknown_name_ends_in_one_line(env: dict[str, str]) -> None:
    done = splitserve_model("http://127.0.0.1:9", "pull", "smollm", env=env)
    assert done.returncode == 1
    assert done.stderr.startswith("error: There is no model smollm.")
    assert len(done.stderr.splitlines()) == 1
