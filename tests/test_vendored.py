"""The package as a copy under another name; and what makes that possible: what its files import."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import edit

SOURCE = Path(edit.__file__).parent
TESTS = Path(__file__).parent
FILES = sorted(SOURCE.glob("*.py"))
POLICIES = ("schedule", "anomaly", "penalty", "outer")
each_file = pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)

# ----------------------------------------------------------------------------------------------- the copy

TRAINING = """
import sys
import torch
from problems import loss_of, net
from ranks import mesh, threads
from vendored.xyz import LocalSGDOptimizer, Nesterov, RoundReport, methods

def train(rank):
    model = net()
    optimizer = LocalSGDOptimizer(model, lr=0.05, mesh=mesh(2, 1), **methods.edit(3, warmup_steps=2))
    reports = []
    optimizer.register_round_hook(reports.append)
    for step in range(9):
        loss_of(model, step, rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.sync()
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.total_steps == 18
    assert all(type(report) is RoundReport for report in reports)
    return [param.detach() for param in model.parameters()]

one, two = threads(2, train)
assert all(torch.equal(a, b) for a, b in zip(one, two))
assert type(methods.edit()["outer"]) is Nesterov
assert not {"edit", "vendored.xyz.monitor"} & sys.modules.keys()
"""

SUITE = """
import importlib, importlib.abc, importlib.util
import hypothesis, pytest

hypothesis.settings.register_profile("few", max_examples=3, deadline=None)

class Alias(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    # Whoever imports edit, or a module of it, gets the copy.
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] == "edit":
            return importlib.util.spec_from_loader(name, self)

    def create_module(self, spec):
        module = importlib.import_module("vendored.xyz" + spec.name.removeprefix("edit"))
        self.own_spec = module.__spec__
        return module

    def exec_module(self, module):
        module.__spec__ = self.own_spec

sys.meta_path.insert(0, Alias())
failed = pytest.main(sys.argv[2:])
files = {name: getattr(module, "__file__", None) or "" for name, module in sys.modules.items()}
assert [name for name, file in files.items() if file.startswith(sys.argv[1])] == []
assert sys.modules["edit.penalty"] is sys.modules["vendored.xyz.penalty"]
sys.exit(failed)
"""

PART = [
    *("test_penalty.py", "test_anomaly.py", "test_outer.py", "test_schedule.py", "test_policies.py"),
    "test_against_reference.py::test_inner_and_outer_optimizers[adam-adamw]",
    "test_models.py::test_trap_14_bf16_has_a_fp32_anchor_and_no_movement_is_exactly_zero",
    "test_rounds.py::test_peers_batchnorm_statistics_are_averaged_over_finite_replicas",
    "test_rounds.py::test_fault_2_a_non_finite_replica_is_out_spreads_nothing_and_heals",
]


def test_a_copy_trains_and_passes_the_suite(tmp_path: Path) -> None:
    """Without ``monitor``, which may be left out, and without the package under its own name."""
    copy = tmp_path / "vendored" / "xyz"
    shutil.copytree(SOURCE, copy, ignore=shutil.ignore_patterns("__pycache__", "monitor"))
    (copy.parent / "__init__.py").touch()
    path = os.pathsep.join(map(str, (tmp_path, TESTS)))
    settings = [
        "-p",
        "no:cacheprovider",
        "-n",
        "0",
        "--hypothesis-seed=0",
        "-x",
        "-W",
        "ignore:Module already imported",
    ]
    done = subprocess.run(
        [sys.executable, "-c", TRAINING + SUITE, SOURCE, *settings, *(TESTS / name for name in PART)],
        env=os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "HYPOTHESIS_PROFILE": "few"},
        cwd=TESTS,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "passed" in done.stdout


# -------------------------------------------------------------------------------------------- the imports


def for_types_only(tree: ast.Module) -> set[ast.AST]:
    """What stands under ``if TYPE_CHECKING:``."""
    return {
        inside
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for statement in node.body
        for inside in ast.walk(statement)
    }


def running(file: Path) -> list[ast.AST]:
    """All of a file but what is for types only."""
    tree = ast.parse(file.read_text())
    types = for_types_only(tree)
    return [node for node in ast.walk(tree) if node not in types]


def imported(file: Path) -> tuple[set[str], set[str]]:
    """Modules from elsewhere, by their full names; modules of this package."""
    others: set[str] = set()
    own: set[str] = set()
    for node in running(file):
        if isinstance(node, ast.Import):
            others |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            others.add(node.module or "")
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 1
            own |= {node.module} if node.module else {alias.name for alias in node.names}
    return others, own


@each_file
def test_imports_are_torch_the_standard_library_and_relative(file: Path) -> None:
    others, own = imported(file)
    assert {name.split(".")[0] for name in others} <= {"torch"} | set(sys.stdlib_module_names)
    assert own <= {other.stem for other in FILES}
    assert "monitor" not in own  # it needs tensorboard: whoever wants it imports it
    assert not any("tensorboard" in name for name in others)


def test_what_may_be_left_out_is_needed_by_nobody() -> None:
    """As docs/vendoring.md says."""
    importers = {name: {f.stem for f in FILES if name in imported(f)[1]} for name in ("monitor", "methods")}
    assert importers == {"monitor": set(), "methods": {"__init__"}}


def test_no_file_is_reached_from_itself() -> None:
    """One floor on another: there is an order in which every file imports only those before it."""
    waiting = {file.stem: imported(file)[1] for file in FILES}
    while waiting:
        ready = [name for name, needs in waiting.items() if not needs & waiting.keys()]
        assert ready, f"a circle among {waiting}"
        for name in ready:
            del waiting[name]


@pytest.mark.parametrize("policy", POLICIES)
def test_policies_reach_only_policies(policy: str) -> None:
    """Neither directly nor through others: comm, round and optimizer are not needed to use them."""
    reached, new = set(), {policy}
    while new:
        reached |= new
        new = set().union(*(imported(SOURCE / f"{name}.py")[1] for name in new)) - reached
    assert reached <= {*POLICIES, "checks"}


@each_file
def test_only_comm_and_checkpoint_know_distributed_tensors(file: Path) -> None:
    nodes = running(file)
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    names |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    names |= {alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}
    knows = {"distributed", "DTensor", "FSDPModule"} & names
    knows |= {name for name in imported(file)[0] if name.startswith("torch.distributed")}
    assert not knows or file.stem in ("comm", "checkpoint"), knows
