"""What is generated is up to date; what is written names things that exist."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["errors.md", "metrics.md", "deadlines.md", "cli.md"])
def test_the_reference_is_what_the_code_says(name: str) -> None:
    module = generator()
    written = (ROOT / "docs" / "reference" / name).read_text()
    assert written == module.HEAD + module.PAGES[name](), "run `make docs`"


def test_every_deadline_is_explained() -> None:
    module = generator()
    fields = {name.removesuffix("_s") for name in module.Deadlines.__struct_fields__}
    assert fields == set(module.DEADLINE_TEXTS)


def pages() -> list[Path]:
    return [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/**/*.md")]


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_name_files_and_tests_that_exist(page: Path) -> None:
    text = page.read_text()
    for path in set(re.findall(r"`((?:splitserve|tests|docs|benchmarks)/[\w/.-]+)`", text)):
        assert (ROOT / path).exists(), f"{page.name} names {path}"
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", text):
        assert (page.parent / target).exists(), f"{page.name} links {target}"
    sources = "\n".join(x.read_text() for x in ROOT.glob("tests/**/*.py"))
    for name in set(re.findall(r"`(test_\w+)`", text)):
        assert f"def {name}(" in sources, f"{page.name} names {name}"


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) < 180
    assert len((ROOT / "CONTRIBUTING.md").read_text().splitlines()) < 80
