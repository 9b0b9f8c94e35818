"""Whole servers with other models and weights than the usual: windows, soft caps, int8."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from splitserve.config import GatewayConfig, ServeConfig, SplitMode
from splitserve.engine.step import Draw, PlanItem, StepPlan
from splitserve.model.loader import load
from splitserve.model.runner import TorchRunner
from splitserve.sampling import Sampling
from tests.model.families import CARRIED, build, generated
from tests.support.served import Served

pytestmark = pytest.mark.processes

PROMPT = [int(one) for one in np.random.default_rng(3).integers(3, 300, 40)]
NUM_OUTPUTS = 24


def served_text(directory: Path, hold_dir: Path, decode_weights: str = "float32") -> str:
    """A greedy answer by one prefill and one decode worker."""
    config = ServeConfig(
        num_prefill=1,
        num_decode=1,
        decode_weights=decode_weights,
        kv_memory_bytes=1 << 20,
        gateway=GatewayConfig(split=SplitMode.ALWAYS),
    )
    with contextlib.closing(Served(directory, hold_dir, config)) as served:
        answer = served.client.completions.create(
            model="tiny",
            prompt=PROMPT,
            max_tokens=NUM_OUTPUTS,
            temperature=0,
            extra_body={"ignore_eos": True},
        )
        served.settle()
        assert served.metrics()["splitserve_kv_transfers_total"] == 1
    return answer.choices[0].text


def test_windows_and_soft_caps_are_transformers(tmp_path: Path, tiny: Path) -> None:
    """Gemma 2, beyond its window of 12."""
    kind, changes = CARRIED["gemma2"]
    directory = tmp_path / "tiny"
    directory.mkdir()
    module = build(directory, tiny, kind, **changes)
    expected = generated(module, PROMPT, NUM_OUTPUTS)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    hold = tmp_path / "hold"
    hold.mkdir()
    assert served_text(directory, hold) == tokenizer.decode(expected)


def test_a_decode_worker_with_int8_weights(tmp_path: Path, tiny: Path) -> None:
    """The prompt in float32, every later token with int8 weights: as one runner does both."""
    loaded = load(tiny)
    loaded.packing.quantize()
    raw = np.zeros((8, loaded.kv_format(16).block_bytes), np.uint8)
    runner = TorchRunner(loaded, raw, 16)
    sampling = Sampling(seed=0, max_tokens=NUM_OUTPUTS, temperature=0.0)
    output: list[int] = []
    start, tokens = 0, PROMPT
    while len(output) < NUM_OUTPUTS:
        loaded.packing.int8 = start > 0
        draw = Draw(sampling, PROMPT, list(output))
        (token,) = runner.execute(
            StepPlan([PlanItem("a", tokens, start, [3, 1, 4, 2, 5], draw)])
        ).token_ids
        assert token is not None
        output.append(token)
        start, tokens = start + len(tokens), [token]
    tokenizer = Tokenizer.from_file(str(tiny / "tokenizer.json"))
    text = served_text(tiny, tmp_path, "int8")
    assert text == tokenizer.decode(output)
    assert text != served_text(tiny, tmp_path)
