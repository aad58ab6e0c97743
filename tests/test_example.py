"""The main job: its model, its data, its flags, and one short run under torchrun."""

from __future__ import annotations

import dataclasses
import math
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.run import get_args_parser

from ranks import mesh, processes

EXAMPLES = Path(__file__).parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))

import llama  # noqa: E402
import train_llama  # noqa: E402

TINY = llama.SIZES["tiny"]
BASE = "--method edit --size tiny --batch 2 --length 32 --interval 4 --sync-warmup 0 --eval-windows 10"


def tokens(batch: int = 2, length: int = 12, seed: int = 0) -> torch.Tensor:
    return torch.randint(256, (batch, length), generator=torch.Generator().manual_seed(seed))


# ----------------------------------------------------------------------------------------------- model


def test_logits_do_not_see_the_future() -> None:
    torch.manual_seed(0)
    model, x = llama.Llama(TINY), tokens()
    changed = x.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % 256
    before, after = model(x), model(changed)
    torch.testing.assert_close(after[:, :7], before[:, :7])
    assert not torch.allclose(after[:, 7], before[:, 7])


def test_grouped_queries_are_multi_head_attention_with_repeated_heads() -> None:
    torch.manual_seed(0)
    grouped = llama.Attention(TINY)
    full = llama.Attention(dataclasses.replace(TINY, kv_heads=TINY.heads))
    state = grouped.state_dict()
    for name in ("key.weight", "value.weight"):
        heads = state[name].unflatten(0, (TINY.kv_heads, -1))
        state[name] = heads.repeat_interleave(TINY.heads // TINY.kv_heads, 0).flatten(0, 1)
    full.load_state_dict(state)
    x = torch.randn(2, 9, TINY.dim)
    torch.testing.assert_close(grouped(x), full(x))


def test_rope_depends_on_the_distance_alone_and_keeps_lengths() -> None:
    torch.manual_seed(0)
    q, k = (torch.randn(8).expand(20, 8) for _ in range(2))
    table = llama.rope_table(20, 8, 10_000.0)
    scores = llama.rotate(q, table) @ llama.rotate(k, table).T  # [position of q, position of k]
    for distance in (-3, 0, 5):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))
    assert not torch.isclose(scores[0, 0], scores[0, 5])
    torch.testing.assert_close(llama.rotate(q, table).norm(dim=1), q.norm(dim=1))


@pytest.mark.parametrize("tied", [True, False])
def test_the_model_begins_with_nearly_equal_logits(tied: bool) -> None:
    torch.manual_seed(0)
    model = llama.Llama(dataclasses.replace(TINY, tied=tied))
    assert (model.head.weight is model.embedding.weight) == tied
    loss = model(tokens(8, 64), tokens(8, 64, seed=1)).item()
    assert loss == pytest.approx(math.log(256), abs=0.1)


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 2 \\* heads"):
        llama.Llama(dataclasses.replace(TINY, kv_heads=3))


# ------------------------------------------------------------------------------------------------ data


def test_the_standard_library_is_split_into_disjoint_files() -> None:
    files = train_llama.find_files(None)
    training, held_out = train_llama.split_files(files)
    assert len(files) > 300
    assert not set(training) & set(held_out)
    assert set(training) | set(held_out) == {path for _, path in files}
    assert 0.03 < len(held_out) / len(files) < 0.07
    assert (training, held_out) == train_llama.split_files(train_llama.find_files(None))
    assert not any(re.search("/(tests?|site-packages)/", name) for name, _ in files)


def test_the_split_goes_by_names_not_by_where_they_are() -> None:
    names = [f"{n}.py" for n in range(100)]
    here, there = (train_llama.split_files([(n, Path(root, n)) for n in names]) for root in ("a", "b"))
    assert [[p.name for p in part] for part in here] == [[p.name for p in part] for part in there]


def test_a_users_files_and_folders(tmp_path: Path) -> None:
    (tmp_path / "texts" / ".git").mkdir(parents=True)
    (tmp_path / "texts" / ".git" / "hidden").write_text("h" * 99)
    for letter in "abc":
        (tmp_path / "texts" / letter).write_text(letter * 10)
    (tmp_path / "single").write_text("s" * 99)
    assert [path.name for _, path in train_llama.find_files([tmp_path / "texts", tmp_path / "single"])] == [
        "single", "a", "b", "c",
    ]  # fmt: skip
    training, held_out = train_llama.load_text([tmp_path / "texts"])
    assert (len(training), len(held_out)) == (22, 11)
    training, held_out = train_llama.load_text([tmp_path / "single"])
    assert (len(training), len(held_out)) == (95, 5)


@pytest.mark.parametrize("epoch", [0, 1])
def test_every_rank_has_its_own_part(epoch: int) -> None:
    text = torch.arange(1001, dtype=torch.int32)  # every window is known by its first number
    windows = train_llama.Windows(text, length=10)
    seen = []
    for rank in range(4):
        loader = train_llama.make_loader(windows, 5, rank, 4, seed=3)
        loader.sampler.set_epoch(epoch)
        batches = list(loader)
        assert all(batch.shape == (5, 11) for batch in batches)
        seen.append({int(window[0]) for batch in batches for window in batch})
    assert [len(part) for part in seen] == [25] * 4
    assert set.union(*seen) == set(range(0, 1000, 10))  # so no two ranks share one


def test_epochs_follow_each_other_in_new_orders() -> None:
    windows = train_llama.Windows(torch.arange(101, dtype=torch.int32), length=10)
    batches = train_llama.endless(train_llama.make_loader(windows, 10, 0, 1, seed=0), torch.device("cpu"))
    (first, targets), (second, _) = next(batches), next(batches)
    torch.testing.assert_close(targets, first + 1)
    assert not torch.equal(first, second)
    torch.testing.assert_close(first.sort(0).values, second.sort(0).values)


def test_too_little_text_is_an_error() -> None:
    windows = train_llama.Windows(torch.zeros(50), length=10)
    with pytest.raises(SystemExit, match="too little text"):
        train_llama.make_loader(windows, 2, 0, 4, seed=0)


# ------------------------------------------------------------------------------------------------- job


def test_no_flag_begins_one_of_torchruns() -> None:
    # torchrun's parser looks for its own flags, and their prefixes, behind the name of the script too.
    ours = {flag for action in train_llama.make_parser()._actions for flag in action.option_strings}
    theirs = get_args_parser()._option_string_actions
    clash = {(flag, other) for flag in ours - {"-h", "--help"} for other in theirs if other.startswith(flag)}
    assert not clash


def test_the_warmup_leaves_whole_rounds_and_most_steps() -> None:
    args = train_llama.parse([])
    assert args.sync_warmup <= args.steps / 4
    assert (args.steps - args.sync_warmup) % args.interval == 0
    assert (args.steps - args.sync_warmup) // args.interval >= 40
    assert train_llama.parse(["--steps", "5"]).sync_warmup == 0


@pytest.mark.parametrize(
    "wrong",
    [
        ["--compare", "edit,edti"],
        ["--interval", "0"],
        ["--length", "9999"],
        ["--ste", "3"],
        ["--save-every", "4", "--compare", "edit,baseline"],
        ["--out", "x", "--resume", "auto", "--method", "local"],
        ["--out", "x", "--save-every", "0"],
        ["--resume", "auto"],
    ],
)
def test_wrong_flags_are_named(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        train_llama.parse(wrong)
    assert wrong[-1].split(",")[-1] in capsys.readouterr().err


def run_alone(monkeypatch: pytest.MonkeyPatch, out: Path, *flags: str) -> dict[str, Any]:
    """The job in this process, as a single rank. Returns the newest checkpoint's ``extra``, and what it came to."""
    monkeypatch.setattr(sys, "argv", ["", *BASE.split(), "--data", str(EXAMPLES), "--out", str(out), *flags])
    results: list[train_llama.Result] = []
    monkeypatch.setattr(train_llama, "show", lambda found, _: results.extend(found))
    monkeypatch.setattr(train_llama, "plot", lambda *_: None)
    threads = torch.get_num_threads()
    train_llama.main()
    torch.set_num_threads(threads)
    return vars(results[0])


def test_the_job_resumes_exactly(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Stopped by hand after 10 steps, in mid-round: losses, rounds and perplexity are those of the whole run."""
    monkeypatch.setattr(train_llama.edit, "save", stop_after(train_llama.edit.save, 2))
    with pytest.raises(KeyboardInterrupt):
        run_alone(monkeypatch, tmp_path / "a", "--steps", "18", "--save-every", "5")
    dist.destroy_process_group()
    monkeypatch.undo()
    resumed = run_alone(monkeypatch, tmp_path / "a", "--steps", "18", "--resume", "auto")
    whole = run_alone(monkeypatch, tmp_path / "b", "--steps", "18")
    for name in ("perplexity", "tokens", "losses"):
        assert resumed[name] == whole[name], name
    assert len(whole["losses"]) == 18
    assert [report.round for report in resumed["reports"]] == [1, 2, 3, 4, 5]
    for mine, theirs in zip(resumed["reports"], whole["reports"], strict=True):
        assert torch.equal(mine.norms, theirs.norms)


def stop_after(save: Callable[..., Any], number: int) -> Callable[..., Any]:
    """``save``, and Ctrl-C after its ``number``-th call."""
    left = iter(range(number - 1))

    def call(*args: Any, **kwargs: Any) -> Any:
        saved = save(*args, **kwargs)
        saved.result()
        if next(left, None) is None:
            raise KeyboardInterrupt
        return saved

    return call


def test_the_job_goes_on_with_more_ranks_and_stops_by_tokens(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """8 steps of one rank with 2 windows of 32 bytes; then both ranks of two make as many as are left of 1,024."""
    one = run_alone(monkeypatch, tmp_path, "--steps", "8", "--save-every", "8")
    assert one["tokens"] == 8 * 2 * 32
    for two in processes(2, two_replicas, tmp_path):
        assert two["tokens"] == 1024
        assert [report.round for report in two["reports"]] == [1, 2]  # the second was due when it was saved
        assert [report.steps.tolist() for report in two["reports"]] == [[4], [4, 4]]
    saved = sorted(path.name for path in (tmp_path / "edit" / "checkpoints").iterdir())
    assert saved == ["step-0000008", "step-0000012"]  # 12 = 8 + (1024 - 512) / 128


def run_two(out: Path, flags: str) -> train_llama.Result:
    args = train_llama.parse([*flags.split(), "--data", str(EXAMPLES), "--out", str(out)])
    training, unseen = (train_llama.Windows(text, args.length) for text in train_llama.load_text(args.data))
    held_out = torch.stack([unseen[index] for index in range(4)])
    return train_llama.train(args.method, args, mesh(2, 1), training, held_out, out)


def two_replicas(rank: int, out: Path) -> dict[str, Any]:
    found = run_two(out, f"{BASE} --resume auto --stop-tokens 1024 --save-every 4")
    train_llama.show([found], mesh(2, 1))  # its reports are of different numbers of replicas
    return vars(found)


def by_the_clock(rank: int, out: Path) -> tuple[int, list[int]]:
    """Replicas of different speed, so with different numbers of steps; saved after each round, and resumed."""
    base = "--method a_edit --size tiny --batch 2 --length 32 --interval-seconds 0.1 --sync-warmup 2 --save-every 1"
    run_two(out, f"{base} --steps 20")
    found = run_two(out, f"{base} --steps 40 --resume auto")
    return found.tokens, [report.round for report in found.reports]


def test_replicas_that_go_by_the_clock_save_and_resume(tmp_path: Path) -> None:
    a, b = processes(2, by_the_clock, tmp_path)
    assert a == b
    tokens, rounds = a
    assert tokens >= 40 * 2 * 2 * 32
    assert rounds == list(range(1, len(rounds) + 1))
    saved = sorted(path.name for path in (tmp_path / "a_edit" / "checkpoints").iterdir())
    assert len(saved) == 2
    assert saved[-1] == f"round-{rounds[-1]:06}" or saved[-1] == f"round-{rounds[-1] - 1:06}"


def test_two_methods_under_torchrun(tmp_path: Path) -> None:
    flags = "--size tiny --steps 12 --batch 2 --interval 3 --length 32 --eval-windows 10"
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4",
         str(EXAMPLES / "train_llama.py"), "--data", str(EXAMPLES), "--compare", "baseline,edit", *flags.split(),
         "--out", str(tmp_path)],
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    table = {line.split()[0]: line.split()[1:] for line in run.stdout.splitlines() if line}
    assert table["baseline"][1:2] == ["1.0000"]
    assert 0.5 < float(table["edit"][1]) < 2
    assert (table["baseline"][4], table["edit"][4]) == ("0", "3")
    assert float(table["edit"][3]) < float(table["baseline"][3])  # MB
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert "Warning" not in run.stderr

    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = event_accumulator.EventAccumulator(str(tmp_path / "edit")).Reload()
    tags = events.Tags()["scalars"]
    assert {"train/loss", "train/lr", "train/tokens_per_second", "held_out/perplexity"} <= set(tags)
    assert {"norm/layers.0/replica_1", "weight/root/replica_0", "out/layers.1/replica_0", "clip/root"} <= set(
        tags
    )
    assert {"round/bytes_sent", "round/seconds_waited", "rolled_back/layers.0"} <= set(tags)
    assert [point.step for point in events.Scalars("round/steps/replica_0")][:3] == [1, 2, 3]
    assert [point.value for point in events.Scalars("round/steps/replica_0")][:3] == [3, 3, 3]


def test_the_minimal_script(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    done = subprocess.run(
        [*command, str(EXAMPLES / "minimal.py")], capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr
    said = re.fullmatch(r"loss (\d\.\d+) after 1280 steps and 40 rounds\n", done.stdout)
    assert said, done.stdout
    assert float(said[1]) < 1.5


def test_a_new_run_does_not_remove_anothers_checkpoints(tmp_path: Path) -> None:
    folder = tmp_path / "edit" / "checkpoints" / "step-0000004"
    folder.mkdir(parents=True)
    (folder / ".edit").write_text("1")
    processes(1, starts_anew, str(tmp_path))


def starts_anew(rank: int, out: str) -> None:
    args = train_llama.parse([*BASE.split(), "--out", out, "--save-every", "2"])
    windows = train_llama.Windows(torch.zeros(400, dtype=torch.uint8), args.length)
    with pytest.raises(SystemExit, match=r"step-0000004.*--resume auto"):
        train_llama.train("edit", args, mesh(1, 1), windows, torch.zeros(2, 33, dtype=torch.uint8), Path(out))
