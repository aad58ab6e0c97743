"""HOW the anchor moves: steps that a reader can check, on one number or a few."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from edit.outer import Average, HeavyBall, Nesterov, Outer

F64 = torch.float64


def vector(*values: float) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values, dtype=F64))


def course(outer: Any, start: float, *gradients: float) -> list[float]:
    """The anchor after each outer step."""
    a = vector(start)
    optimizer, seen = outer([a]), []
    for g in gradients:
        a.grad = torch.tensor([g], dtype=F64)
        optimizer.step()
        seen.append(a.item())
    return seen


def test_nesterov_by_hand() -> None:
    """lr 1/2, β 1/2, gradients 1, 1:  m = 1, a = 0 − ½(1 + ½·1) = −0.75;
    m = ½ + 1 = 1.5, a = −0.75 − ½(1 + ½·1.5) = −1.625."""
    assert course(Nesterov(lr=0.5, momentum=0.5), 0.0, 1.0, 1.0) == [-0.75, -1.625]


def test_nesterov_without_momentum_is_sgd() -> None:
    assert course(Nesterov(lr=0.5, momentum=0.0), 0.0, 1.0, 1.0) == [-0.5, -1.0]


def test_average_is_the_mean_of_the_parameters() -> None:
    """a = 3, θ = 1 and 2:  Δ̄ = (2 + 1)/2 = 1.5, and a − Δ̄ = 1.5 is their mean."""
    assert course(Average(), 3.0, 1.5) == [1.5]


def test_heavy_ball_by_hand() -> None:
    """lr ½, β ½, gap 2, c 1, gradients 2, 4, −8:  m = 1, a = −0.5;
    m = ½ + 2 = 2.5 → 1, a = −1;  m = ½ − 4 = −3.5 → −1, a = −0.5."""
    outer = HeavyBall(lr=0.5, momentum=0.5, gap=2.0, clip=1.0)
    assert course(outer, 0.0, 2.0, 4.0, -8.0) == [-0.5, -1.0, -0.5]


def test_heavy_ball_without_clip() -> None:
    """m = 1, a = −0.5;  m = 2.5, a = −1.75;  m = 1.25 − 4 = −2.75, a = −0.375."""
    outer = HeavyBall(lr=0.5, momentum=0.5, gap=2.0, clip=None)
    assert course(outer, 0.0, 2.0, 4.0, -8.0) == [-0.5, -1.75, -0.375]


@given(
    gradients=st.lists(st.floats(-10, 10), min_size=1, max_size=6),
    lr=st.floats(0, 2),
    momentum=st.floats(0, 0.99),
)
def test_heavy_ball_without_gap_and_clip_is_sgd_with_momentum(
    gradients: list[float], lr: float, momentum: float
) -> None:
    ours = course(HeavyBall(lr, momentum, gap=1.0, clip=None), 1.0, *gradients)
    assert ours == pytest.approx(
        course(partial(torch.optim.SGD, lr=lr, momentum=momentum), 1.0, *gradients), rel=1e-12, abs=1e-12
    )


OUTERS: list[Outer] = [Nesterov(), Nesterov(momentum=0), Average(), HeavyBall(), HeavyBall(0.3, 0.9, 2, None)]
each = pytest.mark.parametrize("outer", OUTERS, ids=repr)


@each
def test_elementwise(outer: Outer) -> None:
    """A rank holds a part of each vector: parts must move as the whole does, an empty part too."""
    generator = torch.Generator().manual_seed(0)
    whole = vector(*range(7))
    parts = [nn.Parameter(part.clone()) for part in whole.detach().split([4, 0, 3])]
    optimizers = [outer([whole]), outer(parts)]
    for _ in range(4):
        whole.grad = 3 * torch.randn(7, generator=generator, dtype=F64)
        for part, gradient in zip(parts, whole.grad.split([4, 0, 3]), strict=True):
            part.grad = gradient.clone()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(torch.cat([part.detach() for part in parts]), whole.detach(), rtol=0, atol=0)


@each
def test_only_what_has_a_gradient_moves(outer: Outer) -> None:
    """The engine steps one layer at a time: the others have momentum, but no gradient."""
    a, b = vector(1.0), vector(1.0)
    optimizer = outer([a, b])
    a.grad, b.grad = torch.ones(1, dtype=F64), torch.ones(1, dtype=F64)
    optimizer.step()
    kept = b.item()
    a.grad, b.grad = torch.ones(1, dtype=F64), None
    optimizer.step()
    assert b.item() == kept


@each
def test_lr_is_live(outer: Outer) -> None:
    a = vector(1.0)
    optimizer = outer([a])
    optimizer.param_groups[0]["lr"] = 0.0
    a.grad = torch.ones(1, dtype=F64)
    optimizer.step()
    assert a.item() == 1.0


@each
def test_state_survives_saving(outer: Outer) -> None:
    a = vector(1.0, 2.0)
    optimizer = outer([a])
    a.grad = torch.tensor([1.0, -0.5], dtype=F64)
    optimizer.step()
    b = nn.Parameter(a.detach().clone())
    resumed = outer([b])
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # as from a file
    a.grad = torch.tensor([0.5, 0.25], dtype=F64)
    b.grad = a.grad.clone()
    optimizer.step()
    resumed.step()
    assert torch.equal(a, b)


def test_groups_and_state_of_heavy_ball() -> None:
    a = vector(1.0)
    optimizer = HeavyBall(0.5, 0.25, 2.0, 3.0)([a])
    group = {key: optimizer.param_groups[0][key] for key in ("lr", "momentum", "gap", "clip")}
    assert group == {"lr": 0.5, "momentum": 0.25, "gap": 2.0, "clip": 3.0}
    assert not optimizer.state

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (a**2).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 1.0  # type: ignore[arg-type]
    assert list(optimizer.state[a]) == ["momentum_buffer"]
    assert a.item() == 0.5  # gradient 2, m = 2/2, a = 1 − ½·1
    assert optimizer.state[a]["momentum_buffer"].item() == 1.0
