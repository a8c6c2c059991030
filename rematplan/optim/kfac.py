"""Natural gradient by Kronecker factors, as a `torch.optim.Optimizer`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from rematplan.ir import UsageError
from rematplan.optim.checkpoint import LAYERS, check_whole
from rematplan.optim.exchange import Alone, Exchange
from rematplan.optim.layer import Layer, layers_of
from rematplan.optim.options import MakeOthers, check_numbers, check_others
from rematplan.optim.param_groups import OTHERS, Group, split_groups
from rematplan.optim.refresh import Refresh
from rematplan.optim.report import SideReport, rows_of
from rematplan.optim.side import AUTO
from rematplan.optim.source import Source
from rematplan.optim.sources import source_of
from rematplan.optim.state_bytes import state_bytes
from rematplan.optim.update import clipped, finite, move, preconditioned
from rematplan.runtime.graph.warn import warn
from rematplan.runtime.statistics.factors import Statistics


class KFAC(Optimizer):
    """Natural gradient with Kronecker-factored curvature (Martens and Grosse 2015; convolutions: Grosse, Martens 2016).

    For a layer s = W a it keeps moving averages of A = E[a aᵀ] and G = E[g gᵀ] and moves the weight along
    (G + √λ/π I)⁻¹ ∇W (A + π√λ I)⁻¹, with π² the quotient of the mean eigenvalues of A and G.

    Args:
        model: a planned module with statistics (``plan_module(..., statistics=...)``), or any module with a ``source``.
        lr, momentum, weight_decay: as in `torch.optim.SGD`, but the decay is decoupled from the gradient (it multiplies
            weights by 1 − lr · weight_decay). ``damping``: λ. These four may differ by group and be scheduled.
        kl_clip: updates V are multiplied by min(1, √(kl_clip ÷ lr² Σ ⟨V, gradient⟩)), which bounds the
            divergence of a step in the quadratic model (Osawa et al. 2019); None: never.
        decay: by what the sums of factors are multiplied when new ones come.
        inverse: how factors are inverted: ``cholesky``, ``eigen``, ``low-rank``, ``diagonal``, ``hierarchical``, or
            ``auto``: diagonal above 16,384 rows, low-rank from 2,048 rows while few eigenvalues exceed the damping,
            else Cholesky.
        factors_every: statistics are read at each so many-th step only.
        inverse_every: an inverse is made again after so many steps at the latest. The inversions are spread over these
            steps, so that none is long.
        early_steps: during so many first steps every inverse is made again with all new statistics: inverses age fast
            early in training.
        others: makes the optimizer of the parameters without factors from a list of param groups; its groups are among
            `param_groups`, with their own learning rate.
        loss_scale: by what the loss was multiplied before ``backward``, beyond its mean or sum, if statistics come from
            its backward (``fisher="empirical"``): a number, or what gives one, such as ``scaler.get_scale``.
        params: param groups; all parameters of the model by default. A group may have a key ``others``: a dictionary of
            options of its parameters without factors.
        source: what gives statistics in place of the planned module.
        exchange: the communication with other processes; see `rematplan.optim.distributed`.

    Raises:
        UsageError: an option that makes no sense; parameters without factors and no ``others``; no statistics.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float,
        *,
        damping: float = 1e-2,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        kl_clip: float | None = 1e-3,
        decay: float = 0.95,
        inverse: str = AUTO,
        factors_every: int = 1,
        inverse_every: int = 10,
        early_steps: int = 20,
        others: MakeOthers | None = None,
        loss_scale: float | Callable[[], float] = 1.0,
        params: Iterable[Group] | None = None,
        source: Source | None = None,
        exchange: Exchange | None = None,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "damping": damping}
        check_numbers(defaults, inverse, (factors_every, inverse_every), decay, kl_clip)
        self._source = source or source_of(model)
        layers, ours, theirs = split_groups(model, layers_of(model, self._source.layers(), inverse), params)
        check_others(model, theirs, others)
        super().__init__(ours, defaults)
        self._layers, self._ours = layers, len(ours)
        self._make_others = others
        self._others = others(theirs) if others is not None and theirs else None
        self._kl_clip, self._decay, self._factors_every = kl_clip, decay, factors_every
        self._loss_scale = loss_scale if callable(loss_scale) else lambda: loss_scale
        self._exchange: Exchange = exchange or Alone()
        self._exchange.assign(layers)
        self._refresh = Refresh(layers, self._exchange.owned(), inverse_every, early_steps)
        self._clock, self._seen, self._met, self._said = 0, -1, set[str](), False
        self._link()

    @property
    def layers(self) -> Mapping[str, Layer]:
        """The layers with factors, by weight name."""
        return self._layers

    def follow(self, model: nn.Module) -> None:
        """Take statistics from another planned module of the same parameters.

        Such as one that is planned again with this optimizer's bytes reserved: ``planned = plan_module(planned, args,
        statistics=…, budget=…, reserved=[optimizer])``.

        Raises:
            UsageError: it is not planned with statistics, or has other layers.
        """
        source = source_of(model)
        if left := sorted(self._layers.keys() - source.layers().keys()):
            raise UsageError(f"the module gives no factors of {', '.join(left[:5])}: it has other layers")
        if self._met:
            source.load(self._source.state())
        self._source, self._seen = source, -1

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, rows: float = 1.0) -> Any:
        """Update all parameters; what ``closure`` returns, if there is one.

        A step whose gradients or first statistics are not finite is skipped: it changes no weight, and a warning
        says so once. Statistics that are not finite are left out of the averages.

        Args:
            rows: the weight of this process's gradients among those of other processes, if the exchange reduces them:
                the samples of its loss's mean.

        Raises:
            UsageError: the model has given no statistics yet, or gives none for a parameter with a gradient and
                there is no optimizer for it.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._read()
        group_of = {id(p): group for group in self.param_groups for p in group["params"]}
        made = self._refresh(self._clock, lambda layer: float(group_of[id(layer.weight)]["damping"]))
        self._exchange.inverses(made)
        gradients = {name: m for name, layer in self._layers.items() if (m := layer.gradient()) is not None}
        means = self._exchange.gradients(gradients, rows)
        updates, product = self._exchange.updates(gradients, *preconditioned(self._layers, means, group_of))
        rest = [
            p.grad for group in self.param_groups[self._ours :] for p in group["params"] if p.grad is not None
        ]
        self._exchange.others(rest, rows)
        if finite(product, rest):
            clip = clipped(float(product), self._kl_clip)
            for name, update in updates.items():
                move(self._layers[name].updates(update * clip), group_of, self.state)
            if self._others is not None:
                self._others.step()
            self._clock += 1
        elif not self._said:
            self._said = True
            warn(
                "KFAC skipped a step: gradients or statistics are not finite; further such steps are not reported"
            )
        return loss

    def _read(self) -> None:
        """Fold new statistics into the averages of the layers owned here."""
        if self._clock % self._factors_every:
            return
        found = self._source.statistics()
        if found is None or found.step == self._seen:
            if not self._met:
                raise UsageError(
                    "no statistics yet: KFAC.step comes after a forward and a backward in training mode"
                )
            return
        self._seen = found.step
        self._hand_over(found)
        self._met.update(found.factors)
        scale = self._loss_scale()
        sums = (
            (name, layer.sums(found.factors[name], scale))
            for name, layer in self._layers.items()
            if name in found.factors
        )
        for name, total in self._exchange.sums(sums):
            if total.isfinite().all():
                self._layers[name].fold(total, self._decay)

    def _hand_over(self, found: Statistics) -> None:
        """Give parameters that have a gradient and never had factors to the others' optimizer."""
        late = [
            layer
            for name, layer in self._layers.items()
            if name not in found.factors and name not in self._met and layer.weight.grad is not None
        ]
        if not late:
            return
        reasons = "; ".join(f"{layer.name}: {found.skipped.get(layer.name, 'none came')}" for layer in late)
        if self._make_others is None:
            raise UsageError(f"no factors for some weights ({reasons}): name an optimizer for them, others=…")
        warn(f"KFAC leaves weights without factors to the other optimizer ({reasons})")
        self._give_away([layer.name for layer in late])

    def _give_away(self, names: list[str]) -> None:
        if not names:
            return
        parameters = [p for name in names for p in self._layers.pop(name).parameters]
        gone = {id(p) for p in parameters}
        for group in self.param_groups[: self._ours]:
            group["params"] = [p for p in group["params"] if id(p) not in gone]
        if self._others is None:
            assert self._make_others is not None
            self._others = self._make_others([{"params": parameters}])
        else:
            self._others.add_param_group({"params": parameters})
        self._link()

    def add_param_group(self, param_group: Group) -> None:
        """Refused once the optimizer is made: its groups are those of its layers.

        Raises:
            UsageError: always, after construction.
        """
        if "_others" in self.__dict__:
            raise UsageError(
                "KFAC takes no further param groups: make another one, and load the state of this one"
            )
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The state of this process: with several, that of the layers that it owns or works on (see `merged`)."""
        return super().state_dict() | {
            LAYERS: {name: layer.state() for name, layer in self._layers.items()},
            "clock": self._clock,
            "source": self._source.state() if self._met else None,
            "met": sorted(self._met),
            OTHERS: None if self._others is None else self._others.state_dict(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue to the bit from a `state_dict`, of this process or `merged` from several.

        Raises:
            UsageError: factors of layers that this process owns are not in it.
        """
        check_whole(state_dict, self._exchange.owned())
        self._give_away([name for name in self._layers if name not in state_dict[LAYERS]])
        super().load_state_dict(dict(state_dict))
        if self._others is not None:
            self._others.load_state_dict(state_dict[OTHERS])
        self._link()
        for name, layer in self._layers.items():
            layer.load(state_dict[LAYERS][name])
        self._clock, self._met = state_dict["clock"], set(state_dict["met"])
        if self._met:
            self._source.load(state_dict["source"])

    def _link(self) -> None:
        """The groups of the others' optimizer are groups of this one, for schedulers and scalers."""
        del self.param_groups[self._ours :]
        if self._others is not None:
            self.param_groups.extend(self._others.param_groups)

    def reserved_bytes(self) -> int:
        """Bytes of state of this process between steps, present or to come, the other optimizer's included."""
        worked, owned = self._exchange.worked(), self._exchange.owned()
        factors = sum(
            (name in owned) * side.average_bytes() + (name in worked) * side.inverse_bytes()
            for name, layer in self._layers.items()
            for side in layer.sides
        )
        momentum: int = sum(
            p.numel() * p.element_size()
            for group in self.param_groups[: self._ours]
            for p in group["params"]
            if group["momentum"]
        )
        theirs = self.param_groups[self._ours :]
        return factors + momentum + (state_bytes(theirs, self._others) if self._others is not None else 0)

    def report(self) -> tuple[SideReport, ...]:
        """How each factor owned here is inverted, with its effective rank now (an eigenvalue solve each)."""
        ours = self.param_groups[: self._ours]
        damping_of = {id(p): group["damping"] for group in ours for p in group["params"]}
        return tuple(
            row
            for name in self._exchange.owned()
            if name in self._layers
            for row in rows_of(self._layers[name], damping_of[id(self._layers[name].weight)])
        )
