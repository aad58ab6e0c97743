"""The method once more, slow and obvious: R replicas in one process, fp64, plain loops.

Written from ``ALGORITHM.md`` alone, to be read beside it: the names are the page's symbols, and the
functions come in the order of its steps. Nothing here knows of ranks, shards, hooks or overlap. Where the
page leaves a choice open, the comment begins with "Choice:".

Not here: the clock itself (`Reference.run_rounds` is told how many steps each replica made between two
rounds).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Loss = Callable[[nn.Module], Tensor]
State = dict[str, Tensor]
Inner = Callable[[list[nn.Parameter]], Optimizer]
Outer = Callable[[list[Tensor]], Optimizer]

ANOMALY = {"alpha": 0.02, "threshold": 3.0, "warmup_rounds": 10, "patience": 5}


# --- step 1: norm ------------------------------------------------------------------------------------


def norm(tensors: Sequence[Tensor]) -> float:
    """‖·‖₂ over the whole layer: squares summed over all of it, then the root."""
    squares = 0.0
    for tensor in tensors:
        squares += float((tensor * tensor).sum())
    return math.sqrt(squares)  # of NaN: NaN, of Inf: Inf


def mean_steps(s: Sequence[int]) -> float:
    """s̄: over the replicas with s_i > 0."""
    moving = [s_i for s_i in s if s_i > 0]
    return sum(moving) / len(moving) if moving else 0.0


def scaled_norm(G_i: float, s_i: int, s_bar: float, e: float) -> float:
    """g_i = G_i / (s_i/s̄)^e."""
    if s_i == 0:
        return 0.0  # nobody reads it: the replica is out
    return G_i / (s_i / s_bar) ** e


# --- steps 2 and 3: out, statistics ------------------------------------------------------------------


@dataclass
class Statistics:
    """Of one replica and layer."""

    m: float = 0.0
    v: float = 0.0
    n: int = 0
    k: int = 0


@dataclass(frozen=True)
class Detector:
    """Part 2 of the penalty, and the statistics that it looks at."""

    alpha: float = 0.02
    threshold: float = 3.0
    warmup_rounds: int = 10
    patience: int = 5

    def anomalous(self, stat: Statistics, g: float) -> bool:
        """The test, with the values before this sync."""
        if stat.n < self.warmup_rounds or stat.n == 0:
            return False
        c = 1 - (1 - self.alpha) ** stat.n
        mu = stat.m / c
        sigma = max(math.sqrt(stat.v / c), 1e-6 * mu)
        return g > mu + self.threshold * sigma

    def feed(self, stat: Statistics, g: float, anomalous: bool) -> None:
        """What a replica that moved by a finite norm tells its statistics."""
        if anomalous:
            stat.k += 1
            if stat.k < self.patience:
                return
            stat.m, stat.v, stat.n, stat.k = 0.0, 0.0, 0, 0  # it starts again from this g
        stat.k = 0
        stat.n += 1
        stat.m = (1 - self.alpha) * stat.m + self.alpha * g
        mu = stat.m / (1 - (1 - self.alpha) ** stat.n)
        stat.v = (1 - self.alpha) * stat.v + self.alpha * (g - mu) ** 2


# --- step 4: weights ---------------------------------------------------------------------------------


def equal_weights(out: Sequence[bool]) -> list[float]:
    """Part 4 switched off: equal over those not out; G_i = 0 counts."""
    left = sum(not o for o in out)
    return [0.0 if o else 1.0 / left for o in out]


def penalty_weights(g: Sequence[float], G: Sequence[float], out: Sequence[bool], T: float) -> list[float]:
    """The softmax of −g/T over the replicas that are not out and moved.

    Choice: a replica with G_j = 0 is missing in the denominator too ("it would take almost all of it and
    stop the others"), so that the weights that are left sum to 1.
    """
    heard = [j for j in range(len(g)) if not out[j] and G[j] != 0]
    if not heard:
        return [0.0] * len(g)
    least = min(g[j] for j in heard)  # the softmax is the same after a shift: large norms don't underflow
    total = sum(math.exp(-(g[j] - least) / T) for j in heard)
    return [math.exp(-(g[i] - least) / T) / total if i in heard else 0.0 for i in range(len(g))]


# --- steps 6 and 7: combine, clip --------------------------------------------------------------------


def combine(w: Sequence[float], delta: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Δ̄ = Σ w_i Δ_i; a replica without weight contributes exactly 0, whatever its Δ holds."""
    total = [torch.zeros_like(d) for d in delta[0]]
    for w_i, delta_i in zip(w, delta, strict=True):
        if w_i == 0:
            continue
        for t, d in zip(total, delta_i, strict=True):
            t += w_i * d
    return total


def clip_factor(delta_bar: Sequence[Tensor], phi: float | None) -> float:
    """min(1, φ/(‖Δ̄‖₂ + ε))."""
    if phi is None:
        return 1.0
    return min(1.0, phi / (norm(delta_bar) + 1e-6))


# --- step 8: outer optimizers ------------------------------------------------------------------------


def nesterov(lr: float, momentum: float) -> Outer:
    return lambda tensors: torch.optim.SGD(tensors, lr=lr, momentum=momentum, nesterov=True)


def averaging(tensors: list[Tensor]) -> Optimizer:
    """lr 1, momentum 0: a ← a − Δ̂."""
    return torch.optim.SGD(tensors, lr=1.0)


class CO2(Optimizer):
    """Heavy ball with gap penalty and clip, element by element: Python floats, no tensor arithmetic.

    ``m ← β·m + Δ̄/gap``, ``m ← clamp(m, −c, c)``, ``a ← a − lr·m``; c = None: no clamp.

    Choice: what the clamp gives is the m of the next round (the page assigns it).
    """

    def __init__(
        self,
        tensors: list[Tensor],
        lr: float = 1.0,
        beta: float = 0.5,
        gap: float = 1.0,
        c: float | None = 1.0,
    ) -> None:
        super().__init__(tensors, {"lr": lr, "beta": beta, "gap": gap, "c": c})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            lr, beta, gap, c = (group[name] for name in ("lr", "beta", "gap", "c"))
            for a in group["params"]:
                if a.grad is None:
                    continue
                state = self.state[a]
                m = state.get("m", torch.zeros_like(a)).flatten().tolist()
                new = a.flatten().tolist()
                for j, delta in enumerate(a.grad.flatten().tolist()):
                    m[j] = beta * m[j] + delta / gap
                    if c is not None:
                        m[j] = min(max(m[j], -c), c)
                    new[j] = new[j] - lr * m[j]
                state["m"] = torch.tensor(m, dtype=a.dtype).reshape(a.shape)
                a.copy_(torch.tensor(new, dtype=a.dtype).reshape(a.shape))


def co2_outer(lr: float = 1.0, beta: float = 0.5, gap: float = 1.0, c: float | None = 1.0) -> Outer:
    return lambda tensors: CO2(tensors, lr, beta, gap, c)


# --- the buffers -------------------------------------------------------------------------------------


def merged_buffer(values: Sequence[Tensor], s: Sequence[int], last: Tensor) -> Tensor:
    """One persistent buffer after a round, from its value on every replica and after the last round."""
    if not values[0].is_floating_point():
        return values[0].clone()
    good = [value for value, s_i in zip(values, s, strict=True) if s_i > 0 and bool(value.isfinite().all())]
    if not good:
        return last.clone()
    total = torch.zeros_like(last)
    for value in good:
        total += value
    return total / len(good)


def persistent_buffers(model: nn.Module) -> State:
    """Choice: other buffers are no part of the model's state and stay each replica's own."""
    kept = model.state_dict()
    return {name: buffer for name, buffer in model.named_buffers() if name in kept}


def snapshot(model: nn.Module) -> State:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


# --- what one round leaves behind --------------------------------------------------------------------


@dataclass
class Round:
    """One sync of all layers. ``[R][L]``: first the replica, then the layer."""

    steps: list[int]  # [R]     s_i, the inner steps that went into the round
    norms: list[list[float]]  # [R][L]  G
    scaled: list[list[float]]  # [R][L]  g (0 where s_i = 0)
    out: list[list[bool]]  # [R][L]
    weights: list[list[float]]  # [R][L]  all 0 where nobody is left or nobody moved
    clip: list[float | None] = field(default_factory=list)  # [L]  None: no outer step was made
    called: list[bool] = field(default_factory=list)  # [R]  launched by sync()
    rolled_back: list[bool] = field(default_factory=list)  # [L]  every replica was out
    stepped: list[bool] = field(default_factory=list)  # [L]  an outer step was made
    healed: list[list[bool]] = field(default_factory=list)  # [R][L]  inner state dropped at the application
    part: list[bool] = field(default_factory=list)  # [R]  the replica had a part in the round
    statistics: list[list[Statistics]] = field(default_factory=list)  # [R][L]  after the round

    @property
    def empty(self) -> bool:
        """Nobody had made a step: nothing moved."""
        return not any(self.steps)


@dataclass
class Launch:
    """What replica i holds from its launch of a round to its application of it."""

    theta: list[list[Tensor]]  # [L]  θ_i at launch
    buffers: State  # at launch
    s: int  # s_i
    called: bool  # the flag: launched by sync()
    at_once: bool  # to be applied before d steps have been made: by sync()
    k: int | None = None  # the round's number, once every replica has launched it


# --- the machine -------------------------------------------------------------------------------------


class Reference:
    """R replicas of ``model`` in one process, in fp64. See the module's docstring.

    Args:
        model: Copied for every replica, and converted to ``dtype``.
        replicas: R.
        inner: Makes the inner optimizer of one replica from the list of its parameters.
        layers: The cut into layers: names as in ``model.named_parameters()``, every one exactly once.
        outer: Makes the outer optimizer of one layer from the list of its anchor tensors; None is
            SGD with lr 1 (``a ← a − Δ̂``).
        anomaly: Settings of the detector, missing ones by default; None switches part 2 off.
        temperature: T; None switches part 4 off (equal weights).
        max_norm: φ; None switches part 7 off.
        step_exponent: e.
        interval: τ in steps; None: nobody is ever due by steps (A-EDiT).
        warmup_steps: t_warm; infinite: ordinary data-parallel training.
        delay: d.
        sharded_anchor: Steps 6 to 8 in CO2*'s order: `sharded_outer_step`.
        dtype: Of everything; fp32 is for inner optimizers that have no fp64.

    Attributes (all are for inspection, and lists over replicas or layers):
        models, optimizers: of every replica.
        anchor, outer_optimizers: of every layer. With a sharded anchor, ``outer_optimizers[l][r]`` is that
            of the part of rank r.
        statistics: ``[i][l]``, as of now.
        s: Inner steps of every replica since its last launch (or since the end of the warm-up).
        made: All inner steps of every replica, warm-up included.
        rounds: A `Round` for every round, empty ones too.
        pending: What every replica has launched and not applied; None: nothing.
        history: ``history[i]``: the state of replica i after each of its inner steps (warm-up included),
            before the round that the step may have caused and before what is applied at its end.
        after_step: ``after_step[i]``: the same after what was applied at the end of that step, however long
            the replica had to wait for it. What sync() applies is not in it.
        after_round: ``after_round[k][i]``: the state of replica i just after it applied round k; None: it
            has not yet.
    """

    def __init__(
        self,
        model: nn.Module,
        replicas: int,
        *,
        inner: Inner,
        layers: Sequence[Sequence[str]],
        outer: Outer | None,
        anomaly: Mapping[str, float] | None = ANOMALY,
        temperature: float | None = 1.0,
        max_norm: float | None = 10.0,
        step_exponent: float = 0.5,
        interval: int | None = 128,
        warmup_steps: float = 0,
        delay: int = 0,
        sharded_anchor: bool = False,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        names = [name for name, _ in model.named_parameters()]
        if sorted(names) != sorted(name for layer in layers for name in layer):
            raise ValueError("layers must name every parameter exactly once")
        if delay < 0 or (interval is not None and delay > interval):
            raise ValueError("delay must be between 0 and the interval")
        self.R, self.L = replicas, len(layers)
        self.layers = [list(layer) for layer in layers]
        self.detector = None if anomaly is None else Detector(**anomaly)
        self.T, self.phi, self.e = temperature, max_norm, step_exponent
        self.interval, self.warmup_steps, self.delay = interval, warmup_steps, delay

        self.models = [copy.deepcopy(model).to(dtype) for _ in range(self.R)]
        self.optimizers = [inner(list(m.parameters())) for m in self.models]
        self.anchor = [[p.detach().clone() for p in self.parameters(0, l)] for l in range(self.L)]
        outer = averaging if outer is None else outer
        self.sharded_anchor = sharded_anchor
        if sharded_anchor:
            self.anchor_parts = [self.cut(a) for a in self.anchor]
            self.outer_optimizers = [[outer([part]) for part in parts] for parts in self.anchor_parts]
        else:
            self.outer_optimizers = [outer(a) for a in self.anchor]
        self.last_buffers = self.buffers_of_replica_0()
        self.statistics = [[Statistics() for _ in range(self.L)] for _ in range(self.R)]

        self.s = [0] * self.R
        self.made = [0] * self.R
        self.pending: list[Launch | None] = [None] * self.R
        self.rounds: list[Round] = []
        self.history: list[list[State]] = [[] for _ in range(self.R)]
        self.after_step: list[list[State]] = [[] for _ in range(self.R)]
        self.after_round: list[list[State | None]] = []

    def parameters(self, i: int, l: int) -> list[nn.Parameter]:
        """Those of layer l on replica i."""
        named = dict(self.models[i].named_parameters())
        return [named[name] for name in self.layers[l]]

    def buffers_of_replica_0(self) -> State:
        return {name: b.clone() for name, b in persistent_buffers(self.models[0]).items()}

    @property
    def warm_up_left(self) -> int:
        """Steps of the warm-up that are still to make."""
        return max(0, self.warmup_steps - self.made[0])

    def due(self, i: int) -> bool:
        """Replica i has made ``interval`` inner steps since its last launch, and must launch."""
        return self.pending[i] is None and self.interval is not None and self.s[i] >= self.interval

    def waits(self, i: int) -> bool:
        """Replica i is to apply a round that others have not launched yet."""
        return self.pending[i] is not None and self.s[i] >= self.delay

    # --- inner steps ---

    def step(
        self,
        losses: Sequence[Loss | None],
        edit_gradients: Callable[[int, nn.Module], None] | None = None,
    ) -> None:
        """One inner step of every replica whose loss is not None, and what is to be applied at its end.

        ``edit_gradients(i, model)`` comes where a training loop would clip: after the backward (in warm-up:
        after the mean over the replicas), before the inner optimizer. ``made[i]`` is then still the number
        of the steps before this one.
        """
        warm_up = self.warm_up_left > 0
        stepping = [i for i in range(self.R) if losses[i] is not None]
        if warm_up and len(stepping) < self.R:
            raise RuntimeError("in warm-up every replica steps")
        for i in stepping:
            if self.due(i):
                raise RuntimeError(f"replica {i} is due: it waits for the round")
            if self.waits(i):
                raise RuntimeError(f"replica {i} waits for the launches of the others")

        for i in stepping:
            self.models[i].zero_grad(set_to_none=True)
            losses[i](self.models[i]).backward()
        if warm_up:
            self.average_gradients()
        for i in stepping:
            if edit_gradients is not None:
                edit_gradients(i, self.models[i])
            self.optimizers[i].step()
            self.made[i] += 1
            if not warm_up:
                self.s[i] += 1
            self.history[i].append(snapshot(self.models[i]))
            self.after_step[i].append(snapshot(self.models[i]))
        self.apply_what_is_ready()
        if warm_up and self.warm_up_left == 0:
            self.end_warm_up()

    def average_gradients(self) -> None:
        """The mean over all R replicas.

        Choice: a replica on which a parameter took no part counts as 0; one that took no part on any
        replica has no gradient.
        """
        for same in zip(*(m.parameters() for m in self.models), strict=True):
            gradients = [p.grad for p in same if p.grad is not None]
            if not gradients:
                continue
            total = torch.zeros_like(gradients[0])
            for gradient in gradients:
                total += gradient
            for p in same:
                p.grad = total / self.R

    @torch.no_grad()
    def end_warm_up(self) -> None:
        """The anchor of the first round is the model at t = t_warm.

        Choice: so are the buffers "of the last round" until there is one: those of replica 0, which in
        warm-up may differ from the others'.
        """
        for l in range(self.L):
            for a, p in zip(self.anchor[l], self.parameters(0, l), strict=True):
                a.copy_(p)
            if self.sharded_anchor:
                for part, value in zip(self.anchor_parts[l], self.cut(self.anchor[l]), strict=True):
                    part.copy_(value)
        self.last_buffers = self.buffers_of_replica_0()

    # --- a round ---

    def round(self) -> Round:
        """Every replica launches, if it has not: one sync of all layers, and of the buffers.

        With ``delay`` it is applied by later calls of `step`.
        """
        for i in range(self.R):
            if self.pending[i] is None or self.pending[i].k is not None:
                self.launch(i)
        return self.rounds[-1]

    def launch(self, i: int, called: bool = False) -> None:
        """Replica i launches a round; the last replica's launch decides it.

        Norms, weights and the combined pseudo gradient are as of every replica's own launch, however many
        steps it makes until the others launch, too.
        """
        if self.warm_up_left > 0:
            raise RuntimeError("there are no rounds in warm-up")
        if self.pending[i] is not None:
            raise RuntimeError(f"replica {i} has a round under way")
        self.pending[i] = Launch(
            theta=[[p.detach().clone() for p in self.parameters(i, l)] for l in range(self.L)],
            buffers={name: b.clone() for name, b in persistent_buffers(self.models[i]).items()},
            s=self.s[i],
            called=called,
            at_once=called,
        )
        self.s[i] = 0
        if all(launch is not None and launch.k is None for launch in self.pending):
            self.decide(self.pending)
            for launch in self.pending:
                launch.k = len(self.rounds) - 1
        self.apply_what_is_ready()

    @torch.no_grad()
    def decide(self, launches: Sequence[Launch]) -> None:
        """Steps 1 to 8, from what the replicas held at their launches; no replica is touched."""
        R, L = self.R, self.L
        s = [launch.s for launch in launches]
        s_bar = mean_steps(s)

        # Δ_i = a − θ_i
        delta = [
            [[a - p for a, p in zip(self.anchor[l], launches[i].theta[l], strict=True)] for l in range(L)]
            for i in range(R)
        ]
        G = [[norm(delta[i][l]) for l in range(L)] for i in range(R)]  # 1
        g = [[scaled_norm(G[i][l], s[i], s_bar, self.e) for l in range(L)] for i in range(R)]
        done = Round(
            steps=s,
            norms=G,
            scaled=g,
            out=[[False] * L for _ in range(R)],
            weights=[[0.0] * L for _ in range(R)],
            called=[launch.called for launch in launches],
            healed=[[False] * L for _ in range(R)],
        )

        for l in range(L):
            G_l, g_l = [G[i][l] for i in range(R)], [g[i][l] for i in range(R)]
            out = [self.verdict(i, l, s[i], G_l[i], g_l[i]) for i in range(R)]  # 2, 3
            w = [0.0] * R if all(out) else self.weights(g_l, G_l, out)  # 4
            # 5. Choice: "no replica moved" is said of this layer, and of the replicas that are not out.
            moved = any(G_l[i] != 0 for i in range(R) if not out[i])
            factor = None
            if moved:
                if self.sharded_anchor:
                    factor = self.sharded_outer_step(l, w, [launch.theta[l] for launch in launches])
                else:
                    factor = self.outer_step(l, w, [delta[i][l] for i in range(R)])  # 6, 7, 8
            for i in range(R):
                # Choice: in a layer that is rolled back too.
                done.healed[i][l] = not math.isfinite(G_l[i])
                done.out[i][l] = out[i]
                done.weights[i][l] = w[i]
            done.rolled_back.append(all(out))
            done.stepped.append(moved)
            done.clip.append(factor)

        # Choice: whoever is out in every layer (or weighs nothing) has no part in the buffers either.
        done.part = [
            any(done.weights[i][l] > 0 or (G[i][l] == 0 and not done.out[i][l]) for l in range(L))
            for i in range(R)
        ]
        speak = [s_i if p else 0 for s_i, p in zip(s, done.part, strict=True)]
        for name, last in self.last_buffers.items():
            values = [launch.buffers[name] for launch in launches]
            self.last_buffers[name] = merged_buffer(values, speak, last)
        done.statistics = copy.deepcopy(self.statistics)
        self.rounds.append(done)
        self.after_round.append([None] * R)

    def apply_what_is_ready(self) -> None:
        """On every replica that has made its d steps since its launch, or has called sync()."""
        for i, launch in enumerate(self.pending):
            if launch is None or launch.k is None:
                continue  # nothing under way, or not everybody has launched it
            if launch.at_once or self.s[i] >= self.delay:
                self.apply(i)

    @torch.no_grad()
    def apply(self, i: int) -> None:
        """Step 9 on replica i; the anchor is a_new: the next round needs this replica's launch."""
        launch = self.pending[i]
        done = self.rounds[launch.k]
        # Choice (against the page's letter, under which a replica with d = τ may never heal): steps that were
        # made since a launch with a non-finite norm are worth nothing in any layer.
        lost = self.delay > 0 and not launch.called and any(done.healed[i])
        for l in range(self.L):
            self.restart(i, l, launch.theta[l], done.out[i][l] or lost)
            # Choice: with delay at the application, not at the launch: the steps between fill it again with
            # NaN. A replica that became non-finite after its launch keeps that (a_new + NaN) and is out, and
            # healed, in the next round.
            if done.healed[i][l] or lost:
                self.drop_inner_state(i, l)
        self.update_buffers(i, launch.buffers, done.part[i])
        self.pending[i] = None
        self.after_round[launch.k][i] = snapshot(self.models[i])
        if not launch.called and self.s[i] == self.delay and self.after_step[i]:
            self.after_step[i][-1] = snapshot(self.models[i])

    def verdict(self, i: int, l: int, s_i: int, G_i: float, g_i: float) -> bool:
        """Whether replica i is out; feeds its statistics."""
        if s_i == 0 or not math.isfinite(G_i):
            return True
        if self.detector is None or G_i == 0:
            return False
        stat = self.statistics[i][l]
        anomalous = self.detector.anomalous(stat, g_i)
        self.detector.feed(stat, g_i, anomalous)
        return anomalous

    def weights(self, g: Sequence[float], G: Sequence[float], out: Sequence[bool]) -> list[float]:
        if self.T is None:
            return equal_weights(out)
        return penalty_weights(g, G, out, self.T)

    def outer_step(self, l: int, w: Sequence[float], delta: Sequence[Sequence[Tensor]]) -> float:
        """a ← OuterOpt(a, Δ̂); returns the factor of the clip."""
        delta_bar = combine(w, delta)
        factor = clip_factor(delta_bar, self.phi)
        for a, d in zip(self.anchor[l], delta_bar, strict=True):
            a.grad = factor * d
        self.outer_optimizers[l].step()
        for a in self.anchor[l]:
            a.grad = None
        return factor

    def cut(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """A layer laid out in one line and cut into R parts, the first ones longer where it is uneven."""
        line = torch.cat([t.flatten() for t in tensors])
        return [part.clone() for part in line.tensor_split(self.R)]

    def sharded_outer_step(self, l: int, w: Sequence[float], theta: Sequence[Sequence[Tensor]]) -> float:
        """The same as CO2* does it: the replicas' parameters travel, not the pseudo gradients.

        Each of the R ranks holds one part of the anchor and of the outer optimizer's state. (G_i needs the
        whole a, which CO2* itself does not look at; here it is at hand.)

        Choice: the norm of the clip, where there is one, is over the whole layer all the same.
        """
        mine = self.anchor_parts[l]
        theirs = [self.cut(theta_i) for theta_i in theta]  # [R][R]: of replica i the part r
        # reduce-scatter: rank r holds part r of the mean of the parameters
        mean = []
        for r in range(self.R):
            total = torch.zeros_like(mine[r])
            for i in range(self.R):
                if w[i] != 0:
                    total += w[i] * theirs[i][r]
            mean.append(total)
        # every rank steps its own part
        delta_bar = [a - m for a, m in zip(mine, mean, strict=True)]
        factor = clip_factor(delta_bar, self.phi)
        for r in range(self.R):
            mine[r].grad = factor * delta_bar[r]
            self.outer_optimizers[l][r].step()
            mine[r].grad = None
        # all-gather
        line = torch.cat(mine)
        start = 0
        for a in self.anchor[l]:
            a.copy_(line[start : start + a.numel()].reshape(a.shape))
            start += a.numel()
        return factor

    def restart(self, i: int, l: int, theta: Sequence[Tensor], out: bool) -> None:
        """θ_i ← a_new + (θ_i − θ_i at launch), or a_new alone; the inner optimizer's state stays as it is.

        Choice: "out" is step 2's verdict alone. With s_i = 0 at launch a replica is out, too: steps that it
        made since are dropped. One that is not out, but has no weight (G_i = 0, or the softmax is 0 by
        underflow), keeps its progress.
        """
        for p, a, before in zip(self.parameters(i, l), self.anchor[l], theta, strict=True):
            p.copy_(a if out else a + (p - before))

    def drop_inner_state(self, i: int, l: int) -> None:
        """As if the parameters of layer l on replica i were new."""
        for p in self.parameters(i, l):
            self.optimizers[i].state.pop(p, None)

    def update_buffers(self, i: int, before: State, part: bool) -> None:
        """A buffer that replica i trained on since its launch stays its own, if it has had a part.

        Choice: a difference as for parameters could make a variance negative, so there is no sum of what was
        agreed and what came since. The replica's own value speaks in the next round.

        Choice: the same for buffers that are not floating-point (always finite): a counter that went on
        since the launch is not set back.
        """
        for name, buffer in persistent_buffers(self.models[i]).items():
            own = part and bool(buffer.isfinite().all()) and not torch.equal(buffer, before[name])
            if not own:
                buffer.copy_(self.last_buffers[name])

    # --- whole runs ---

    def warm_up(
        self,
        losses_of: Callable[[int, int], Loss],
        edit_gradients: Callable[[int, nn.Module], None] | None = None,
    ) -> None:
        """What is left of the warm-up."""
        while self.warm_up_left > 0:
            self.step([losses_of(i, self.made[i]) for i in range(self.R)], edit_gradients)

    def run(
        self,
        counts: Sequence[int],
        losses_of: Callable[[int, int], Loss],
        edit_gradients: Callable[[int, nn.Module], None] | None = None,
    ) -> None:
        """Replica i makes ``counts[i]`` more inner steps (warm-up included) by steps, and calls ``sync()``.

        ``losses_of(i, t)`` is the loss of replica i in its inner step t = 0, 1, … (over all calls:
        ``made[i]``). A replica launches a round when it is due, and goes on training until it is to apply
        that round (with delay = 0: at once) or has made its count. It then calls: what is pending is applied
        there, though fewer than d steps may have been made since, and rounds are launched and applied at
        once until one is launched by calls of all replicas.

        Choice: a replica that is due by its last step launches that round first and calls ``sync()`` then,
        so its flag goes with the round after it. Nothing but the number of (empty) rounds depends on that.
        """
        left = self.warm_up_left
        if min(counts) < left and min(counts) != max(counts):
            raise ValueError("data that ends unevenly during warm-up is not supported")
        end = [self.made[i] + counts[i] for i in range(self.R)]
        while True:
            ended = [self.made[i] == end[i] for i in range(self.R)]
            if self.warm_up_left > 0:
                if all(ended):
                    return  # in warm-up sync() returns at once
            else:
                for i in range(self.R):
                    if ended[i] and self.pending[i] is not None:
                        self.pending[i].at_once = True
                self.apply_what_is_ready()
                for i in range(self.R):
                    if self.pending[i] is None and (self.due(i) or ended[i]):
                        self.launch(i, called=not self.due(i))
                        if self.pending[i] is None and all(self.rounds[-1].called):
                            return
            steps = [not ended[i] and not self.due(i) and not self.waits(i) for i in range(self.R)]
            if any(steps):
                losses = [losses_of(i, self.made[i]) if steps[i] else None for i in range(self.R)]
                self.step(losses, edit_gradients)

    def sync(self) -> None:
        """Every replica calls ``sync()`` now."""

        def none(i: int, t: int) -> Loss:
            raise AssertionError("nobody steps")

        self.run([0] * self.R, none)

    def run_rounds(
        self,
        rounds: Sequence[Sequence[int]],
        losses_of: Callable[[int, int], Loss],
        edit_gradients: Callable[[int, nn.Module], None] | None = None,
    ) -> None:
        """Round k comes after ``rounds[k][i]`` inner steps of replica i, as a clock has decided it.

        What is left of the warm-up comes first and is in no row. An end by ``sync()`` is rows like the
        others: with the steps before the call, then with 0. With delay the last row's round stays pending,
        where it is not 0: `sync` brings the end.

        Choice: a replica that has not made d steps since its launch can launch by sync() alone (a schedule
        is not asked while a round is under way), so what is pending is applied first; so can one without
        a step.
        """
        self.warm_up(losses_of, edit_gradients)
        for row in rounds:
            for n in range(max(row)):
                losses = [losses_of(i, self.made[i]) if n < row[i] else None for i in range(self.R)]
                self.step(losses, edit_gradients)
            called = [self.pending[i] is not None or row[i] == 0 for i in range(self.R)]
            for i in range(self.R):
                if self.pending[i] is not None:
                    self.apply(i)
            for i in range(self.R):
                self.launch(i, called=called[i])


# --- the methods compared in the paper ---------------------------------------------------------------
#
# Each takes the model, R and the cut into layers; ``inner`` and the outer settings by the page's tables;
# ``settings`` are other arguments of `Reference`, and overwrite what the method says.
#
# Choice: t_warm is 0 where the caller says nothing, as in the package (1000 is for real runs).
# Choice: no penalty means no detector, equal weights and no clip; non-finite replicas are out all the same.


def adamw(parameters: list[nn.Parameter]) -> Optimizer:
    """Choice: EDiT's best lr in the paper; the rest is PyTorch's."""
    return torch.optim.AdamW(parameters, lr=1.5e-4)


Layers = Sequence[Sequence[str]]
PLAIN = {"anomaly": None, "temperature": None, "max_norm": None}
PENALTY = {"anomaly": ANOMALY, "temperature": 1.0, "max_norm": 10.0}


def baseline(model: nn.Module, R: int, layers: Layers, *, inner: Inner = adamw, **settings: Any) -> Reference:
    """Gradients averaged over all ranks in every step: a warm-up without end."""
    settings = {"warmup_steps": math.inf, "outer": None} | settings
    return Reference(model, R, layers=layers, inner=inner, **settings)


def post_local_sgd(
    model: nn.Module,
    R: int,
    layers: Layers,
    *,
    inner: Inner = adamw,
    interval: int = 128,
    warmup_steps: int = 0,
    **settings: Any,
) -> Reference:
    """Warm-up, then local; every τ steps the replicas become their mean."""
    settings = PLAIN | {"outer": None, "interval": interval, "warmup_steps": warmup_steps} | settings
    return Reference(model, R, layers=layers, inner=inner, **settings)


def diloco(
    model: nn.Module,
    R: int,
    layers: Layers,
    *,
    inner: Inner = adamw,
    interval: int = 500,
    lr: float = 0.7,
    momentum: float = 0.9,
    **settings: Any,
) -> Reference:
    """Local; mean; Nesterov."""
    settings = PLAIN | {"outer": nesterov(lr, momentum), "interval": interval} | settings
    return Reference(model, R, layers=layers, inner=inner, **settings)


def co2(
    model: nn.Module,
    R: int,
    layers: Layers,
    *,
    inner: Inner = adamw,
    interval: int = 48,
    lr: float = 1.0,
    beta: float = 0.5,
    gap: float = 1.0,
    c: float | None = 1.0,
    **settings: Any,
) -> Reference:
    """Local; mean; heavy ball with gap penalty and clip; one round late."""
    settings = (
        PLAIN | {"outer": co2_outer(lr, beta, gap, c), "interval": interval, "delay": interval} | settings
    )
    return Reference(model, R, layers=layers, inner=inner, **settings)


def co2_star(model: nn.Module, R: int, layers: Layers, **settings: Any) -> Reference:
    """As CO2, the anchor and the outer momentum sharded over the replicas.

    Choice: one round late like CO2. That its traffic blocks is a matter of time, not of numbers.
    """
    return co2(model, R, layers, **{"sharded_anchor": True} | settings)


def edit(
    model: nn.Module,
    R: int,
    layers: Layers,
    *,
    inner: Inner = adamw,
    interval: int | None = 128,
    warmup_steps: int = 0,
    lr: float = 0.8,
    momentum: float = 0.85,
    **settings: Any,
) -> Reference:
    """Warm-up, then local; penalty; Nesterov."""
    own = {"outer": nesterov(lr, momentum), "interval": interval, "warmup_steps": warmup_steps}
    return Reference(model, R, layers=layers, inner=inner, **PENALTY | own | settings)


def a_edit(model: nn.Module, R: int, layers: Layers, **settings: Any) -> Reference:
    """As EDiT, by the clock: for `Reference.run_rounds`, which is told the steps of every round."""
    return edit(model, R, layers, **{"interval": None} | settings)
