"""``offload="replicas"`` (CO2*): anchor and outer state are spread over the replicas; each steps a slice.

A round sends slice ``j`` of every replica's parameters to replica ``j``, which has slice ``j`` of the anchor
and so of every pseudo gradient; and gathers the slices of the new anchor: the bytes of an all-reduce.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .comm import Replicas
from .layers import Layer
from .round import _SQUARES, Round


class Piece(Layer):
    """One slice of a layer: its flat is a slice of the layer's, with zeros behind the end of that."""

    def __init__(self, whole: Layer, slot: int, count: int) -> None:
        vars(self).update(vars(whole))
        self.numel = width = -(-whole.numel // count)
        self.whole, self.begin = whole, slot * width

        def inside(start: int, end: int) -> tuple[int, int]:
            return min(max(start - self.begin, 0), width), min(max(end - self.begin, 0), width)

        self.spans = [inside(*span) for span in whole.spans]
        # The last one with the zeros behind it, which nobody holds, and so nobody measures.
        self.spans[-1] = (self.spans[-1][0], width)
        self.shapes = [torch.Size([end - start]) for start, end in self.spans]
        self.held = [(*inside(start, end), same) for start, end, same in whole.held]

    def read(self) -> Tensor:
        """θ, as a new flat vector."""
        flat = self.empty()
        values = self.whole.read()[self.begin : self.begin + self.numel]
        flat[len(values) :].zero_()
        flat[: len(values)].copy_(values)
        return flat


def pieces(layers: list[Layer], replicas: Replicas) -> list[Layer]:
    """What this rank holds of the anchor."""
    return [Piece(layer, replicas.slot, replicas.count) for layer in layers]


class SpreadRound(Round):
    """A round with an anchor of slices.

    Verdicts come after the parameters were exchanged, so a thread carries the traffic also of a round that is
    not late, from copies. Only the gather, layer by layer, is not in it: the training loop waits for that.
    """

    def _launch(self) -> None:
        self._measured = self._matrix
        # In the place of a checksum, as nobody has another's slice of the anchor: the number of the round.
        self._matrix[self.replicas.index, len(self.columns) + _SQUARES] = self.number
        super()._launch()

    def _measure(self) -> Tensor:
        """This rank's slices of all replicas' Δ. Returns ``[R + 1, layers]``: its share of their squared
        norms; last 0, or NaN if its slice of the anchor is not finite."""
        self._slices: list[list[Tensor]] = []
        measured = []
        assert self.start is not None
        for index, (piece, flat) in enumerate(zip(self.anchor.layers, self.start.flats, strict=True)):
            with self._traffic("exchange of slices", piece):
                slices, work = self.replicas.start_exchange_slices(flat)
                self._wait(work)
            a = self.anchor.fetch(index)
            for theta in slices:
                piece.pseudo_gradient(a, theta, theta)
            self._slices.append(slices)
            measured.append(torch.stack([*map(piece.squares, slices), piece.squares(a) * 0]))
        return torch.stack(measured, 1)

    def _combine(self) -> None:
        """``Δ̄``, from the slices that count (0·NaN is not 0), and its squared norms over all ranks."""
        combined: list[Tensor] = []
        for piece in self.anchor.layers:
            flat = piece.empty().zero_()
            weights = self.weights[:, piece.column].tolist()
            for delta, weight in zip(self._slices.pop(0), weights, strict=True):
                if weight:
                    flat.add_(delta, alpha=weight)
            combined.append(flat)
        norms = torch.zeros(len(self.columns), dtype=torch.float64, device="cpu")
        shares = [piece.squares(flat) for piece, flat in zip(self.anchor.layers, combined, strict=True)]
        norms[[layer.column for layer in self.layers]] = torch.stack(shares).cpu()
        with self._traffic("norms of the clip"):
            self._wait(self.replicas.start_exchange(norms), on_host=True)
        for index, flat in enumerate(combined):
            self._combined[index] = flat, norms[self.layers[index].column].to(flat.device)

    def _outer_step(self, index: int) -> Tensor:
        """Whatever the verdict, every rank gathers: slices that were stepped, or the old ones."""
        super()._outer_step(index)
        layer = self.layers[index]
        with self._waiting(), self._traffic("gather of the anchor", layer):
            return self.replicas.gather_slices(self.anchor.fetch(index))[: layer.numel]
