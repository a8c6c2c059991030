"""The optimizer `KFAC`: natural gradient descent with Kronecker factors, as a `torch.optim.Optimizer`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rematplan.ir import UsageError
from rematplan.optim.assignment import FactorPart
from rematplan.optim.checkpoint import LAYERS, check_whole
from rematplan.optim.communication import Exchange
from rematplan.optim.factor_report import SideReport, rows_of
from rematplan.optim.inversion_schedule import Refresh
from rematplan.optim.layer import BOTH, Layer, layers_of
from rematplan.optim.options import MakeOthers, OptionNames, Options, check_others, check_settings
from rematplan.optim.param_groups import OTHERS, Group, split_groups
from rematplan.optim.planned_source import PlannedSource, StatisticsSource, source_of
from rematplan.optim.step_memory import step_bytes, sums_bytes
from rematplan.optim.update import clipped, finite, move, preconditioned
from rematplan.runtime.costs.optimizer_memory import OptimizerMemory, optimizer_memory
from rematplan.runtime.graph.warn import warn
from rematplan.runtime.statistics.factors import Factors, Statistics


class KFAC(Optimizer):
    """The K-FAC optimizer: natural gradient descent with a Kronecker-factored approximation of the curvature.

    Sources: Martens and Grosse (2015); for convolutions Grosse and Martens (2016). For a layer s = W a, let g be the
    gradient with respect to s. The optimizer keeps moving averages of the Kronecker factors A = E[a aᵀ] and G = E[g
    gᵀ]. It subtracts lr · (G + √λ/π I)⁻¹ ∇W (A + π√λ I)⁻¹ from W, with momentum and a bound (``kl_clip``). π² is the
    mean eigenvalue of A ÷ that of G. Call ``step`` after a forward and a backward in training mode.

    Args:
        model: a module planned with statistics (``plan_module(..., statistics=...)``), a model that contains such
            modules, or any module together with ``source``.
        lr: the learning rate, as in `torch.optim.SGD`. It may differ by param group and be scheduled, as may
            ``momentum``, ``weight_decay`` and ``damping``.
        damping: λ, above 0.
        momentum: as in `torch.optim.SGD`.
        weight_decay: weights are multiplied by 1 − lr · weight_decay in each step, independently of the gradient.
        others: makes the optimizer of the parameters without Kronecker factors from a list of param groups, for example
            ``torch.optim.AdamW``. Its groups appear in ``param_groups``, with their own learning rate.
        loss_scale: the factor by which the loss was multiplied before ``backward``, apart from a mean over samples: a
            number, or a function that returns it, such as ``scaler.get_scale``. Statistics of the backward of the loss
            (``fisher="empirical"``) are divided by its square. Other statistics do not depend on it.
        params: param groups; by default all parameters of the model. A group may have a key ``others``: a dictionary of
            options for its parameters without Kronecker factors.
        source: provides the statistics instead of the planned module; see `StatisticsSource`.
        exchange: the communication with other processes; see `rematplan.optim.distributed`. By default there is none.
        kl_clip: bounds the divergence of a step in the quadratic model (Osawa et al. 2019): updates V are multiplied by
            min(1, √(kl_clip ÷ lr² Σ ⟨V, gradient⟩)). None: no bound.
        decay: the factor by which the earlier sums are multiplied when new statistics are added, from 0 to below 1.
        inverse: how factors are inverted: ``cholesky``, ``eigen``, ``low-rank``, ``diagonal`` or
            ``auto``. With ``auto`` only the diagonal of factors above 16,384 rows is used; factors from 2,048 rows get
            a low-rank inverse while few eigenvalues exceed the damping; all others use Cholesky factorisation.
        factors_every: statistics are read in every so many steps.
        inverse_every: each factor is inverted again in every so many steps. The inversions are spread over these steps,
            so that no step takes long.
        early_steps: during the first so many steps, every factor with new statistics is inverted again, since inverses
            become outdated quickly early in training.

    Raises:
        UsageError: an option is out of its range; there are parameters without Kronecker factors and no ``others``; or
            the model has no statistics.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float,
        *,
        damping: float = 1e-2,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        others: MakeOthers | None = None,
        loss_scale: float | Callable[[], float] = 1.0,
        params: Iterable[Group] | None = None,
        source: StatisticsSource | None = None,
        exchange: Exchange | None = None,
        **options: Unpack[OptionNames],
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "damping": damping}
        check_settings(defaults)
        self._options = Options(**options)
        self._source = source or source_of(model)
        layers, ours, theirs = split_groups(
            model, layers_of(model, self._source.layers(), self._options.inverse), params
        )
        check_others(model, theirs, others)
        super().__init__(ours, defaults)
        self._layers, self._ours = layers, len(ours)
        self._make_others = others
        self._others = others(theirs) if others is not None and theirs else None
        self._loss_scale = loss_scale if callable(loss_scale) else lambda: loss_scale
        self._exchange = exchange or Exchange()
        self._exchange.assign(layers)
        self._refresh = Refresh(layers, self._exchange.owned(), self._options)
        self._clock, self._seen, self._met, self._said = 0, -1, set[str](), False
        self._link()
        self._listen()

    def _listen(self) -> None:
        if self._exchange.early and isinstance(self._source, PlannedSource):
            self._source.listen(self._arrived)

    @torch.no_grad()
    def _arrived(self, factors: Mapping[str, Factors], step: int) -> None:
        """Start to send statistics that a backward has just computed to the processes that need them.

        It is called only if ``exchange`` sends statistics during the backward. Otherwise `step` sends them.

        ``factors``: the statistics by weight name. ``step``: the number of the training step.
        """
        if self._clock % self._options.factors_every == 0:
            for part, sums in self._sums(factors):
                self._exchange.begin(part, sums, step)

    def _sums(self, factors: Mapping[str, Factors]) -> Iterator[tuple[FactorPart, Tensor]]:
        """Yield statistics as vectors, each with the Kronecker factors to which it belongs: a weight name and (0,),
        (1,) or (0, 1).

        0 stands for the factor of the inputs, 1 for that of the outputs' gradients. ``factors``: the statistics by
        weight name.
        """
        scale = self._loss_scale()
        for name, which in self._exchange.parts():
            if name in self._layers and name in factors:
                yield (name, which), self._layers[name].sums(factors[name], scale, which)

    @property
    def layers(self) -> Mapping[str, Layer]:
        """The layers that have Kronecker factors and that this optimizer updates, by the name of their weight."""
        return self._layers

    def follow(self, model: nn.Module) -> None:
        """Take statistics from another planned module with the same parameters from now on.

        Use it after planning again with this optimizer's bytes reserved: ``planned = plan_module(planned, args,
        statistics=…, budget=…, reserved=[optimizer])``, then ``optimizer.follow(planned)``.

        Raises:
            UsageError: the module is not planned with statistics, or it has no factors for a layer of this optimizer.
        """
        source = source_of(model)
        if left := sorted(self._layers.keys() - source.layers().keys()):
            raise UsageError(
                f"the module has no factors of {', '.join(left[:5])}, which this optimizer updates: "
                f"its layers must be the same"
            )
        if self._met:
            source.load(self._source.state())
        self._source, self._seen = source, -1
        self._listen()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, rows: float = 1.0) -> Any:
        """Update all parameters, and return what ``closure`` returns; None without a closure.

        A step is skipped if a gradient or an update is not finite, for example while a factor has never been inverted.
        No weight changes then, and the first skipped step is reported by a warning. Statistics that are not finite are
        not added to the moving averages.

        Args:
            closure: computes the loss and the gradients first, as for any optimizer.
            rows: the weight of this process's gradients in their mean over the processes: the number of samples in the
                mean of its loss. Used only if ``exchange`` averages gradients.

        Raises:
            UsageError: the model has no statistics yet; or there are none for a parameter with a gradient, and
                ``others`` is not given.
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
            clip = clipped(float(product), self._options.kl_clip)
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
        """Every ``factors_every`` steps, add the step's finite statistics, over all processes, to the moving averages
        that this process stores. Layers that never had any are given to the optimizer ``others``; `UsageError` if
        that is needed and None, or if no layer ever had any."""
        if self._clock % self._options.factors_every:
            return
        found = self._source.statistics()
        if found is None or found.step == self._seen:
            if not self._met:
                raise UsageError(
                    "there are no statistics yet: call KFAC.step after a forward and a backward in training mode"
                )
            return
        self._seen = found.step
        self._hand_over(found)
        self._met.update(found.factors)
        for (name, which), total in self._exchange.sums(self._sums(found.factors)):
            if total.isfinite().all():
                self._layers[name].fold(total, self._options.decay, which)
            del total  # before the next layer's is computed

    def _hand_over(self, found: Statistics) -> None:
        """Give the parameters of layers for which no statistics come to the optimizer ``others``, with a warning.

        These are the layers that have a gradient, but neither statistics in ``found`` nor in an earlier step.

        Raises:
            UsageError: there are such layers, and ``others`` is not given.
        """
        late = [
            layer
            for name, layer in self._layers.items()
            if name not in found.factors and name not in self._met and layer.weight.grad is not None
        ]
        if not late:
            return
        reasons = "; ".join(f"{layer.name}: {found.skipped.get(layer.name, 'none came')}" for layer in late)
        if self._make_others is None:
            raise UsageError(
                f"no factors for some weights ({reasons}): state an optimizer for them, such as "
                f"others=torch.optim.AdamW"
            )
        warn(f"KFAC: weights without factors are updated by the other optimizer from now on ({reasons})")
        self._give_away([layer.name for layer in late])

    def _give_away(self, names: list[str]) -> None:
        """Move the parameters of the layers ``names`` to the other optimizer, which is made if there is none. Without
        names, nothing happens."""
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
        """Refuse further param groups: the groups are fixed by the layers with factors.

        Raises:
            UsageError: always, once the optimizer is constructed.
        """
        if "_others" in self.__dict__:
            raise UsageError(
                "KFAC cannot get further param groups: construct another one, and load the state of this one"
            )
        super().add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        """Refuse to copy or pickle the optimizer, since a copy would get no statistics from the planned modules.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            "KFAC cannot be copied or pickled: construct another one of the copied model, and load the state_dict of "
            "this one"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this process: param groups, momentum, Kronecker factors, inverses, and the state of
        ``others``.

        With several processes it contains only the factors that this process averages and the inverses that it uses.
        Merge the states of all processes with `rematplan.optim.checkpoint.merged`.
        """
        return super().state_dict() | {
            LAYERS: {name: layer.state() for name, layer in self._layers.items()},
            "clock": self._clock,
            "source": self._source.state() if self._met else None,
            "met": sorted(self._met),
            OTHERS: None if self._others is None else self._others.state_dict(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a state of this process, or one merged from several processes. Training continues bit for bit.

        Layers that the state does not contain, because they had no statistics, are given to the optimizer ``others``.

        Raises:
            UsageError: the state lacks Kronecker factors that this process averages; or it lacks a layer, and there is
                no optimizer ``others``.
        """
        check_whole(state_dict, self._exchange.owned())
        missing = [name for name in self._layers if name not in state_dict[LAYERS]]
        if missing and self._make_others is None:
            raise UsageError(
                f"the state has no factors of {', '.join(missing)}: state an optimizer for them, such as "
                f"others=torch.optim.AdamW"
            )
        self._give_away(missing)
        super().load_state_dict(dict(state_dict))
        if self._others is not None:
            self._others.load_state_dict(state_dict[OTHERS])
        self._link()
        owned, worked = self._exchange.owned(), self._exchange.worked()
        for name, layer in self._layers.items():
            averages = tuple(at for at in BOTH if (name, at) in owned)
            layer.load(state_dict[LAYERS][name], averages, name in worked)
        self._clock, self._met = state_dict["clock"], set(state_dict["met"])
        if self._met:
            self._source.load(state_dict["source"])

    def _link(self) -> None:
        """Append the param groups of the optimizer ``others`` to ``param_groups``, for schedulers and gradient scalers.

        Groups that an earlier call appended are replaced.
        """
        del self.param_groups[self._ours :]
        if self._others is not None:
            self.param_groups.extend(self._others.param_groups)

    def reserved_bytes(self) -> int:
        """Return the bytes of this process's state between steps, whether the state exists already or not.

        The state consists of the moving averages of the Kronecker factors, their inverses, momentum, and the state of
        the optimizer ``others``. If ``exchange`` sends statistics during a backward, their vectors count, too, and what
        computing one of them needs. Because of this method and `step_bytes` the optimizer can be given to
        ``plan_module(..., reserved=[optimizer])``.
        """
        worked, owned = self._exchange.worked(), self._exchange.owned()
        factors = sum(
            ((name, at) in owned) * side.average_bytes()
            + ((name, at) in owned or name in worked) * side.inverse_bytes()
            for name, layer in self._layers.items()
            for at, side in enumerate(layer.sides)
        )
        if self._exchange.early:
            parts = ((self._layers[n], which) for n, which in self._exchange.parts() if n in self._layers)
            factors += sum(layer.no_sums("meta", which).nbytes for layer, which in parts)
            factors += max(map(sums_bytes, self._layers.values()), default=0)
        momentum: int = sum(
            p.numel() * p.element_size()
            for group in self.param_groups[: self._ours]
            for p in group["params"]
            if group["momentum"]
        )
        memory = self._memory_of_others()
        return factors + momentum + sum(m.to_come + sum(t.nbytes for t in m.tensors) for m in memory)

    def step_bytes(self) -> int:
        """Return an upper bound of the bytes that `step` allocates temporarily in this process, in addition to
        parameters, gradients, statistics and the state.

        ``plan_module(..., reserved=[optimizer])`` counts them while the optimizer's step runs.
        """
        owned = {name for name, _ in self._exchange.owned() if name in self._layers}
        others = max((m.transient for m in self._memory_of_others()), default=0)
        rest = sum(p.nbytes for group in self.param_groups[self._ours :] for p in group["params"])
        return step_bytes(self._layers, owned, self._exchange.copies, others, rest)

    def _memory_of_others(self) -> list[OptimizerMemory]:
        """Return the memory of the optimizer ``others`` on each device of its parameters."""
        if self._others is None:
            return []
        devices = {p.device for group in self._others.param_groups for p in group["params"]}
        return [optimizer_memory(self._others, device) for device in devices]

    def report(self) -> tuple[SideReport, ...]:
        """Report, for each Kronecker factor that this process averages, its size, its effective rank and the form of
        its inverse.

        Factors without statistics are left out. The effective rank is the number of eigenvalues above the damping. They
        are computed anew, with O(rows³) operations.
        """
        ours = self.param_groups[: self._ours]
        damping_of = {id(p): group["damping"] for group in ours for p in group["params"]}
        return tuple(
            row for layer in self._layers.values() for row in rows_of(layer, damping_of[id(layer.weight)])
        )
