"""Messages that a person can act on: who is late, who was left out, and no more lines than it takes."""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import edit
from edit.events import Events, of_round
from edit.setup import tell_stages_apart
from edit.watch import APPLYING, LAUNCHED, Watch
from problems import loss_of, net
from ranks import processes, threads

# ------------------------------------------------------------------------------------- how many lines


def test_of_each_kind_one_line_in_a_time(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    events = Events(logging.getLogger("edit"), seconds=60, clock=lambda: now)
    for now in (0.0, 10.0, 59.0, 60.0, 200.0):
        events.warn("a", f"a at {now:.0f}")
    now = 201.0
    events.warn("b", "b at 201")
    assert [record.getMessage() for record in caplog.records] == [
        "a at 0",
        "a at 60 (2 more like this in the 60 s before)",
        "a at 200",
        "b at 201",
    ]


# --------------------------------------------------------------------------------------- who is left out


def test_lines_of_a_round() -> None:
    f64 = torch.float64
    norms = torch.tensor([[1.0, 1.0, 1.0, 1.0, 1.0], [9.0, float("nan"), 8.0, 7.0, 1.0]], dtype=f64)
    out = torch.tensor([[False, False, False, False, True], [True, True, True, True, True]])
    weights = (~out).to(f64)
    expected = {"mean": torch.full((2, 5), 0.5, dtype=f64), "sigma": torch.full((2, 5), 0.125, dtype=f64)}
    lines = of_round(7, [*"abcde"], torch.tensor([4, 4]), norms, out, weights, expected)
    assert lines == [
        (
            "replica 0 left out",
            0,
            "round 7: replica 0 left out in 1 of 5 layers; layer e: norm 1, mean 0.5, sigma 0.125",
        ),
        (
            "replica 1 left out",
            1,
            "round 7: replica 1 left out in 5 of 5 layers; layer a: norm 9, mean 0.5, sigma 0.125; "
            "layer b: norm nan, mean 0.5, sigma 0.125; layer c: norm 8, mean 0.5, sigma 0.125; 2 more",
        ),
        ("back to the anchor", None, "round 7: 1 of 5 layers back to the anchor, as nobody was left: e"),
    ]
    # A replica without steps is out, and nobody wants to hear of it.
    assert of_round(7, [*"abcde"], torch.tensor([4, 0]), norms, out | (weights > 1), weights, {})[0][1] == 0
    nobody = torch.ones(2, 5, dtype=torch.bool)
    assert of_round(7, [*"abcde"], torch.tensor([0, 0]), norms, nobody, weights * 0, {}) == []


def spiked(rank: int) -> Any:
    model = net()
    test = edit.EMAZTest(alpha=0.5, warmup_rounds=2)
    optimizer = edit.LocalSGDOptimizer(
        model, torch.optim.SGD, lr=0.01, schedule=edit.EverySteps(2), penalty=edit.PseudoGradientPenalty(test)
    )
    reports: list[edit.RoundReport] = []
    optimizer.register_round_hook(reports.append)
    for step in range(13):
        (loss_of(model, step, rank) * (1000.0 if rank == 1 and step == 7 else 1.0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return reports


def test_an_exclusion_says_replica_layer_norm_mean_and_sigma(caplog: pytest.LogCaptureFixture) -> None:
    reports = threads(2, spiked)
    (report,) = [r for r in reports[0] if r.out.any()]
    assert (report.round, report.out.tolist()) == (4, [[False] * 3, [True] * 3])
    # The mean that the test went by, from the norms of the rounds before: alpha 1/2, corrected for its start at 0.
    norms = torch.stack([r.norms for r in reports[0][:3]])
    weights = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64) / 7
    torch.testing.assert_close(report.expected["mean"], torch.einsum("k,krl->rl", weights, norms))
    wanted = "; ".join(
        f"layer {layer}: norm {report.norms[1, n]:.4g}, mean {report.expected['mean'][1, n]:.4g}, "
        f"sigma {report.expected['sigma'][1, n]:.4g}"
        for n, layer in enumerate(report.layers)
    )
    line = f"round 4: replica 1 left out in 3 of 3 layers; {wanted}"
    assert report.events == [line]
    # On the leader, and on the replica itself.
    assert [r.getMessage() for r in caplog.records if r.levelname == "WARNING"] == [line, line]


# ------------------------------------------------------------------------------------------- who is late


def hour(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(seconds))


def test_the_first_of_those_who_wait_says_once_for_whom(caplog: pytest.LogCaptureFixture) -> None:
    notes: dict[int, str] = {}
    now = 1000.0

    def watch(rank: int) -> Watch:
        return Watch(rank, [[0, 1], [2, 3], [4, 5]], 60, "1:00:00", lambda note: notes.update({rank: note}),
                     lambda: dict(notes), now=lambda: now)  # fmt: skip

    watches = [watch(rank) for rank in range(6)]
    now = 2000.0
    for rank in (0, 1, 2, 3, 5):
        watches[rank].note(4, LAUNCHED)
    now = 2100.0
    for rank in (1, 2, 3):
        watches[rank].note(4, APPLYING)

    def look(rank: int, at: float) -> list[str]:
        nonlocal now
        now = at
        caplog.clear()
        watches[rank].look()
        return [record.getMessage() for record in caplog.records]

    for each in watches:  # nobody waits for the store but the thread that looks
        assert each.rank not in notes
        each.look()
    now = 2200.0
    with watches[1].waiting("round 4: averaging buffers"), watches[2].waiting("round 4: averaging buffers"):
        assert look(1, 2259.0) == look(2, 2259.0) == []
        assert look(2, 2260.0) == look(1, 2260.0) == []  # they let each other know that they wait
        assert look(2, 2275.0) == []  # rank 1 is there to say it
        assert look(1, 2275.0) == [
            f"round 4: averaging buffers has waited 75 s, since {hour(2200)}, for replica 0 (rank 0), which launched "
            f"round 4 at {hour(2000)} and has not been heard of since; replica 2 (rank 4, 5), which built its "
            f"optimizer at {hour(1000)} and has not been heard of since. Time-out: 1:00:00"
        ]
        assert look(1, 2500.0) == []
    for rank in range(6):
        watches[rank].note(4, APPLYING)
        watches[rank].look()
    # Nobody is a round behind, and the leader is the one who does something else: the next one says so.
    with ExitStack() as stack:
        for rank in range(1, 6):
            stack.enter_context(watches[rank].waiting("round 4, layer a: sum of pseudo gradients"))
        assert [look(rank, 3500.0) for rank in range(1, 6)] == [[]] * 5
        lines = [look(rank, 3515.0) for rank in range(1, 6)]
    assert lines[1:] == [[]] * 4
    assert lines[0] == [
        f"round 4, layer a: sum of pseudo gradients has waited 1015 s, since {hour(2500)}; no other rank is a "
        "round behind; rank 0 does not wait for the others. Time-out: 1:00:00"
    ]
    assert look(1, 9999.0) == []


def late(rank: int, who: int) -> list[str]:
    """A replica comes when it hears that the other has said that it is late."""
    model = net()
    optimizer = edit.LocalSGDOptimizer(
        model, torch.optim.SGD, lr=0.1, schedule=edit.EverySteps(2), timeout=timedelta(seconds=8)
    )
    store = dist.distributed_c10d._get_default_store()
    said: list[str] = []

    class Listen(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())
            store.set("said", "it")

    logging.getLogger("edit.watch").addHandler(Listen())
    for step in range(2):
        loss_of(model, step, rank).backward()
        if rank == who and step == 1:
            store.get("said")
        optimizer.step()
    optimizer.sync()
    optimizer.close()
    return said


@pytest.mark.parametrize("who", [0, 1])
def test_a_round_that_waits_says_who_is_late_before_the_time_out(who: int) -> None:
    """The limit is a quarter of the time-out, here 2 s."""
    said = processes(2, late, who)
    assert said[who] == []
    (line,) = said[1 - who]
    assert "round 1: exchange of norms has waited" in line
    assert f"for replica {who} (rank {who}), which built its optimizer at" in line


def saves_alone(rank: int, path: str) -> list[str]:
    """Rank 0 does what is common elsewhere, until the time-out; the other one trains on."""
    model = net()
    optimizer = edit.LocalSGDOptimizer(
        model, torch.optim.SGD, lr=0.1, schedule=edit.EverySteps(2), timeout=timedelta(seconds=8)
    )
    said: list[str] = []
    logging.getLogger("edit.watch").addHandler(handler := logging.Handler())
    handler.emit = lambda record: said.append(record.getMessage())
    for step in range(3):
        loss_of(model, step, rank).backward()
        optimizer.step()
    with pytest.raises(edit.SyncError):
        edit.save(path, model, optimizer) if rank == 0 else optimizer.sync()
    optimizer.close()
    return said


def test_who_saves_alone_says_so_and_where_the_others_wait(tmp_path: Path) -> None:
    said = processes(2, saves_alone, str(tmp_path / "saved"))
    assert said[1] == []
    (line,) = said[0]
    assert line.startswith(f"edit.save({tmp_path / 'saved'}), which all ranks must call, has waited")
    assert "no other rank is a round behind; rank 1 waits elsewhere: round 2: exchange of norms." in line


# ------------------------------------------------------------------------------------------ stages' names


def test_layers_of_one_name_in_two_stages_are_two() -> None:
    said = {
        0: {"stage": 0, "layers": {"(root)": [], "blocks.0": []}},
        1: {"stage": 1, "layers": {"(root)": [], "blocks.1": []}},
    }
    assert tell_stages_apart(said) == {
        0: {"(root)": "(root) (stage 0)", "blocks.0": "blocks.0"},
        1: {"(root)": "(root) (stage 1)", "blocks.1": "blocks.1"},
    }
    one = {rank: {"stage": None, "layers": {"(root)": []}} for rank in (0, 1)}
    assert tell_stages_apart(one) == {0: {"(root)": "(root)"}, 1: {"(root)": "(root)"}}


# ------------------------------------------------------------------------- what only looks like the optimizer


class Imitation:
    """As Lightning Fabric's wrapper: derived from the optimizer's class when it is made, empty but for a reference."""

    def __init__(self, optimizer: edit.LocalSGDOptimizer) -> None:
        self._optimizer = optimizer
        self.__class__ = type("FabricLocalSGDOptimizer", (Imitation, type(optimizer)), {})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


def test_a_wrapper_that_imitates_the_optimizer_is_told_so_and_changes_nothing() -> None:
    optimizer = edit.LocalSGDOptimizer(net(), torch.optim.SGD, lr=0.1, schedule=edit.EverySteps(1))
    wrapped: Any = Imitation(optimizer)
    for call in (wrapped.sync, wrapped.close, lambda: wrapped.consensus().__enter__(), wrapped.refresh):
        with pytest.raises(
            RuntimeError, match="FabricLocalSGDOptimizer only looks like the LocalSGDOptimizer"
        ):
            call()
    assert vars(wrapped).keys() == {"_optimizer"}
    loss_of(optimizer.model, 0, 0).backward()
    optimizer.step()
    optimizer.sync()
    assert optimizer.rounds == 2  # hooks and groups are still there
