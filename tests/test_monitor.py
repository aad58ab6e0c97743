"""``edit.monitor``: what it writes is what rounds did, and what it says of a run can be counted by hand."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

import edit
from edit.monitor import JsonLines, TensorBoard, read
from edit.monitor.page import summary
from problems import loss_of, net
from ranks import threads

LAYERS = ["(root)", "blocks.0"]


def report(
    number: int, rank: int = 0, out: bool = False, norm: float = 1.0, waited: float = 0.5
) -> edit.RoundReport:
    """A round of 2 replicas and 2 layers; ``out``: replica 1 is, of layer 1."""
    weights = torch.tensor([[0.5, 1.0 if out else 0.5], [0.5, 0.0 if out else 0.5]], dtype=torch.float64)
    return edit.RoundReport(
        rank=rank,
        round=number,
        layers=LAYERS,
        steps=torch.tensor([4, 4]),
        total_steps=8 * number,
        norms=torch.tensor([[1.0, 2.0], [3.0, norm]], dtype=torch.float64),
        expected={"mean": torch.full((2, 2), 0.25, dtype=torch.float64)},
        out=torch.tensor([[False, False], [False, out]]),
        weights=weights,
        effective_replicas=1 / weights.square().sum(0),
        clip=torch.tensor([1.0, 0.5 if out else 1.0], dtype=torch.float64),
        rolled_back=torch.tensor([False, False]),
        events=[f"round {number}: replica 1 left out"] * out,
        bytes_sent=1500,
        seconds_total=1.0,
        seconds_waited=waited,
        last_replica=number % 2,
    )


def written(folder: Path, *reports: edit.RoundReport, begin: float = 100.0) -> None:
    times = iter(begin + 10 * n for n in range(len(reports)))
    hook = JsonLines(folder, time=lambda: next(times))
    for one in reports:
        hook(one)


def test_every_field_of_a_report_is_in_its_line(tmp_path: Path) -> None:
    written(tmp_path, report(1, rank=3, norm=float("nan")))
    (line,) = (tmp_path / "rounds.3.jsonl").read_text().splitlines()
    found = json.loads(line, parse_constant=pytest.fail)  # NaN is no JSON
    assert found.keys() == {"time"} | {field.name for field in fields(edit.RoundReport)}
    assert found["norms"] == [[1.0, 2.0], [3.0, "nan"]]
    assert found["out"] == [[False, False], [False, False]]
    assert found["time"] == 100.0


def test_read_gives_back_what_was_written(tmp_path: Path) -> None:
    written(tmp_path, report(1), report(2, out=True, norm=float("inf")), report(3))
    written(tmp_path, report(1, rank=1, waited=0.25), report(2, rank=1, out=True, waited=0.75))
    log = read(tmp_path)
    assert (log.layers, log.ranks, log.rounds) == (LAYERS, [0, 1], [1, 2, 3])
    assert log.time.tolist() == [100.0, 110.0, 120.0]
    assert log.norms[1].tolist() == [[1.0, 2.0], [3.0, float("inf")]]
    assert log.out.sum().item() == log.out[1, 1, 1].item() == 1
    assert log.clip.tolist() == [[1.0, 1.0], [1.0, 0.5], [1.0, 1.0]]
    assert log.seconds_waited[:2].tolist() == [[0.5, 0.25], [0.5, 0.75]]
    assert log.seconds_waited[2].isnan().tolist() == [False, True]
    assert log.events == ["round 2: replica 1 left out"]


def test_a_run_that_was_killed_in_a_line_and_went_on(tmp_path: Path) -> None:
    """Rounds 2 and 3 were made again from a checkpoint, by other clocks; the last time counts."""
    written(tmp_path, report(1), report(2, out=True), report(3, out=True))
    with open(tmp_path / "rounds.0.jsonl", "a") as file:
        file.write('{"time": 12')
    assert read(tmp_path).rounds == [1, 2, 3]
    written(tmp_path, report(2), begin=400.0)
    assert read(tmp_path).rounds == [1, 2]  # what was after it is no longer the run's
    written(tmp_path, report(2), report(3), report(4), begin=500.0)
    log = read(tmp_path)
    assert log.rounds == [1, 2, 3, 4]
    assert not log.out.any()
    assert log.time.tolist() == [100.0, 500.0, 510.0, 520.0]


def test_what_is_no_log_says_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"holds none: register edit\.monitor\.JsonLines"):
        read(tmp_path)
    (tmp_path / "rounds.0.jsonl").write_text("hello\nworld\n")
    with pytest.raises(
        ValueError, match=r"rounds\.0\.jsonl must hold lines of JSON, but begins with 'hello'"
    ):
        read(tmp_path)
    written(tmp_path / "a" / "x", report(1))
    written(tmp_path / "a" / "y", report(1))
    with pytest.raises(ValueError, match=r"must hold one run, but holds \['x', 'y'\]"):
        read(tmp_path / "a")


def test_what_came_before_a_change_of_replicas_is_said_to_be_missing(tmp_path: Path) -> None:
    three = dataclasses.replace(report(3), **{
        key: getattr(report(3), key)[:1] for key in ("steps", "norms", "out", "weights")})  # fmt: skip
    written(tmp_path, report(1), report(2), three)
    log = read(tmp_path)
    assert (log.rounds, log.earlier, log.norms.shape) == ([3], 2, (1, 1, 2))
    said = summary(log)
    assert "2 rounds before them, with other replicas or layers, are not counted here\n" in said
    assert "slowest" not in said


def test_rounds_without_a_step_are_said_to_be(tmp_path: Path) -> None:
    nothing = dataclasses.replace(report(2), steps=torch.zeros(2, dtype=torch.int64))
    written(tmp_path, report(1), nothing)
    said = summary(read(tmp_path))
    assert "of these, 1 without a step, as sync() may end with\n" in said
    assert "per round and replica 4\n" in said


def test_the_summary_counted_by_hand(tmp_path: Path) -> None:
    written(tmp_path, report(1), report(2, out=True), report(3), report(4, out=True))
    assert summary(read(tmp_path), "runs/1") == (
        "runs/1              4 rounds (1-4), 2 replicas, 2 layers\n"
        "written by          rank 0\n"
        "time                30.0 s from the first round to the last\n"
        "inner steps         32 of all replicas, warm-up included; per round and replica 4\n"
        "slowest             replica 0: the last to come in 2 of 4 rounds\n"
        "effective replicas  mean 1.75, least 1.00 (blocks.0, round 2)\n"
        "sent in rounds      6 kB per rank, 1.5 kB per round\n"
        "waited, rank 0      2.00 s, 5.0% of the time\n"
        "clipped             25.0% of combined pseudo gradients\n"
        "out, replica 1      25.0% of its layers and rounds; in 2 rounds: 2, 4\n"
        "events              round 2: replica 1 left out\n"
        "                    round 4: replica 1 left out\n"
    )


def test_the_command(tmp_path: Path) -> None:
    written(tmp_path / "run", report(1), report(2, out=True))
    call = [sys.executable, "-m", "edit.monitor", tmp_path / "run"]
    done = subprocess.run(call, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("run                 2 rounds (1-2)")
    assert (tmp_path / "run" / "rounds.png").read_bytes().startswith(b"\x89PNG")
    done = subprocess.run([*call[:-1], tmp_path], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0  # the folder around it
    done = subprocess.run([*call[:-1], tmp_path / "none"], capture_output=True, text=True, timeout=100)
    assert done.returncode == 1
    assert "holds none" in done.stderr


def test_tensorboard_shows_scalars_heat_maps_and_text(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = TensorBoard(tmp_path, heat_every=2)
    for number in (1, 2, 3):
        board(report(number, out=number == 3))
    board.close()
    found = EventAccumulator(str(tmp_path), size_guidance={"images": 0}).Reload()
    assert [(e.step, e.value) for e in found.Scalars("weight/blocks.0/replica_1")] == [
        (1, 0.5),
        (2, 0.5),
        (3, 0.0),
    ]
    assert [e.value for e in found.Scalars("norm/root/replica_1")] == [3.0] * 3
    for tag in ("heat/norm", "heat/weight", "heat/out"):
        images = found.Images(tag)
        assert [(e.step, e.width, e.height) for e in images] == [(1, 32, 32), (3, 32, 32)]
    (event,) = found.Tensors("events/text_summary")
    assert event.tensor_proto.string_val == [b"round 3: replica 1 left out"]


def training(rank: int, folder: Path) -> list[Any]:
    model = net()
    optimizer = edit.LocalSGDOptimizer(model, torch.optim.SGD, lr=0.1, schedule=edit.EverySteps(2))
    reports: list[edit.RoundReport] = []
    optimizer.register_round_hook(reports.append)
    optimizer.register_round_hook(JsonLines(folder))
    for step in range(6):
        loss_of(model, step, rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.sync()
    return reports


def test_a_real_run(tmp_path: Path) -> None:
    reports = threads(3, training, tmp_path)
    log = read(tmp_path)
    assert log.ranks == [0, 1, 2]
    assert log.rounds == [1, 2, 3, 4]  # the last by sync()
    for k, one in enumerate(reports[0]):
        torch.testing.assert_close(log.norms[k], one.norms, rtol=1e-5, atol=0)
        torch.testing.assert_close(log.weights[k], one.weights, rtol=1e-5, atol=0)
        assert log.total_steps[k] == one.total_steps
    assert log.bytes_sent.tolist() == [[r[k].bytes_sent for r in reports] for k in range(4)]
