"""The policy that docs/routing.md writes."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from splitserve.latency.model import StepModel
from splitserve.router.policy import Ask
from splitserve.router.router import Router
from splitserve.wire import Leg, Role, View

PAGE = Path(__file__).parents[2] / "docs" / "routing.md"


def test_the_example_is_a_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "my_policies.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    router = Router("my_policies:EmptiestPool")
    for name, free in (("a", 10), ("b", 90), ("c", 50)):
        slot = router.fleet.add(
            name, Role.DECODE, 0.0, num_blocks=100, block_size=16, budget=256, model=StepModel()
        )
        router.fleet.set_view(slot, View(free_blocks=free), 0.0)
    picked = router.pick(Leg.DECODE, Ask(100, 0.0))
    assert picked is not None
    assert picked.worker_id == "b"
    sys.modules.pop("my_policies", None)
