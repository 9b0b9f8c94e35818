"""Devices that are not there, and settings that exclude each other: refused, and why."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from splitserve.cli import serve
from splitserve.cli.main import app
from splitserve.config import ServeConfig
from splitserve.errors import ConfigError
from splitserve.model import loader
from splitserve.offline import LLM
from splitserve.worker.native import NativeModel
from splitserve.worker.spec import ModelSpec


@pytest.fixture(params=["built without", "no device", "no Metal"])
def lacking(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """A device that is not here, and what is said of it; whatever this machine has."""
    if request.param == "no Metal":
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
        return "mps", "there is no Metal device here"
    monkeypatch.setattr(torch.version, "hip", None)
    if request.param == "built without":
        monkeypatch.setattr(torch.version, "cuda", None)
        return "cuda", "is built without CUDA"
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    return "cuda", "no CUDA device is to be found"


def never(*args: object, **kwargs: object) -> None:
    raise AssertionError("something was fetched or loaded")


def test_a_device_that_is_not_there_is_refused_before_anything_is_loaded(
    lacking: tuple[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    device, why = lacking
    monkeypatch.setattr(serve, "resolve_model", never)
    monkeypatch.setattr(loader, "load", never)
    result = CliRunner().invoke(app, ["serve", "--device", device])
    assert result.exit_code == 2
    assert result.output.startswith(f"splitserve: --device {device}: ")
    assert why in result.output
    with pytest.raises(ConfigError, match=why):
        LLM(str(tmp_path), device=device)
    with pytest.raises(ConfigError, match=why):
        NativeModel(ModelSpec(str(tmp_path), device=device))


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"device": "tpu"}, "one of cpu, cuda, mps, not 'tpu'"),
        ({"dtype": "int4"}, "one of float32, bfloat16, float16, not 'int4'"),
        ({"dtype": "bfloat16", "exact": True}, "Exact mode .* not for bfloat16 on cpu"),
        ({"device": "cuda", "exact": True}, "Exact mode .* not for float32 on cuda"),
        ({"dtype": "float16", "decode_weights": "int8"}, "int8 .* not for float16 on cpu"),
        ({"device": "mps", "decode_weights": "int8"}, "int8 .* not for float32 on mps"),
    ],
)
def test_what_excludes_each_other_is_refused(settings: dict[str, object], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        ServeConfig(num_prefill=1, num_decode=1, **settings)  # type: ignore[arg-type]


def test_offline_refuses_the_same(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Exact mode"):
        LLM(str(tmp_path), dtype="bfloat16", exact=True)
    with pytest.raises(ConfigError, match="not 'int4'"):
        LLM(str(tmp_path), dtype="int4")
