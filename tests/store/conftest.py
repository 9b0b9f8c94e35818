from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.store.places import NAMES, Place


@pytest.fixture(params=NAMES)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """Of each tier."""
    place = Place(request.param, tmp_path)
    yield place
    place.close()
