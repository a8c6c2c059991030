"""Rewriting passes over a captured step that do not change its results."""

from __future__ import annotations

from dataclasses import replace

from rematplan.runtime.graph.captured_step import CapturedStep


def with_phases(step: CapturedStep) -> CapturedStep:
    """Return the step with ``backward`` set for each call: false if the call is needed before the loss boundary and can
    run there, else true. Needed are random calls, collectives, calls that make an output that exists there, and all
    calls whose results a needed call reads."""
    late = step.after_loss
    needed = {o.value for o in step.outputs if step.values[o.value].call not in late}
    backward = set()
    for call in reversed(step.calls):
        if call.name in late or not (call.ordered or any(r in needed for r in call.results)):
            backward.add(call.name)
        else:
            needed.update(call.operands)
    return replace(step, calls=tuple(replace(c, backward=c.name in backward) for c in step.calls))


def without_dead_calls(step: CapturedStep) -> CapturedStep:
    """Return the step without calls whose results no output or remaining call needs, and without their values.
    Random calls and collectives stay."""
    needed = {o.value for o in step.outputs}
    kept = []
    for call in reversed(step.calls):
        if call.ordered or any(r in needed for r in call.results):
            kept.append(call)
            needed.update(call.operands)
    kept.reverse()
    alive = {r for c in kept for r in c.made} | {i.value for i in step.inputs}
    values = {name: v for name, v in step.values.items() if name in alive}
    return replace(step, calls=tuple(kept), values=values)
