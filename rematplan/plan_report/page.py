"""One HTML page about a plan: memory over the step, the trade-off, what is recomputed, and what bounds the peak. The
page needs no network: the JavaScript that draws is in it."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rematplan.ir import TrainingGraph, UsageError, show_bytes
from rematplan.plan_report.labels import LABELS, show_overhead, show_seconds, unit_of
from rematplan.plan_report.replay import (
    RECOMPUTED,
    Branch,
    Replay,
    Stay,
    folded,
    held_at_peak,
    replay,
    run_again,
    time_by_op,
)
from rematplan.planner.core.lane_schedule import MAIN, RECOVERY, Laned, Sharing, needs_of, placed
from rematplan.planner.core.plan import Plan, peak_op
from rematplan.planner.overlap.makespan import times_on_lanes
from rematplan.planner.peak_report import GRADIENTS
from rematplan.planner.strategies.store_all import no_recompute

COLOURS = ("#7f8fa6", "#a4b0be", "#c8ad7f", "#8d99ae", "#6c7a89", "#95a5a6")
"""The colours of what is resident during the whole step."""
KINDS = {
    "activations": "#0072B2",
    RECOMPUTED: "#56B4E9",
    GRADIENTS: "#D55E00",
    "workspace": "#E69F00",
}
"""The colours of the other kinds of memory; of Okabe and Ito's palette."""
LONGEST = 28
"""The most characters of an op's kind next to its bar; a longer one is shortened in the middle."""
LANES = ("main lane", "recovery lane")
PIXELS = 1000
"""About the width of a picture."""
MOST_OPS = 20
"""How many kinds of ops the picture of the step's time shows."""
STYLE = """
:root { color-scheme: light dark; --ink: #1d2430; --paper: #ffffff; --line: #d8dde6; --soft: #5c6675 }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ef; --paper: #14171c; --line: #343b46; --soft: #a3acba } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 2rem auto;
  max-width: 1100px; padding: 0 1rem; overflow-wrap: break-word }
h1 { font-size: 1.5rem; margin-bottom: 0 } h2 { font-size: 1.15rem; margin: 2rem 0 .3rem }
p { color: var(--soft); margin: .2rem 0 .6rem } table { border-collapse: collapse; width: 100% }
th, td { text-align: left; padding: .25rem .7rem .25rem 0; border-bottom: 1px solid var(--line);
  vertical-align: top } .wide { overflow-x: auto } .n { text-align: right; white-space: nowrap }
details { margin-left: 1.2rem } summary { padding: .15rem 0 } .leaf { margin-left: 2.2rem; padding: .15rem 0 }
.f { color: var(--soft) }
"""
DRAW = """
const dark = matchMedia("(prefers-color-scheme: dark)"), plots = [];
const colours = () => ({ink: getComputedStyle(document.documentElement).getPropertyValue("--ink").trim(),
  paper: dark.matches ? "#22272f" : "#ffffff"});
function draw(id, figure) {
  const seen = colours();
  Object.assign(figure.layout, {font: {color: seen.ink}, hoverlabel: {bgcolor: seen.paper, font: {color: seen.ink}}});
  Plotly.newPlot(id, figure.data, figure.layout, {displaylogo: false, responsive: true});
  plots.push(id);
}
dark.addEventListener("change", () => {
  const seen = colours();
  for (const id of plots) Plotly.relayout(id, {"font.color": seen.ink, "hoverlabel.bgcolor": seen.paper,
    "hoverlabel.font.color": seen.ink});
});
"""


@dataclass(frozen=True)
class Subject:
    """A plan and what a report says about it."""

    graph: TrainingGraph
    plan: Plan
    modules: Mapping[str, str] = field(default_factory=dict)
    """The module of each op, by the op's name, as far as known."""
    kinds: Mapping[str, str] = field(default_factory=dict)
    """The kind of each op, such as ``aten.mm.default``, as far as known."""
    curve: Sequence[Plan] = ()
    """Other plans of the same problem, for the trade-off."""

    def replayed(self) -> Replay:
        """Return what each run of the plan's schedule holds and takes (`replay`)."""
        return replay(self.graph, self.plan, self.modules)


def page(subject: Subject) -> str:
    """Return the report as one HTML page that loads nothing else; `UsageError` without the package plotly."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise UsageError("a report needs the package plotly: pip install 'rematplan[report]'") from None
    graph, plan = subject.graph, subject.plan
    base, found = no_recompute(graph), subject.replayed()
    said = (
        f"peak {show_bytes(plan.estimate.peak)} ({plan.estimate.peak} bytes), without recomputation "
        f"{show_bytes(base.estimate.peak)}; {_budget(plan)}; overhead {show_overhead(plan)}; "
        f"{_ops(plan.estimate.reruns)} recomputed; {plan.strategy}, {plan.status}"
    )
    parts = [
        f"<h1>{_text(graph.name)}</h1><p>{_text(said)}</p>",
        "<h2>Memory over the step</h2><p>By kind. Point at a place to see the op that runs there.</p>",
        _drawn("memory", _memory(subject, found, base)),
        *_lanes(subject, found),
        "<h2>Memory against time</h2><p>Each point is a plan.</p>",
        _drawn("trade-off", _trade_off(subject, base)),
        "<h2>What is recomputed</h2>",
        "".join(_tree(run_again(graph, found))) or "<p>Nothing.</p>",
        "<h2>The largest tensors at the peak</h2>",
        f"<p>The peak is at {_text(peak_op(plan) or 'the inputs')}. Besides these tensors, the inputs have "
        f"{show_bytes(graph.input_bytes)}.</p>",
        _held(subject, found),
        "<h2>The step's time by op</h2>",
        _drawn("times", _times(subject, found)),
    ]
    head = (
        f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><link rel="icon" href="data:,">'
        f"<title>{_text(graph.name)}: rematplan</title>"
        f"<style>{STYLE}</style><script>{get_plotlyjs()}</script><script>{DRAW}</script>"
    )
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>'


def _text(text: object) -> str:
    return html.escape(str(text))


def _name(name: str) -> str:
    """Return a name as HTML that may be broken after its dots and underscores."""
    return re.sub(r"([._])", r"\1<wbr>", _text(name))


def _budget(plan: Plan) -> str:
    return "no budget" if plan.budget is None else f"budget {show_bytes(plan.budget)}"


def _drawn(name: str, figure: Any) -> str:
    # to_json escapes <, > and /, so that no name in it can end the script.
    return f'<div id="{name}" class="plot"></div><script>draw("{name}", {figure.to_json()})</script>'


def _figure(x: str, y: str, height: int = 420) -> Any:
    """Return an empty figure with the page's colours. ``x``, ``y``: the axes' titles; ``height``: pixels."""
    from plotly import graph_objects

    grid = {"gridcolor": "rgba(128,128,128,.25)", "zerolinecolor": "rgba(128,128,128,.4)"}
    clear = "rgba(0,0,0,0)"
    return graph_objects.Figure(
        layout={
            "template": "none",
            "height": height,
            "margin": {"l": 70, "r": 20, "t": 34, "b": 50},
            "modebar": {"bgcolor": clear, "color": "#808080", "activecolor": "#0072B2"},
            "paper_bgcolor": clear,
            "plot_bgcolor": clear,
            "xaxis": {"title": x, **grid},
            "yaxis": {"title": y, "rangemode": "tozero", **grid},
            "legend": {"orientation": "h", "y": -75 / (height - 84)},  # below the axis's title
        }
    )


def _memory(subject: Subject, found: Replay, base: Plan) -> Any:
    """Return the diagram of memory over time: the plan's bytes by kind, the bytes without recomputation, and the
    budget."""
    plan = subject.plan
    unit, scale = unit_of(max(base.peak, plan.peak))
    figure = _figure("time (ms)", unit, 480)
    figure.update_layout(hovermode="x")
    times = [run.start / 1e3 for run in found.runs]
    for k, (kind, row) in enumerate(found.by_kind().items()):
        figure.add_scatter(
            x=times,
            y=_in_units(row, scale),
            name=LABELS.get(kind, kind),
            stackgroup="plan",
            line={"width": 0, "shape": "hv"},
            fillcolor=KINDS.get(kind, COLOURS[k % len(COLOURS)]),
            hoverinfo="skip",
        )
    figure.add_scatter(
        x=times,
        y=_in_units(found.totals(), scale),
        name="the plan",
        line={"width": 1, "color": "#808080", "shape": "hv"},
        text=_said(subject, found),
        hovertemplate="%{text}<extra></extra>",
    )
    plain = replay(subject.graph, base, {})
    figure.add_scatter(
        x=[run.start / 1e3 for run in plain.runs],
        y=_in_units(plain.totals(), scale),
        name="no recompute",
        line={"width": 1, "color": "#CC79A7", "dash": "dot", "shape": "hv"},
        hoverinfo="skip",
    )
    if plan.budget is not None:
        line = {"color": "#D00000", "dash": "dash", "width": 1.5}
        y = plan.budget / scale
        figure.add_hline(y=y, line=line, annotation_text="budget", annotation_position="top left")
    return figure


def _in_units(row: Sequence[int], scale: int) -> list[float]:
    return [round(n / scale, 6) for n in row]


def _said(subject: Subject, found: Replay) -> list[str]:
    """Return the text at each run: the op, its module, and for the largest tensor that it writes, its readers and how
    long it stays."""
    largest: dict[int, Stay] = {}
    for stay in found.stays:
        known = largest.get(stay.first)
        largest[stay.first] = stay if known is None or stay.bytes > known.bytes else known
    back: dict[str, list[int]] = {}
    for stay in found.stays:
        back.setdefault(stay.tensor, []).append(stay.first)
    said, totals = [], found.totals()
    for at, run in enumerate(found.runs):
        lines = [
            f"{run.op}{' (again)' if run.again else ''}",
            run.module,
            f"{show_bytes(totals[at])} resident",
        ]
        if at in largest:
            stay = largest[at]
            who = ", ".join(subject.graph.readers.get(stay.tensor, ())[:4]) or "nobody"
            lines.append(f"writes {stay.tensor}, {show_bytes(stay.bytes)}, read by {who}")
            end = stay.last < len(found.runs) - 1
            lines.append(f"freed after {found.runs[stay.last].op}" if end else "stays to the end")
            if later := [first for first in back[stay.tensor] if first > at]:
                lines.append(f"computed again at {found.runs[later[0]].start / 1e3:.3f} ms")
        said.append("<br>".join(_text(line) for line in lines if line))
    return said


def _lanes(subject: Subject, found: Replay) -> Iterator[str]:
    """Yield the HTML that shows the runs of both lanes over time. Yield nothing for a plan on one lane."""
    lanes = subject.plan.lanes
    if lanes is None:
        return
    laned = Laned(
        subject.graph,
        tuple(run.op for run in found.runs),
        placed(lanes.fork, lanes.recovery, len(found.runs)),
    )
    times = times_on_lanes(laned, needs_of(laned.where, lanes.waits), Sharing(lanes.speed))
    figure = _figure("time (ms)", "", 260)
    for name, again, colour in (("first runs", False, "#0072B2"), ("recomputed", True, KINDS[RECOMPUTED])):
        bars = list(_bars(laned, found, times, again))
        figure.add_bar(
            y=[LANES[bar.lane] for bar in bars],
            base=[bar.start / 1e3 for bar in bars],
            x=[(bar.end - bar.start) / 1e3 for bar in bars],
            name=name,
            orientation="h",
            marker={"color": colour, "line": {"width": 0}},
            text=[f"{bar.first}{f' … {bar.last}' if bar.last != bar.first else ''}" for bar in bars],
            textposition="none",
            hovertemplate="%{text}: from %{base:.4f} ms, %{x:.4f} ms<extra></extra>",
        )
    yaxis = {"automargin": True, "categoryarray": LANES[::-1], "categoryorder": "array"}
    figure.update_layout(barmode="overlay", yaxis=yaxis)
    yield "<h2>The two lanes</h2>"
    one, two = (show_seconds(time / 1e6) for time in (subject.plan.estimate.cost, lanes.makespan))
    yield (
        f"<p>From the first backward op on, what is recomputed runs on a lane of its own: {len(lanes.recovery)} runs, "
        f"{len(lanes.waits)} waits. The step takes {two} instead of {one} on one lane, if each lane has "
        f"{100 * lanes.speed:g} % of its speed while both work. At any speed, the lanes hold at most "
        f"{show_bytes(lanes.peak)}.</p>"
    )
    yield _drawn("lanes", figure)


@dataclass(frozen=True, slots=True)
class _Bar:
    """Runs of one lane without a visible gap between them, first runs or runs again."""

    lane: int
    first: str
    last: str
    start: float
    end: float


def _bars(laned: Laned, found: Replay, times: Sequence[tuple[float, float]], again: bool) -> Iterator[_Bar]:
    """Yield the first runs, or those that run ``again``, as bars. Runs that would be narrower than a pixel are one bar
    with those that follow."""
    narrow = times[-1][1] / PIXELS
    for lane in (MAIN, RECOVERY):
        bar: _Bar | None = None
        for at, run in enumerate(found.runs):
            if run.again != again or laned.where.where.get(at, (MAIN, 0))[0] != lane:
                continue
            start, end = times[at]
            if bar and bar.end - bar.start < narrow and start - bar.end < narrow:
                bar = replace(bar, last=run.op, end=end)
                continue
            if bar:
                yield bar
            bar = _Bar(lane, run.op, run.op, start, end)
        if bar:
            yield bar


def _trade_off(subject: Subject, base: Plan) -> Any:
    """Return the diagram of overhead against peak: the plan, the step without recomputation, other plans."""
    unit, scale = unit_of(base.peak)
    figure = _figure(f"peak ({unit})", "overhead (%)")
    groups = {
        "other plans": (subject.curve, "circle-open", "#0072B2"),
        "no recompute": ([base], "star", "#CC79A7"),
        "this plan": ([subject.plan], "diamond", "#D55E00"),
    }
    for name, (plans, symbol, colour) in groups.items():
        ordered = sorted(plans, key=lambda plan: plan.estimate.peak)
        if ordered:
            figure.add_scatter(
                x=[plan.estimate.peak / scale for plan in ordered],
                y=[100 * plan.estimate.overhead for plan in ordered],
                name=name,
                mode="lines+markers" if len(ordered) > 1 else "markers",
                line={"shape": "hv", "width": 1},
                marker={"symbol": symbol, "size": 10, "color": colour},
                hovertemplate=f"%{{x:.2f}} {unit}, +%{{y:.2f}} %",
                cliponaxis=False,
            )
    return figure


def _tree(branch: Branch) -> Iterator[str]:
    """Yield the HTML of a branch's modules, nested, with the figures of each; equal neighbours are one line."""
    if not branch.name and branch.runs:
        yield f"<p>{_figures(branch, 1)}</p>"
    for name, times, inner in folded(branch):
        many = f" ×{times}" if times > 1 else ""
        line = f'{_text(name)}{many} <span class="f">{_figures(inner, times)}</span>'
        if inner.inner:
            yield f"<details{' open' if len(branch.inner) == 1 else ''}><summary>{line}</summary>"
            yield from _tree(inner)
            yield "</details>"
        else:
            yield f'<div class="leaf">{line}</div>'


def _figures(branch: Branch, times: int) -> str:
    each, all_ = (" each", " together") if times > 1 else ("", "")
    return f"{_ops(branch.runs)}, {show_bytes(branch.bytes)}{each}; {show_seconds(branch.cost / 1e6)}{all_}"


def _ops(number: int) -> str:
    return f"{number} op{'' if number == 1 else 's'}"


def _held(subject: Subject, found: Replay) -> str:
    """Return an HTML table of the tensors that are resident at the plan's peak, with what would lower it."""
    rows = [
        f"<tr><td>{_name(h.tensor)}</td><td class=n>{show_bytes(h.bytes)}</td><td>{_name(h.op)}<br>"
        f'<span class="f">{_name(h.module)}</span></td><td>{_name(", ".join(h.readers[:4]) or "nobody")}</td>'
        f"<td>{_text(h.advice)}</td></tr>"
        for h in held_at_peak(subject.graph, subject.plan, found)
    ]
    titles = ("tensor", "bytes", "written by", "read by", "what would lower the peak")
    head = "".join(f"<th>{title}</th>" for title in titles)
    return f'<div class="wide"><table><tr>{head}</tr>{"".join(rows)}</table></div>'


def _times(subject: Subject, found: Replay) -> Any:
    """Return a bar chart of the milliseconds of first and repeated runs, for the `MOST_OPS` kinds of op that take
    longest."""
    rows = list(time_by_op(found, subject.kinds).items())[:MOST_OPS][::-1]
    names = [kind.removeprefix("aten.").removesuffix(".default") for kind, _ in rows]
    kinds = list(map(_text, names))
    figure = _figure("ms", "", 120 + 22 * len(rows))
    for name, part, colour in (("first runs", 1, "#0072B2"), ("run again", 2, "#56B4E9")):
        figure.add_bar(
            y=kinds,
            x=[row[part] / 1e3 for _, row in rows],
            name=name,
            orientation="h",
            marker={"color": colour},
            hovertemplate="%{y}: %{x:.4f} ms<extra></extra>",
        )
    half = LONGEST // 2
    shown = [_text(name if len(name) <= LONGEST else f"{name[:half]}…{name[-half:]}") for name in names]
    yaxis = {"automargin": True, "tickvals": kinds, "ticktext": shown}
    figure.update_layout(barmode="stack", yaxis=yaxis)
    return figure
