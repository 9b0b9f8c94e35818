"""Tests of this folder may be coroutines: they run in their module's event loop."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from splitserve.cluster import supervisor
from splitserve.config import ServeConfig
from splitserve.model.tiny import make_tiny
from tests.support.cluster import Lab

MakeLab = Callable[[ServeConfig], Lab]


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    arguments = {name: pyfuncitem.funcargs[name] for name in names}
    pyfuncitem.funcargs["loop"].run(pyfuncitem.obj(**arguments))
    return True


@pytest.fixture(scope="module", autouse=True)
def loop() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def make_lab(
    loop: asyncio.Runner, tiny: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[MakeLab]:
    """Start a server that lives until the module's end. Its workers restart without back-off."""
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setattr(supervisor, "STABLE_S", 0.0)

        def make(config: ServeConfig) -> Lab:
            lab = Lab(tiny, tmp_path_factory.mktemp("holds"), config)
            loop.run(lab.start())
            stack.callback(lambda: loop.run(lab.stop()))
            return lab

        yield make
