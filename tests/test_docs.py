"""The documentation is true: its code runs, its links resolve, its names are those of the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.fsdp import fully_shard

import edit
from problems import batch, net, seeded
from ranks import RankError, mesh, threads
from test_rounds import Normed

ROOT = Path(__file__).parents[1]
SOURCE = Path(edit.__file__).parent
PAGES = sorted([*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)

FENCE = re.compile(r"^```(.*)\n((?:.*\n)*?)```$", re.MULTILINE)


def blocks(page: Path) -> list[tuple[str, str]]:
    """Info string and text of every fenced block."""
    return [(match[1].strip(), match[2]) for match in FENCE.finditer(page.read_text())]


def ranks_of(info: str) -> int | None:
    """On how many ranks a block runs: ``python`` on one, ``python ranks=4`` on four, others not at all."""
    if info == "python":
        return 1
    return int(info.removeprefix("python ranks=")) if info.startswith("python ranks=") else None


def runnable(page: Path) -> dict[int, list[str]]:
    """The blocks that run, in order, by their number of ranks."""
    found: dict[int, list[str]] = {}
    for info, code in blocks(page):
        if (ranks := ranks_of(info)) is not None:
            found.setdefault(ranks, []).append(code)
    return found


def execute(codes: list[str], page: Path) -> dict[str, Any]:
    """Run blocks one after the other, as one script."""
    names: dict[str, Any] = {"__name__": __name__}  # a module that exists: dataclasses look it up
    for number, code in enumerate(codes):
        exec(compile(code, f"{page.name}, block {number}", "exec"), names)
    return names


# ------------------------------------------------------------------------------------------------- code


@each_page
def test_blocks_are_marked_and_parse(page: Path) -> None:
    for info, code in blocks(page):
        assert not info.startswith(("py ", "python3")), info
        if info.startswith("python"):
            assert ranks_of(info) is not None or info == "python no-run"
            ast.parse(code)


CASES = [(page, ranks) for page in PAGES for ranks in runnable(page)]


@pytest.mark.parametrize(("page", "ranks"), CASES, ids=lambda x: getattr(x, "name", str(x)))
def test_code_runs(page: Path, ranks: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    codes = runnable(page)[ranks]
    if ranks == 1:
        execute(codes, page)
    else:
        threads(ranks, lambda rank: execute(codes, page) and None)


def test_checkpoints_of_torchs_tools_resume(tmp_path: Path) -> None:
    """``save`` and ``load`` of the page: bitwise the run that was not interrupted."""
    page = ROOT / "docs" / "checkpointing.md"
    codes = runnable(page)[4]

    def train(model: nn.Module, optimizer: edit.LocalSGDOptimizer, rank: int, steps: range) -> None:
        for step in steps:
            x, y = batch(step, rank // 2, rank % 2, torch.float32)
            (model(x[:, :4]) - y[:, :1]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    def parts(model: nn.Module) -> list[torch.Tensor]:
        return [param.detach().to_local().clone() for param in model.parameters()]

    def fn(rank: int) -> None:
        names = execute(codes, page)
        model, optimizer = names["build"]()
        train(model, optimizer, rank, range(6))
        names["save"](model, optimizer, str(tmp_path))
        train(model, optimizer, rank, range(6, 11))
        again, resumed = names["build"]()
        names["load"](again, resumed, str(tmp_path))
        train(again, resumed, rank, range(6, 11))
        for each in (optimizer, resumed):
            each.sync()
        assert optimizer.rounds == resumed.rounds == 3
        assert all(torch.equal(a, b) for a, b in zip(parts(model), parts(again), strict=True))

    threads(4, fn)


# ------------------------------------------------------------------------------------- facts about FSDP2


def sharded(grid: Any) -> Any:
    model = net()
    for block in model.blocks:
        fully_shard(block, mesh=grid["shard"])
    return fully_shard(model, mesh=grid["shard"])


def test_fsdp2_itself_is_stale_after_an_evaluation_between_backward_and_step() -> None:
    """Without this package; ``reshard()`` is the way out. If this fails, the page need not warn any more."""

    def fn(rank: int, evaluate: bool, reshard: bool) -> torch.Tensor:
        model = sharded(mesh(1, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x, y = batch(0, 0)
        (model(x) - y).square().mean().backward()
        with torch.no_grad():
            if evaluate:
                model(x)
            optimizer.step()
            if reshard:
                model.reshard()
            return model(x)

    right, stale, helped = (
        threads(2, fn, *case)[0] for case in ((False, False), (True, False), (True, True))
    )
    assert torch.equal(right, helped)
    assert not torch.allclose(right, stale)


def test_replicas_of_sharded_models_must_run_the_same_units_in_the_warm_up() -> None:
    def fn(rank: int) -> None:
        grid = mesh(2, 2)
        model = sharded(grid)
        optimizer = edit.LocalSGDOptimizer(
            model, lr=0.1, mesh=grid, schedule=edit.EverySteps(2, warmup_steps=2)
        )
        if rank < 2:
            model.forward = lambda x: model.head(model.blocks[0](model.up(x)))
        for step in range(2):
            x, y = batch(step, 0)
            (model(x) - y).square().mean().backward()
            optimizer.step()

    with pytest.raises(RankError, match=r"deadlock|mismatch"):
        threads(4, fn)


# ----------------------------------------------------------------------------------------------- warnings


def test_documented_warnings_are_in_the_code() -> None:
    section = (
        (ROOT / "docs" / "faq.md").read_text().split("## Which warnings may I see?")[1].split("\n## ")[0]
    )
    texts = re.findall(r"^\* \*([^*]+)\*", section, re.MULTILINE)
    said = [
        " ".join(part.value if isinstance(part, ast.Constant) else "?" for part in node.values)
        if isinstance(node, ast.JoinedStr)
        else node.value
        for file in SOURCE.glob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))
    ]
    assert len(texts) == 6
    for text in texts:
        phrases = re.split(r"\d+|\.\.\.|\[.*\]|\bmean\b", text.replace("\n ", ""))
        longest = max(phrases, key=len).strip()
        assert any(longest in message for message in said), longest


# --------------------------------------------------------------------------------- policies of one's own

POLICIES = ROOT / "docs" / "custom-policies.md"


def test_policies_are_short() -> None:
    counts = [len([line for line in code.splitlines() if line.strip()]) for code in runnable(POLICIES)[1]]
    assert len(counts) == 5
    assert max(counts[:4]) <= 20


@pytest.mark.parametrize("penalty", ["AboveMedian", "RelativeNorm"])
def test_policies_train_on_ranks(penalty: str) -> None:
    """Three replicas, one with a spike in its second round: it is left out, or has little weight."""
    names = execute(runnable(POLICIES)[1], POLICIES)
    policy = names[penalty]()
    settings = {
        "schedule": names["Growing"](first=2),
        "penalty": edit.PseudoGradientPenalty(policy) if penalty == "AboveMedian" else policy,
        "outer": names["outer"],
    }

    def fn(rank: int) -> tuple[list[edit.RoundReport], list[torch.Tensor]]:
        model = net()
        optimizer = edit.LocalSGDOptimizer(model, torch.optim.SGD, lr=0.01, mesh=mesh(3, 1), **settings)
        reports: list[edit.RoundReport] = []
        optimizer.register_round_hook(reports.append)
        for step in range(26):
            x, y = batch(step, 0)
            ((model(x) - y).square().mean() * (1000 if (rank, step) == (2, 3) else 1)).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.sync()
        optimizer.load_state_dict(optimizer.state_dict())
        return reports, [param.detach() for param in model.parameters()]

    (reports, params), *others = threads(3, fn)
    assert [int(report.steps[0]) for report in reports] == [2] * 10 + [4, 2]  # the last by sync()
    assert (reports[1].weights[2] < 0.02).all()
    assert penalty != "AboveMedian" or reports[1].out[2].all()
    for report in reports:
        torch.testing.assert_close(report.weights.sum(0), torch.ones(3, dtype=torch.float64))
        if report.round != 2:  # all three did the same
            torch.testing.assert_close(report.weights, torch.full((3, 3), 1 / 3, dtype=torch.float64))
    for _, theirs in others:
        assert all(torch.equal(a, b) for a, b in zip(params, theirs, strict=True))


# ------------------------------------------------------------------------------------------------- links

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text())


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings, and the site of names of the reference."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    names = re.findall(r"^::: (\S+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings} | {*names}


@each_page
def test_links_resolve(page: Path) -> None:
    for target in LINK.findall(prose(page)):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


def test_pages_that_the_code_names_exist() -> None:
    texts = [file.read_text() for file in SOURCE.rglob("*.py")]
    named = {name for text in texts for name in re.findall(r"docs/[\w-]+\.md", text)}
    assert named
    assert all((ROOT / name).exists() for name in named), named


def test_every_page_is_linked() -> None:
    linked = {target.partition("#")[0] for page in PAGES for target in LINK.findall(prose(page))}
    for page in (ROOT / "docs").glob("*.md"):
        assert {page.name, f"docs/{page.name}"} & linked, page.name


# ------------------------------------------------------------------------------------------------ tables


def rows(page: Path, heading: str) -> Iterator[list[str]]:
    """Cells of the first table under ``heading``."""
    lines = page.read_text().split(f"\n{heading}\n", 1)[1].splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("|"))
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            return
        yield [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def members(file: str) -> dict[str, dict[str, ast.AST]]:
    """Of each class in a file: its fields, methods and the attributes that it sets on itself."""
    found: dict[str, dict[str, ast.AST]] = {}
    for node in ast.parse((SOURCE / file).read_text()).body:
        if not isinstance(node, ast.ClassDef):
            continue
        names: dict[str, ast.AST] = {}
        for part in ast.walk(node):
            if isinstance(part, ast.FunctionDef):
                names[part.name] = part
            elif isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
                names[part.target.id] = part
            elif isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store):
                names[part.attr] = part
        found[node.name] = names
    return found


SYMBOLS = list(rows(ROOT / "docs" / "algorithm.md", "## Symbols in the code"))


@pytest.mark.parametrize("row", SYMBOLS, ids=lambda row: row[0].replace("`", ""))
def test_symbols_are_in_the_code(row: list[str]) -> None:
    _, code, _, _, (file,) = *row[:4], quoted(row[4])
    classes = members(file)
    names, _, scope = code.partition(" in ")
    assert quoted(names)
    if scope:
        owner, method = quoted(scope)[0].split(".")
        inside = list(ast.walk(classes[owner][method]))
        known = {node.id for node in inside if isinstance(node, ast.Name)}
        known |= {node.value for node in inside if isinstance(node, ast.Constant)}  # keys of a state
        assert set(quoted(names)) <= known
    else:
        for name in quoted(names):
            owner, attribute = name.split(".")
            assert attribute in classes[owner]


def test_symbols_name_the_whole_report_and_all_settings_of_the_penalty() -> None:
    named = {name for row in SYMBOLS for name in quoted(row[1])}
    tables = {"layers", "steps", "norms", "weights", "effective_replicas", "out", "rolled_back", "clip"}
    assert {f"RoundReport.{name}" for name in tables} <= named
    for policy in (edit.EMAZTest, edit.PseudoGradientPenalty, edit.Nesterov):
        missing = {f"{policy.__name__}.{name}" for name in policy.__dataclass_fields__} - named
        assert missing <= {"PseudoGradientPenalty.anomaly"}


def test_a_script_that_resumes_prints_what_the_page_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code = runnable(ROOT / "docs" / "checkpointing.md")[1][0]
    execute([code], ROOT / "docs" / "checkpointing.md")
    said = re.findall(r"^print\(train\(\d+\)\)  # (\d+)", code, re.MULTILINE)
    assert capsys.readouterr().out.split() == said == ["0", "20"]


def test_keys_of_a_folder_are_the_documented_ones(tmp_path: Path) -> None:
    documented = [
        name
        for row in rows(ROOT / "docs" / "checkpointing.md", "## What is in the folder")
        for name in quoted(row[0])
    ]
    shapes = [
        re.compile(re.sub(r"\b(NAME|KEY|I|M)\b", r"[\\w.]+", name.replace(".", r"\."))) for name in documented
    ]
    model = seeded(Normed())
    next(model.parameters()).requires_grad_(False)
    optimizer = edit.LocalSGDOptimizer(model, lr=0.1, schedule=edit.EverySteps(1))
    for step in range(3):
        x, y = batch(step, 0)
        (model(x) - y).square().mean().backward()
        optimizer.step()
    edit.save(tmp_path / "1", model, optimizer)
    keys = FileSystemReader(tmp_path / "1").read_metadata().state_dict_metadata
    used = {shape.pattern for key in keys for shape in shapes if shape.fullmatch(key)}
    assert all(any(shape.fullmatch(key) for shape in shapes) for key in keys)
    assert len(used) == len(documented) == 6


def test_keys_of_a_state_are_the_documented_ones() -> None:
    documented = {
        key.replace("*", "")
        for row in rows(ROOT / "docs" / "checkpointing.md", "## The state alone")
        for key in quoted(row[0])
        if key.startswith("edit_")
    }
    model = seeded(Normed())
    optimizer = edit.LocalSGDOptimizer(model, lr=0.1, schedule=edit.EverySteps(1), delay=1)
    for step in range(3):
        x, y = batch(step, 0)
        (model(x) - y).square().mean().backward()
        optimizer.step()
    first, *others = optimizer.state_dict()["state"].values()
    kept = {key for key in first if key.startswith("edit_")}
    assert {re.sub(r"\..*", ".", key) for key in kept} | {"edit_part", "edit_part."} == documented
    assert {key for entry in others for key in entry if key.startswith("edit_")} == {
        key
        for key in kept
        if not key.startswith(("edit_run", "edit_penalty.", "edit_buffer", "edit_outer_group."))
    }
    assert first["edit_run"].shape == (12,)
    assert first["edit_run"].tolist()[1:8] == [3, 1, 0, 2, 2, 1, 1]  # in the order of the page


def test_documented_defaults_are_the_defaults() -> None:
    text = (ROOT / "docs" / "choosing.md").read_text()
    cells = {row[0]: row[1] for row in rows(ROOT / "docs" / "choosing.md", "## Defaults")}
    test, penalty, outer = edit.EMAZTest(), edit.PseudoGradientPenalty(), edit.Nesterov()
    presets = edit.methods
    assert cells["interval"] == f"{edit.EverySteps().interval} steps"
    assert cells["interval of A-EDiT"] == f"{edit.EverySeconds().interval:g} s"
    warmup = presets.edit()["schedule"].warmup_steps
    assert cells["warm-up"] == f"{warmup} steps in the presets, {edit.EverySteps().warmup_steps} otherwise"
    assert cells["outer optimizer"] == f"Nesterov, lr {outer.lr:g}, momentum {outer.momentum:g}"
    assert cells["`alpha`, `threshold`, `max_norm`, `temperature`"] == (
        f"{test.alpha:g}, {test.threshold:g}, {penalty.max_norm:g}, {penalty.temperature:g}"
    )
    assert cells["`warmup_rounds`, `patience`, `step_exponent`"] == (
        f"{test.warmup_rounds}, {test.patience}, {penalty.step_exponent:g}".replace("0.5", "1/2")
    )
    diloco, post = presets.diloco(), presets.post_local_sgd()
    assert cells["DiLoCo"] == (
        f"{diloco['schedule'].interval} steps, Nesterov {diloco['outer'].lr:g} / {diloco['outer'].momentum:g}"
    )
    assert cells["Post Local SGD"] == f"{post['schedule'].interval} steps, plain mean"
    assert "1000 steps" in text
