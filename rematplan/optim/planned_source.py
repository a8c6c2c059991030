"""Get the statistics of planned modules for the optimizer `KFAC`: a `StatisticsSource`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

from torch import nn

from rematplan.ir import UsageError
from rematplan.module.plan_access import Planning
from rematplan.runtime.statistics.factors import Factors, Statistics
from rematplan.runtime.statistics.recorder import Listener


@runtime_checkable
class StatisticsSource(Protocol):
    """An object that provides Kronecker factors to `KFAC`: sums of outer products of layers' inputs and of the
    gradients of their outputs."""

    def layers(self) -> Mapping[str, Factors]:
        """Return the factors by weight name, on the device ``meta``: shapes and types without values."""

    def statistics(self) -> Statistics | None:
        """Return the factors since the last update, with a number of the step; None if there are none. `KFAC` ignores a
        step that it has read before."""

    def state(self) -> Any:
        """Return what `load` needs to go on with the same statistics. It is called after an update of the weights."""

    def load(self, state: Any) -> None:
        """Continue as after the call of `state` that returned ``state``."""


class PlannedSource:
    """Provides the Kronecker factors of one or several planned modules inside of a model to `KFAC`."""

    def __init__(self, parts: Mapping[str, Planning]) -> None:
        # By the prefix of their parameters' names, such as ``encoder.``.
        self._parts = parts
        self._relays: tuple[_Relay, ...] = ()

    def layers(self) -> Mapping[str, Factors]:
        """Return the factors by weight name in the whole model, without values, on the device ``meta``."""
        return _Joined({prefix: part.statistics_layers() for prefix, part in self._parts.items()})

    def statistics(self) -> Statistics | None:
        """Return the Kronecker factors of the current training step, of all planned modules.

        Return None if no module has computed any yet.
        """
        found = {prefix: part.statistics() for prefix, part in self._parts.items()}
        factors = _Joined({prefix: one.factors for prefix, one in found.items() if one.factors})
        skipped = {prefix + name: why for prefix, one in found.items() for name, why in one.skipped.items()}
        return Statistics(factors, skipped, self.step()) if len(factors) else None

    def listen(self, listener: Listener) -> None:
        """Call ``listener``, in place of an earlier one, with factors of a running backward and the number of the
        training step."""
        self._relays = tuple(_Relay(self, prefix, listener) for prefix in self._parts)
        for relay, part in zip(self._relays, self._parts.values(), strict=True):
            part.listen_to_statistics(relay.report)

    def step(self) -> int:
        """Return a number that identifies the current training step: the sum of the step numbers of all planned
        modules."""
        return sum(part.statistics_state[0] for part in self._parts.values())

    def state(self) -> Sequence[tuple[int, int]]:
        """Return, for each planned module, the number of its next training step and how often it has drawn labels."""
        states = (part.statistics_state for part in self._parts.values())
        return [(step + 1, draws) for step, draws in states]

    def load(self, state: Sequence[tuple[int, int]]) -> None:
        """Restore what `state` returned, so that the modules draw the same labels."""
        for part, (step, draws) in zip(self._parts.values(), state, strict=True):
            part.statistics_state = step, draws


class _Relay:
    """Passes the Kronecker factors of one planned module to a listener, under their names in the whole model."""

    def __init__(self, source: PlannedSource, prefix: str, listener: Listener) -> None:
        self._source, self._prefix, self._listener = source, prefix, listener

    def report(self, factors: Mapping[str, Factors], _step: int) -> None:
        """Call the listener with one module's factors, by names in the whole model, and the whole model's step."""
        self._listener(_Joined({self._prefix: factors}), self._source.step())


class _Joined(Mapping[str, Factors]):
    """The factors of several modules by weight name in the whole model. A packed factor becomes a matrix when
    it is read."""

    def __init__(self, parts: Mapping[str, Mapping[str, Factors]]) -> None:
        self._places = {
            prefix + name: (part, prefix, name) for prefix, part in parts.items() for name in part
        }

    def __getitem__(self, name: str) -> Factors:
        part, prefix, inner = self._places[name]
        found = part[inner]
        return found if found.bias_name is None else replace(found, bias_name=prefix + found.bias_name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, name: object) -> bool:  # the inherited method would unpack the factor
        return name in self._places


def source_of(model: nn.Module) -> StatisticsSource:
    """Return the source of the factors of all planned modules in ``model``; UsageError if none is planned
    with statistics."""
    parts, reasons = {}, []
    for name, module in model.named_modules():
        try:
            planning = Planning(module)
            assert planning.statistics_options
        except UsageError as error:
            reasons.append(str(error))
        else:
            parts[name + "." if name else ""] = planning
    if not parts:
        raise UsageError(
            f"a {type(model).__name__} has no Kronecker statistics ({reasons[0]}): plan it with statistics=, "
            f"or state source="
        )
    return PlannedSource(parts)
