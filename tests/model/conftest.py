"""A tiny model, made and loaded once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from splitserve.model.loader import LoadedModel, load
from splitserve.model.tiny import make_tiny


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny(tiny_path: Path) -> LoadedModel:
    return load(tiny_path)


@pytest.fixture
def blocks(tiny: LoadedModel) -> npt.NDArray[np.uint8]:
    """128 blocks of 16 tokens, full of NaN, so that reading what was not written shows."""
    raw = np.empty((128, tiny.kv_format(16).block_bytes), np.uint8)
    raw.view(np.float32)[:] = np.nan
    return raw
