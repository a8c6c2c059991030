"""Rewriting passes over a captured step that do not change its results."""

from __future__ import annotations

from dataclasses import replace

from rematplan.runtime.graph.captured_step import (
    CapturedStep,
    refs,
)


def with_phases(step: CapturedStep) -> CapturedStep:
    """Return the step with the field ``backward`` of each call set: whether the call belongs to the backward half.

    The loss boundary is the moment at which the gradients of the outputs arrive. Every call after it is backward. A
    call before it is forward if it is random or a collective (`Call.ordered`), if it makes an output that exists at the
    loss boundary, or if another forward call reads its result. All other calls are backward.
    """
    late = step.after_loss
    needed = {o.value for o in step.outputs if step.values[o.value].call not in late}
    backward = set()
    for call in reversed(step.calls):
        if call.name in late or not (call.ordered or any(r in needed for r in call.results)):
            backward.add(call.name)
        else:
            needed.update(r.value for r in refs((call.args, call.kwargs)))
    return replace(step, calls=tuple(replace(c, backward=c.name in backward) for c in step.calls))


def without_dead_calls(step: CapturedStep) -> CapturedStep:
    """Return the step without its dead calls, and without the values that they make. A call is dead if none of its
    results is an output or is read by a call that stays.

    Random calls stay, since later draws depend on the generator's state after them. Collectives stay, since other
    processes wait for them.
    """
    needed = {o.value for o in step.outputs}
    kept = []
    for call in reversed(step.calls):
        if call.ordered or any(r in needed for r in call.results):
            kept.append(call)
            needed.update(r.value for r in refs((call.args, call.kwargs)))
    kept.reverse()
    alive = {r for c in kept for r in c.results if r} | {i.value for i in step.inputs}
    values = {name: v for name, v in step.values.items() if name in alive}
    return replace(step, calls=tuple(kept), values=values)
