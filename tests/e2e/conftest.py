"""Two servers for all tests of this folder: one that always splits, one that never does.

Both serve the tiny random model in exact mode, so that their answers are the same. After each test
every worker must be idle, with its invariants intact, and none may have been restarted.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from splitserve.config import Deadlines, GatewayConfig, ServeConfig, SplitMode
from splitserve.model.tiny import make_tiny
from tests.support.served import Served

POOL_BLOCKS = 192
"""Of the server that splits: 3072 tokens, less than the model's context."""

CONTEXT = 1024
"""Of the other server's model; its pool is larger."""

BODY_S = 3.0


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def split_session(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """1P1D; the pool holds fewer tokens than the model's context."""
    config = ServeConfig(
        num_prefill=1,
        num_decode=1,
        exact=True,
        kv_memory_bytes=POOL_BLOCKS * 16 * 512,
        gateway=GatewayConfig(split=SplitMode.ALWAYS, deadlines=Deadlines(body_s=BODY_S)),
    )
    served = Served(tiny, tmp_path_factory.mktemp("holds"), config)
    assert served.lab.runtime.num_blocks == POOL_BLOCKS
    yield served
    served.close()


@pytest.fixture(scope="session")
def mixed_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One worker that does both, of the same model with a shorter context."""
    model_dir = make_tiny(tmp_path_factory.mktemp("short"), max_len=CONTEXT)
    config = ServeConfig(
        num_mixed=1, exact=True, gateway=GatewayConfig(deadlines=Deadlines(body_s=BODY_S))
    )
    served = Served(model_dir, tmp_path_factory.mktemp("holds"), config)
    yield served
    served.close()


@pytest.fixture
def split(split_session: Served) -> Iterator[Served]:
    yield split_session
    split_session.settle()


@pytest.fixture
def mixed(mixed_session: Served) -> Iterator[Served]:
    yield mixed_session
    mixed_session.settle()


@pytest.fixture(params=["split", "mixed"])
def server(request: pytest.FixtureRequest) -> Served:
    """Each of the two in turn."""
    served: Served = request.getfixturevalue(request.param)
    return served
