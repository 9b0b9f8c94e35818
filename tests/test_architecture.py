"""Who may import whom: no upward import, and a control plane without torch and transformers."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import splitserve

ROOT = Path(splitserve.__file__).parent

LAYERS = [
    frozenset(line.split())
    for line in (
        "errors clock sampling moments",
        "faults kv sizes text latency",
        "wire transport",
        "store",
        "config connector",
        "engine router",
        "model gateway",
        "worker api",
        "adopted",
        "cluster offline",
        "cli",
        "__main__",
    )
]
"""From the bottom up: a package imports only packages of lines above its own."""

CONTROL_PLANE = frozenset(
    [
        "adopted",
        "api",
        "text",
        "gateway",
        "router",
        "latency",
        "engine",
        "kv",
        "cluster",
        "planner",
        "bench",
    ]
)
HEAVY = frozenset({"torch", "transformers"})
HEAVY_PACKAGES = frozenset({"model", "worker", "connector", "transport"})
"""Where torch may be imported: it lives in the model and in what handles its memory."""

NARROW: dict[tuple[str, str], frozenset[str]] = {
    ("engine", "connector"): frozenset({"base", "jobs"}),
    ("model", "engine"): frozenset({"step"}),
    ("cluster", "model"): frozenset({"info", "simulated"}),
    ("cluster", "worker"): frozenset({"spec"}),
    ("cluster", "kv"): frozenset({"format"}),
    ("gateway", "kv"): frozenset({"format", "keys"}),
    ("wire", "kv"): frozenset({"format"}),
    ("transport", "kv"): frozenset({"format"}),
    ("model", "kv"): frozenset({"format"}),
}
"""The only modules of the second package that the first one knows: its contract."""


@dataclass(frozen=True, slots=True)
class Import:
    """`module` imports `target`, both with dots; `delayed` inside a function or for types only."""

    module: str
    target: str
    line: int
    delayed: bool

    def __str__(self) -> str:
        return f"{self.module}:{self.line} imports {self.target}"


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = ["splitserve", *path.relative_to(ROOT).with_suffix("").parts]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()
PACKAGES = sorted({name.split(".")[1] for name in MODULES if "." in name})


def imports_of(module: str) -> Iterator[Import]:
    def walk(node: ast.AST, delayed: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield Import(module, alias.name, child.lineno, delayed)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{module}:{child.lineno}: a relative import"
                assert child.module is not None
                for alias in child.names:
                    full = f"{child.module}.{alias.name}"
                    target = full if full in MODULES else child.module
                    yield Import(module, target, child.lineno, delayed)
            else:
                is_type_check = isinstance(child, ast.If) and (
                    ast.unparse(child.test) == "TYPE_CHECKING"
                )
                is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
                yield from walk(child, delayed or is_type_check or is_function)

    yield from walk(ast.parse(MODULES[module].read_text()), False)


IMPORTS = [one for module in MODULES for one in imports_of(module)]


def package_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def layer_of(package: str) -> int:
    return next(i for i, layer in enumerate(LAYERS) if package in layer)


def crossing() -> Iterator[tuple[str, str, Import]]:
    """Imports from one of our packages into another."""
    for one in IMPORTS:
        if one.module == "splitserve" or not one.target.startswith("splitserve."):
            continue
        importer, imported = package_of(one.module), package_of(one.target)
        if importer != imported:
            yield importer, imported, one


def test_every_package_has_a_layer() -> None:
    declared = [package for layer in LAYERS for package in layer]
    assert sorted(declared) == PACKAGES


def test_no_upward_import() -> None:
    wrong = [str(one) for a, b, one in crossing() if layer_of(b) >= layer_of(a)]
    assert not wrong, "\n".join(wrong)


def test_contracts_are_not_bypassed() -> None:
    wrong = [
        str(one)
        for a, b, one in crossing()
        if (a, b) in NARROW and one.target.split(".")[2:3] not in [[x] for x in NARROW[a, b]]
    ]
    assert not wrong, "\n".join(wrong)


def test_modules_import_each_other_in_no_circle() -> None:
    graph: dict[str, set[str]] = {module: set() for module in MODULES}
    for one in IMPORTS:
        if one.target in MODULES and not one.delayed:
            graph[one.module].add(one.target)
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join((*path, module))
        if module not in done:
            for target in sorted(graph[module]):
                visit(target, (*path, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def test_torch_is_imported_only_where_it_lives() -> None:
    wrong = [
        str(one)
        for one in IMPORTS
        if one.target.split(".")[0] in HEAVY and package_of(one.module) not in HEAVY_PACKAGES
    ]
    assert not wrong, "\n".join(wrong)


def loaded_after_importing(names: list[str]) -> list[str]:
    """Which heavy packages a fresh interpreter holds after importing the modules."""
    program = f"""
import importlib, sys
for name in {names!r}:
    importlib.import_module(name)
print(*sorted({set(HEAVY)!r} & set(sys.modules)))
"""
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return result.stdout.split()


def test_the_control_plane_loads_neither_torch_nor_transformers() -> None:
    names = [name for name in MODULES if package_of(name) in CONTROL_PLANE]
    assert {package_of(name) for name in names} == CONTROL_PLANE & set(PACKAGES)
    assert loaded_after_importing(names) == []


@pytest.mark.parametrize("name", ["splitserve.cli.main", "splitserve.worker.zygote"])
def test_what_starts_fast_loads_neither_too(name: str) -> None:
    """The command line, and the zygote before it knows its model."""
    assert loaded_after_importing([name]) == []


def test_the_walk_sees_what_it_should(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "fake.py"
    path.write_text(
        "from typing import TYPE_CHECKING\n"
        "import torch.nn as nn\n"
        "if TYPE_CHECKING:\n    from splitserve.kv import pool\n"
        "def f():\n    from splitserve.errors import ConfigError\n"
    )
    monkeypatch.setitem(MODULES, "splitserve.fake", path)
    assert [(one.target, one.delayed) for one in imports_of("splitserve.fake")] == [
        ("typing", False),
        ("torch.nn", False),
        ("splitserve.kv.pool", True),
        ("splitserve.errors", True),
    ]
