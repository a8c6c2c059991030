"""The ONNX ops RNN, GRU and LSTM, unrolled into ops of each time step, which are planned like all others.

Shapes: X (steps, batch, inputs), W (directions, gates·hidden, inputs), R (directions, gates·hidden, hidden), B
(directions, 2·gates·hidden), states (directions, batch, hidden). If ``layout`` is set, the batch is the first axis
of X and of the states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rematplan.ir.onnx.graph import Node
from rematplan.runtime.onnx.ops.rows import integer, op, refuse, text

Activation = Callable[[Tensor], Tensor]
State = tuple[Tensor, ...]

# Activations by lower-case name: the defaults of alpha and of beta (None if it takes none), and the function of x,
# alpha and beta.
ACTIVATIONS: dict[str, tuple[float | None, float | None, Callable[[Tensor, float, float], Tensor]]] = {
    "affine": (1.0, 0.0, lambda x, a, b: x * a + b),
    "elu": (1.0, None, lambda x, a, b: F.elu(x, a)),
    "hardsigmoid": (0.2, 0.5, lambda x, a, b: (x * a + b).clamp(0, 1)),
    "leakyrelu": (0.01, None, lambda x, a, b: F.leaky_relu(x, a)),
    "relu": (None, None, lambda x, a, b: torch.relu(x)),
    "scaledtanh": (1.0, 1.0, lambda x, a, b: a * torch.tanh(b * x)),
    "sigmoid": (None, None, lambda x, a, b: torch.sigmoid(x)),
    "softplus": (None, None, lambda x, a, b: F.softplus(x)),
    "softsign": (None, None, lambda x, a, b: F.softsign(x)),
    "tanh": (None, None, lambda x, a, b: torch.tanh(x)),
    "thresholdedrelu": (1.0, None, lambda x, a, b: F.threshold(x, a, 0.0)),
}
DIRECTIONS = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}


@dataclass(frozen=True)
class Kind:
    """A kind of recurrent op: RNN, GRU or LSTM."""

    gates: int
    """The number of gates."""
    states: int
    """The number of state tensors; 2 for LSTM, hidden state and cell."""
    activations: tuple[str, ...]
    """The names of the default activations."""
    step: Callable[[Node, Sequence[Activation], Tensor, State, CellWeights], State]
    """Computes one time step: ``step(node, activations, projected, state, weights)`` returns the next state.
    ``projected`` is X·Wᵀ plus its bias at that time step, (batch, gates·hidden)."""


@dataclass(frozen=True)
class CellWeights:
    """The recurrent weights of one direction."""

    r: Tensor
    """The matrix R, (gates·hidden, hidden)."""
    bias: Tensor | None
    """The bias of the recurrent product, (gates·hidden), or None."""
    peepholes: tuple[Tensor, ...] = ()
    """Three weights (hidden) with which the LSTM gates i, o and f read the cell, or empty."""


def _check(kind: Kind) -> Callable[[Node], None]:
    """Return the check of a node of this kind: it raises `ModelError` for an unknown direction or activation, or
    another number of activations than its directions need."""

    def check(node: Node) -> None:
        direction = text(node, "direction", "forward")
        if direction not in DIRECTIONS:
            raise refuse(node, f"the direction {direction!r} is not supported")
        for name in _names(node, kind):
            if name.lower() not in ACTIVATIONS:
                raise refuse(node, f"the activation {name!r} is not supported")

    return check


def _names(node: Node, kind: Kind) -> tuple[str, ...]:
    directions = len(DIRECTIONS[text(node, "direction", "forward")])
    stated: Any = node.attributes.get("activations") or kind.activations * directions
    names = tuple(v.decode() if isinstance(v, bytes) else str(v) for v in stated)
    if len(names) != directions * len(kind.activations):
        raise refuse(node, f"{len(names)} activations for {directions} directions")
    return names


def _activations(node: Node, kind: Kind) -> list[list[Activation]]:
    """Return a list of activations for each direction. If the node has ``clip``, each clamps its argument to [−clip,
    clip]."""
    alphas, betas = (_stated(node, f"activation_{k}") for k in ("alpha", "beta"))
    limit: Any = node.attributes.get("clip")
    found = []
    for name in _names(node, kind):
        # The stated numbers are assigned in order to the activations that use an alpha or a beta.
        alpha, beta, function = ACTIVATIONS[name.lower()]
        a = next(alphas, alpha) if alpha is not None else 0.0
        b = next(betas, beta) if beta is not None else 0.0
        found.append(_clipped(function, a or 0.0, b or 0.0, limit))
    each = len(kind.activations)
    return [found[i : i + each] for i in range(0, len(found), each)]


def _stated(node: Node, name: str) -> Iterator[float]:
    values: Any = node.attributes.get(name, ())
    return iter(float(v) for v in values)


def _clipped(
    function: Callable[[Tensor, float, float], Tensor], a: float, b: float, limit: float | None
) -> Activation:
    if limit is None:
        return lambda x: function(x, a, b)
    return lambda x: function(x.clamp(-limit, limit), a, b)


# ------------------------------------------------------------------ one step of each kind


def _rnn_step(node: Node, act: Sequence[Activation], x: Tensor, state: State, w: CellWeights) -> State:
    return (act[0](x + F.linear(state[0], w.r, w.bias)),)


def _gru_step(node: Node, act: Sequence[Activation], x: Tensor, state: State, w: CellWeights) -> State:
    """Return the next state of a GRU, with gates z, r, h and ``x`` = X·Wᵀ plus its bias, (batch, 3·hidden).
    ``linear_before_reset`` decides whether r multiplies the state's product with R, or the state before it."""
    (h,), n = state, w.r.shape[1]
    if integer(node, "linear_before_reset", 0):
        hidden = F.linear(h, w.r, w.bias)
        z, r = act[0](x[:, : 2 * n] + hidden[:, : 2 * n]).chunk(2, 1)
        new = act[1](x[:, 2 * n :] + r * hidden[:, 2 * n :])
    else:
        bias = (None, None) if w.bias is None else (w.bias[: 2 * n], w.bias[2 * n :])
        z, r = act[0](x[:, : 2 * n] + F.linear(h, w.r[: 2 * n], bias[0])).chunk(2, 1)
        new = act[1](x[:, 2 * n :] + F.linear(r * h, w.r[2 * n :], bias[1]))
    return ((1 - z) * new + z * h,)


def _lstm_step(node: Node, act: Sequence[Activation], x: Tensor, state: State, w: CellWeights) -> State:
    """Return the next hidden state and cell of an LSTM, with gates i, o, f, c and ``x`` = X·Wᵀ plus its bias,
    (batch, 4·hidden)."""
    h, c = state
    i, o, f, g = (x + F.linear(h, w.r, w.bias)).chunk(4, 1)
    if w.peepholes:
        i, f = i + w.peepholes[0] * c, f + w.peepholes[2] * c
    i = act[0](i)
    # The peepholes of i and f read the old cell, that of o the new one.
    f = 1 - i if integer(node, "input_forget", 0) else act[0](f)
    c = f * c + i * act[1](g)
    o = act[0](o + w.peepholes[1] * c if w.peepholes else o)
    return o * act[2](c), c


RNN = Kind(1, 1, ("Tanh",), _rnn_step)
GRU = Kind(3, 1, ("Sigmoid", "Tanh"), _gru_step)
LSTM = Kind(4, 2, ("Sigmoid", "Tanh", "Tanh"), _lstm_step)


# ------------------------------------------------------------------ the sequence


def _run(node: Node, kind: Kind, inputs: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """Run a recurrent op in each of its directions. Return all outputs and the last states, as ONNX orders them."""
    absent: list[Tensor | None] = [None] * (8 - len(inputs))
    x, w, r, b, lengths, *states = [*inputs, *absent]
    assert x is not None
    assert w is not None
    assert r is not None
    peepholes = states[2] if kind.states == 2 else None
    batch_first = bool(integer(node, "layout", 0))
    x = x.transpose(0, 1) if batch_first else x
    begin = [s.transpose(0, 1) if batch_first and s is not None else s for s in states[: kind.states]]
    ends, sequences = [], []
    for d, (backward, act) in enumerate(
        zip(DIRECTIONS[text(node, "direction", "forward")], _activations(node, kind), strict=True)
    ):
        half = kind.gates * r.shape[2]
        bias = (None, None) if b is None else (b[d, :half], b[d, half:])
        parts = () if peepholes is None else tuple(peepholes[d].chunk(3))
        zero = x.new_zeros((x.shape[1], r.shape[2]))
        state = tuple(zero if s is None else s[d] for s in begin)
        projected = F.linear(_reversed(x, lengths) if backward else x, w[d], bias[0])
        outputs, end = _unrolled(
            node, kind, act, projected, state, CellWeights(r[d], bias[1], parts), lengths
        )
        sequences.append(_reversed(outputs, lengths) if backward else outputs)
        ends.append(end)
    y = torch.stack(sequences, 1)
    last = [torch.stack(parts) for parts in zip(*ends, strict=True)]
    if batch_first:
        return (y.permute(2, 0, 1, 3), *(s.transpose(0, 1) for s in last))
    return (y, *last)


def _unrolled(
    node: Node,
    kind: Kind,
    act: Sequence[Activation],
    projected: Tensor,
    state: State,
    weights: CellWeights,
    lengths: Tensor | None,
) -> tuple[Tensor, State]:
    """Return the hidden states of all steps of one direction, zero after each sequence's end, and the state at that
    end. ``lengths``: the steps of each sequence; None if all have all."""
    outputs = []
    for t, x in enumerate(projected.unbind(0)):
        new = kind.step(node, act, x, state, weights)
        if lengths is None:
            state, shown = new, new[0]
        else:
            inside = (lengths > t).unsqueeze(1)
            state = tuple(torch.where(inside, n, s) for n, s in zip(new, state, strict=True))
            shown = torch.where(inside, new[0], torch.zeros_like(new[0]))
        outputs.append(shown)
    if not outputs:
        return projected.new_zeros((0, *state[0].shape)), state
    return torch.stack(outputs), state


def _reversed(x: Tensor, lengths: Tensor | None) -> Tensor:
    """Return ``x`` (steps, batch, …) with each sequence's steps reversed. Steps after its end are not moved.
    ``lengths`` None: all steps."""
    if lengths is None:
        return x.flip(0)
    steps = torch.arange(x.shape[0], device=x.device).unsqueeze(1)
    n = lengths.to(torch.int64).unsqueeze(0)
    places = torch.where(steps < n, n - 1 - steps, steps)
    return torch.gather(x, 0, places.unsqueeze(-1).expand_as(x))


@op("RNN", 1, 7, 14, 22, check=_check(RNN))
def rnn(node: Node, *inputs: Tensor | None) -> tuple[Tensor, ...]:
    """Run ONNX RNN: Hₜ = f(Xₜ·Wᵀ + Hₜ₋₁·Rᵀ + b). Inputs: X, W, R, B, lengths, initial H; absent ones None or missing.
    Returns H of all steps, (steps, directions, batch, hidden), and the last H."""
    return _run(node, RNN, inputs)


@op("GRU", 1, 3, 7, 14, 22, check=_check(GRU))
def gru(node: Node, *inputs: Tensor | None) -> tuple[Tensor, ...]:
    """Run ONNX GRU, step by step. Inputs: X, W, R, B, lengths, initial H; absent ones are None or missing. Returns H of
    all steps, (steps, directions, batch, hidden), and the last H."""
    return _run(node, GRU, inputs)


@op("LSTM", 1, 7, 14, 22, check=_check(LSTM))
def lstm(node: Node, *inputs: Tensor | None) -> tuple[Tensor, ...]:
    """Run ONNX LSTM, step by step. Inputs: X, W, R, B, lengths, initial H and C, peepholes; absent ones are None or
    missing. Returns H of all steps, (steps, directions, batch, hidden), the last H and the last C."""
    return _run(node, LSTM, inputs)
