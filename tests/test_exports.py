"""What the package offers: every name listed, documented in the code and on the pages; types included."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import edit

ROOT = Path(__file__).parents[1]
SOURCE = Path(edit.__file__).parent
FILES = sorted(SOURCE.glob("*.py"))
PUBLIC = [
    "AnomalyTest",
    "Average",
    "EMAZTest",
    "EverySeconds",
    "EverySteps",
    "HeavyBall",
    "LocalSGDOptimizer",
    "Nesterov",
    "Outer",
    "Penalty",
    "Plan",
    "Progress",
    "PseudoGradientPenalty",
    "RoundReport",
    "Schedule",
    "SyncError",
    "export_safetensors",
    "latest",
    "load",
    "methods",
    "plan",
    "save",
]
PRESETS = ["a_edit", "co2", "co2_star", "diloco", "edit", "post_local_sgd"]


def test_exports_are_these() -> None:
    assert edit.__all__ == PUBLIC
    visible = {name for name, value in vars(edit).items() if not name.startswith("_")}
    modules = {name for name in visible if isinstance(getattr(edit, name), types.ModuleType)}
    assert visible - modules | {"methods"} == set(PUBLIC)
    assert modules <= {file.stem for file in FILES} | {"monitor"}


def test_the_monitor_is_there_when_it_is_first_used() -> None:
    code = (
        "import sys, edit; assert 'edit.monitor' not in sys.modules; print(edit.monitor.JsonLines.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "JsonLines\n"
    with pytest.raises(AttributeError, match="module 'edit' has no attribute 'monitors'"):
        edit.monitors  # noqa: B018


def test_presets_are_these() -> None:
    own = [name for name, value in vars(edit.methods).items() if inspect.isfunction(value)]
    assert sorted(own) == PRESETS
    accepted = inspect.signature(edit.LocalSGDOptimizer).parameters
    for name in PRESETS:
        assert getattr(edit.methods, name)().keys() <= accepted.keys()


def test_exports_are_on_the_pages_and_nothing_else_is() -> None:
    text = "\n".join(page.read_text() for page in [*(ROOT / "docs").glob("*.md"), ROOT / "README.md"])
    for name in PUBLIC:
        assert re.search(rf"\b{name}\b", text), name
    for name in PRESETS:
        assert f"methods.{name}(" in text or f"`{name}()`" in text, name
    used = set(re.findall(r"(?<![\w/.@-])edit\.(\w+)", text))
    assert used <= {*PUBLIC, "monitor"}


def test_attributes_and_methods_on_the_pages_exist() -> None:
    """``optimizer.x`` and ``report.x``, in prose and code."""
    text = "\n".join(page.read_text() for page in [*(ROOT / "docs").glob("*.md"), ROOT / "README.md"])
    optimizer = edit.LocalSGDOptimizer(torch.nn.Linear(1, 1), lr=0.1)
    for name in set(re.findall(r"\boptimizer\.([a-z]\w*)", text)) - {"py"}:  # the file
        assert hasattr(optimizer, name), name
    fields = {field.name for field in dataclasses.fields(edit.RoundReport)}
    assert set(re.findall(r"\breport\.([a-z]\w*)", text)) <= fields


def documented(node: ast.AST, name: str) -> Iterator[tuple[str, bool]]:
    """Public classes, functions and methods at and below ``node``, and whether they have a docstring."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef) and not child.name.startswith("_"):
            own = f"{name}.{child.name}"
            setter = any(isinstance(d, ast.Attribute) and d.attr == "setter" for d in child.decorator_list)
            yield own, setter or ast.get_docstring(child) is not None
            if isinstance(child, ast.ClassDef):
                yield from documented(child, own)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_everything_public_has_a_docstring(file: Path) -> None:
    tree = ast.parse(file.read_text())
    assert ast.get_docstring(tree)
    assert [name for name, has in documented(tree, file.stem) if not has] == []


@pytest.mark.parametrize("record", [edit.RoundReport, edit.Progress], ids=lambda record: record.__name__)
def test_every_field_of_a_record_is_explained(record: Any) -> None:
    body = ast.parse(inspect.getsource(record)).body[0].body  # type: ignore[attr-defined]
    for field, explanation in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign):
            assert isinstance(explanation, ast.Expr), ast.unparse(field)
    assert isinstance(body[-1], ast.Expr)


def test_every_argument_of_the_optimizer_is_explained() -> None:
    text = inspect.getdoc(edit.LocalSGDOptimizer) or ""
    for name in inspect.signature(edit.LocalSGDOptimizer).parameters:
        assert re.search(rf"^\s+(\*\*)?{name}: ", text, re.MULTILINE), name


def test_types_are_shipped() -> None:
    assert (SOURCE / "py.typed").is_file()


def test_version_is_that_of_the_distribution() -> None:
    assert f'\nversion = "{edit.__version__}"\n' in (ROOT / "pyproject.toml").read_text()
