"""Real workers in bfloat16, their pools apart from the segments as on a device."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from splitserve import config
from splitserve.config import GatewayConfig, ServeConfig, SplitMode
from splitserve.offline import LLM, Settings
from tests.support.served import Served

pytestmark = pytest.mark.processes

IGNORE_EOS = {"ignore_eos": True}
PROMPTS = ("the quick brown fox", "jumps over the lazy dog, again and again, until it is tired")


def test_split_workers_answer_as_one_engine_does(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`cpu:0` counts as a device: weights are moved after the fork, blocks pass through the host.
    One request at a time, so that each step is the same as offline, to the bit."""
    monkeypatch.setattr(config, "DEVICES", (*config.DEVICES, "cpu:0"))
    serving = ServeConfig(
        num_prefill=1,
        num_decode=1,
        device="cpu:0",
        dtype="bfloat16",
        kv_memory_bytes=1 << 20,
        gateway=GatewayConfig(split=SplitMode.ALWAYS),
    )
    with contextlib.closing(Served(tiny, tmp_path, serving)) as served:
        assert served.lab.runtime.kv_format.dtype == "bfloat16"
        assert "bfloat16 on cpu:0" in served.lab.runtime.describe_plan()[0]
        answers = [
            served.client.completions.create(
                model="tiny", prompt=prompt, max_tokens=20, temperature=0, extra_body=IGNORE_EOS
            )
            for prompt in PROMPTS
        ]
        served.settle()
        assert served.metrics()["splitserve_kv_transfers_total"] == len(PROMPTS)
    llm = LLM(str(tiny), dtype="bfloat16", kv_memory_bytes=1 << 20, num_threads=1)
    settings = Settings(max_tokens=20, temperature=0, ignore_eos=True)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert answer.choices[0].text == llm.generate([prompt], settings)[0].text
    llm.close()
