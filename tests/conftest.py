"""Which tests are the transfer suite's (`make test-transfer`): all that is about moving KV."""

from __future__ import annotations

from pathlib import Path

import pytest

TRANSFER = (
    "transport/",
    "store/",
    "connector/",
    "cluster/test_chunk_handoff.py",
    "cluster/test_store_failures.py",
    "parity/test_exact_tiny.py::test_split_",
    "parity/test_exact_tiny.py::test_fetched_",
)
ROOT = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        name = f"{item.path.relative_to(ROOT).as_posix()}::{item.name}"
        if name.startswith(TRANSFER):
            item.add_marker(pytest.mark.transfer)
