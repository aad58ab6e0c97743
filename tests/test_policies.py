"""What holds for all policies: immutable settings, checked when they are made, and no knowledge of ranks."""

from __future__ import annotations

import ast
import math
import pickle
from dataclasses import FrozenInstanceError, fields
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edit import anomaly as anomaly_module
from edit.anomaly import EMAZTest
from edit.outer import Average, HeavyBall, Nesterov
from edit.penalty import MEAN, PseudoGradientPenalty
from edit.schedule import EverySeconds, EverySteps, Progress

POLICIES = [
    EverySteps(),
    EverySteps(7, warmup_steps=3),
    EverySeconds(),
    EverySeconds(0.1, warmup_steps=3),
    EMAZTest(),
    EMAZTest(alpha=1 / 3, threshold=2, warmup_rounds=0, patience=1),
    PseudoGradientPenalty(),
    PseudoGradientPenalty(EMAZTest(0.1), 0.7, None, 1),
    MEAN,
    Nesterov(),
    Nesterov(0, 0),
    Average(),
    HeavyBall(),
    HeavyBall(0.1, 0.9, 48, None),
]
CLASSES = list(dict.fromkeys(type(policy) for policy in POLICIES))
NAMES = {cls.__name__: cls for cls in CLASSES}
each_policy = pytest.mark.parametrize("policy", POLICIES, ids=repr)
each_class = pytest.mark.parametrize("cls", CLASSES)


@each_policy
def test_immutable(policy: Any) -> None:
    for field in fields(policy):
        with pytest.raises(FrozenInstanceError):
            setattr(policy, field.name, 1)


@each_policy
def test_repr_makes_it_again(policy: Any) -> None:
    again = eval(repr(policy), dict(NAMES))
    assert again == policy
    assert hash(again) == hash(policy)
    assert repr(again) == repr(policy)
    assert pickle.loads(pickle.dumps(policy)) == policy


def test_all_differ() -> None:
    assert len(set(POLICIES)) == len(set(map(repr, POLICIES))) == len(POLICIES)


@each_class
def test_class_alone_has_defaults(cls: Any) -> None:
    assert cls() == cls()


def test_a_class_stands_for_its_defaults() -> None:
    assert PseudoGradientPenalty(anomaly=EMAZTest) == PseudoGradientPenalty()
    assert PseudoGradientPenalty().anomaly == EMAZTest()


def test_settings_of_the_paper() -> None:
    assert EverySteps() == EverySteps(interval=128, warmup_steps=0)
    assert EverySeconds() == EverySeconds(interval=600.0, warmup_steps=0)
    assert EMAZTest() == EMAZTest(alpha=0.02, threshold=3.0, warmup_rounds=10, patience=5)
    assert PseudoGradientPenalty() == PseudoGradientPenalty(EMAZTest(), 1.0, 10.0, 0.5)
    assert Nesterov() == Nesterov(lr=0.8, momentum=0.85)
    assert HeavyBall() == HeavyBall(lr=1.0, momentum=0.5, gap=1.0, clip=1.0)


def test_equal_settings_have_one_repr() -> None:
    """It is compared across ranks, so it must not say who made a number."""
    assert repr(EverySteps(np.int64(7), np.int32(3))) == "EverySteps(interval=7, warmup_steps=3)"
    assert repr(EverySeconds(60)) == repr(EverySeconds(np.float64(60.0))) == repr(EverySeconds(Fraction(60)))
    assert repr(Nesterov(1, np.float64(0.5))) == "Nesterov(lr=1.0, momentum=0.5)"
    mine, yours = EverySeconds(60.0, clock=lambda: 1.0), EverySeconds(60.0, clock=lambda: 2.0)
    assert mine == yours
    assert hash(mine) == hash(yours)
    assert repr(mine) == repr(yours) == "EverySeconds(interval=60.0, warmup_steps=0)"
    assert (mine.clock(), yours.clock()) == (1.0, 2.0)


NO_INT = (True, 1.5, 128.0, "128", None)
NO_NUMBER = (True, "1", 1j, [1.0])
NOT_FINITE = (math.nan, math.inf, -math.inf, 10**400)
WRONG: dict[tuple[type, str], tuple[tuple[Any, ...], tuple[Any, ...]]] = {
    # class, argument: values of a wrong type, values out of bounds
    (EverySteps, "interval"): (NO_INT, (0, -1)),
    (EverySteps, "warmup_steps"): (NO_INT, (-1,)),
    (EverySeconds, "interval"): ((*NO_NUMBER, None), (*NOT_FINITE, 0, -1.0)),
    (EverySeconds, "warmup_steps"): (NO_INT, (-1,)),
    (EverySeconds, "clock"): ((None, 1.0), ()),
    (EMAZTest, "alpha"): ((*NO_NUMBER, None), (*NOT_FINITE, 0, -0.1, 1.1)),
    (EMAZTest, "threshold"): ((*NO_NUMBER, None), (*NOT_FINITE, 0, -3.0)),
    (EMAZTest, "warmup_rounds"): (NO_INT, (-1,)),
    (EMAZTest, "patience"): (NO_INT, (0, -1)),
    (PseudoGradientPenalty, "anomaly"): ((1.0, "EMAZTest", dict, False), ()),
    (PseudoGradientPenalty, "temperature"): (NO_NUMBER, (*NOT_FINITE, 0, -1.0)),
    (PseudoGradientPenalty, "max_norm"): (NO_NUMBER, (*NOT_FINITE, 0, -1.0)),
    (PseudoGradientPenalty, "step_exponent"): ((*NO_NUMBER, None), (*NOT_FINITE, -0.5)),
    (Nesterov, "lr"): ((*NO_NUMBER, None), (*NOT_FINITE, -0.1)),
    (Nesterov, "momentum"): ((*NO_NUMBER, None), (*NOT_FINITE, -0.1, 1.0)),
    (HeavyBall, "lr"): ((*NO_NUMBER, None), (*NOT_FINITE, -0.1)),
    (HeavyBall, "momentum"): ((*NO_NUMBER, None), (*NOT_FINITE, -0.1, 1.0)),
    (HeavyBall, "gap"): ((*NO_NUMBER, None), (*NOT_FINITE, 0, -1.0)),
    (HeavyBall, "clip"): (NO_NUMBER, (*NOT_FINITE, 0, -1.0)),
}
CASES = [
    (cls, name, value, error)
    for (cls, name), wrong in WRONG.items()
    for error, values in zip((TypeError, ValueError), wrong, strict=True)
    for value in values
]


@pytest.mark.parametrize(("cls", "name", "value", "error"), CASES, ids=lambda x: str(x)[:12])
def test_wrong_settings(cls: Any, name: str, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        cls(**{name: value})
    who, _, rest = str(caught.value).partition(": ")
    rule, said, given_and_remedy = rest.partition(", but is ")
    shown = repr(value() if isinstance(value, type) else value)
    assert who == cls.__name__
    assert rule.startswith(f"{name} must ")
    assert said
    assert given_and_remedy.startswith(f"{shown}: ")
    assert len(given_and_remedy) > len(shown) + 10  # a remedy


def test_every_setting_is_checked() -> None:
    assert {(cls, field.name) for cls in CLASSES for field in fields(cls)} == set(WRONG)


def test_progress_is_a_plain_record() -> None:
    progress = Progress(steps=1, local_steps=2, rounds=3, total_steps=4, seconds=5.0)
    assert not hasattr(progress, "__dict__")
    with pytest.raises(FrozenInstanceError):
        progress.steps = 2  # type: ignore[misc]


@pytest.mark.parametrize("part", ["schedule", "anomaly", "penalty", "outer", "checks"])
def test_policies_know_nothing_of_ranks(part: str) -> None:
    """Their own files import each other and torch; nothing else of the package, no torch.distributed."""
    source = (Path(anomaly_module.__file__).parent / f"{part}.py").read_text()
    nodes = list(ast.walk(ast.parse(source)))
    assert "distributed" not in {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    modules = [node.module or "" for node in imports]
    modules += [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    assert not any("distributed" in module for module in modules)
    assert {node.module for node in imports if node.level} <= {"checks", "anomaly"}
