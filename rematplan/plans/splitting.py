"""Which regions of a step are split along rows, and into how many parts: as the user states, or chosen for a budget."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeAlias

from rematplan.ir import InfeasibleBudget, RematplanError, TrainingGraph, UsageError, show_bytes
from rematplan.planner.auto.auto_strategy import Auto
from rematplan.planner.auto.block_starts import leanest_plans
from rematplan.planner.auto.smallest_peak_search import find_smallest_peak
from rematplan.planner.bounds.cut_bounds import min_peak_bound
from rematplan.planner.core.effort import Effort
from rematplan.planner.core.search_rules import rules_of
from rematplan.planner.strategies.store_all import no_recompute
from rematplan.plans.budget_searches import plan_within
from rematplan.plans.budgets import Budget, parse_budget
from rematplan.plans.options import AUTO_SPLIT, UNSPLIT, PlanOptions
from rematplan.plans.split_floor import floor_text, split_floor
from rematplan.plans.step_problems import StepProblems
from rematplan.runtime.costs.device_models import PROFILE
from rematplan.runtime.graph.captured_step import MODEL, CapturedStep
from rematplan.runtime.split.call_emitter import part_of
from rematplan.runtime.split.early_backward import scales_gradients
from rematplan.runtime.split.regions import SplitRegion, StepUse, find_regions
from rematplan.runtime.split.row_bits import changed_rows
from rematplan.runtime.split.rule_functions import SUM
from rematplan.runtime.split.split_step import ROWS, bounds_of, split_regions, splittable
from rematplan.runtime.split.split_table import rule_of
from rematplan.runtime.split.sums_in_place import with_sums_in_place

PARTS = (2, 4, 8, 16)
"""The numbers of parts that ``auto`` tries."""
TRIAL = 0.05
"""The share of the time limit for the trial of one choice of splits."""
TRIAL_PER_OP = 0.01
"""The seconds for each op that a search for the smallest peak with one choice may take at most."""
MOVES_PER_OP = 200
"""The moves for each op of such a search, if the strategy does not count moves."""
LARGE = 0.1
"""Kinds of regions that save less than this share of what all save get more parts only where they bind the peak."""
NOISE = 1.2
"""Costs that were measured at different times may differ by this factor on a machine that counts as quiet."""
ALIKE, ALIKE_MODELLED = 0.01, 0.002
"""Choices whose plans take at most this share of a step's time more than the fastest are equal: the fewest parts win.
With modelled costs, in which no noise hides what more parts cost, the share is the second."""
SplitKind: TypeAlias = tuple[SplitRegion, ...]
"""Regions of equal ops and sizes, such as the MLPs of all layers. They are split into equally many parts."""
SplitChoice: TypeAlias = Mapping[SplitKind, int]


@dataclass(frozen=True)
class SplitTrial:
    """A step with some splits, to be planned on trial within a budget."""

    graph: TrainingGraph
    """The planning problem of one step."""
    kept_peak: Callable[[], int]
    """A function that returns the peak without recomputation, in bytes."""
    overhead: Callable[[], float]
    """A function that returns the overhead of the plan that a short search finds, a share of the time without
    recomputation; `InfeasibleBudget` if it finds none."""


@dataclass(frozen=True)
class SplitTrials:
    """Makes trials of splits for one budget."""

    amount: int | None
    """The budget in bytes; None if the smallest peak is wanted."""
    of: Callable[[CapturedStep], SplitTrial]
    """A function that makes the trial of a step with splits."""


@dataclass(frozen=True)
class RewrittenStep:
    """A step in which regions are split or fused, and sentences for the user that say which."""

    step: CapturedStep
    notes: tuple[str, ...] = ()


def split_as_asked(
    problems: StepProblems, step: CapturedStep, trials: SplitTrials | None = None, needed: bool = True
) -> RewrittenStep:
    """Return the step split as the options say. ``trials`` choose the splits if the options leave them open (``auto``).
    A named module in which nothing can be split is a `UsageError` if ``needed``, else left whole, as with a batch of
    one row."""
    asked = problems.options.split
    if asked == UNSPLIT:
        return RewrittenStep(step)
    regions = splittable(step, find_regions(step))
    if asked == AUTO_SPLIT:
        assert trials is not None
        chooser = _Chooser(problems, step, trials)
        return _noted(problems, step, _chosen(chooser, kinds_of(step, regions)), chooser)
    assert isinstance(asked, tuple)
    parts: dict[SplitKind, int] = {}
    for name, k in asked:
        # A model that was loaded from a file has its name in front of its modules' names.
        inside = [r for one in (name, MODEL + name) for r in regions if r.is_in(one)]
        if needed and not inside:
            raise UsageError(_about_whole(step, name, regions))
        parts |= {(r,): k for r in inside}
    return _noted(problems, step, parts)


def _about_whole(step: CapturedStep, module: str, regions: Sequence[SplitRegion]) -> str:
    """Return why nothing in a module can be split, and what can be."""
    known = ", ".join(dict.fromkeys(r.name for r in regions)) or "nothing"
    text = f"split: no ops of {module!r} can be split in {step.name}; what can be split is in {known}"
    made = {s for c in step.calls if c.module in (module, MODEL + module) for s in step.writes(c)}
    returned = not made.isdisjoint(step.returned("output"))
    return f"{text}; the model returns what {module!r} computes, so that exists whole" if returned else text


def split_as_planned(problems: StepProblems, step: CapturedStep, ops: Collection[str]) -> RewrittenStep:
    """Return a step with the splits for which a plan was made. ``ops``: the names of the plan's ops, which end in the
    numbers of parts."""
    last: dict[str, int] = {}
    for op in ops:
        if (part := part_of(op)) is not None:
            name = op.partition(".")[0]
            last[name] = max(part, last.get(name, 0))
    choice: dict[SplitKind, int] = {}
    for kind in kinds_of(step, splittable(step, find_regions(step))) if last else ():
        for region in kind:
            k = 1 + max(last.get(name, 0) for name in region.calls)
            same = next((one for one in choice if choice[one] == k and one[0] in kind), ())
            choice.pop(same, None)
            choice |= {(*same, region): k} if k > 1 else {}
    return _noted(problems, step, choice)


def kinds_of(step: CapturedStep, regions: Sequence[SplitRegion]) -> tuple[SplitKind, ...]:
    """Return the regions in groups of equal ops and sizes; what saves most first."""
    found: dict[object, list[SplitRegion]] = {}
    for region in regions:
        ops = tuple(str(step.call[name].target) for name in region.calls)
        found.setdefault((ops, region.indices, region.saved), []).append(region)
    return tuple(sorted(map(tuple, found.values()), key=_saved, reverse=True))


def _saved(kind: SplitKind) -> int:
    return sum(r.saved for r in kind)


def _split(problems: StepProblems, step: CapturedStep, choice: SplitChoice) -> CapturedStep:
    step = split_regions(step, {r: k for kind, k in choice.items() for r in kind})
    return with_sums_in_place(step) if choice and problems.in_place else step


def _noted(
    problems: StepProblems, step: CapturedStep, choice: SplitChoice, chooser: _Chooser | None = None
) -> RewrittenStep:
    """Return the step split by ``choice``, with a note; unchanged and without one if ``choice`` is empty. ``chooser``:
    knows the times, for the note, of the step with each kind split alone; None for a note without times."""
    if not choice:
        return RewrittenStep(step)
    texts = []
    for kind, k in choice.items():
        parts = len(bounds_of(kind[0], k)) - 1
        name = kind[0].name + (f" and {len(kind) - 1} more like it" if len(kind) > 1 else "")
        time = f", {chooser.time({kind: k}):.3f} of the step's time" if chooser else ""
        texts.append(
            f"{name} in {parts} parts ({show_bytes(_saved(kind))} of tensors exist in parts only{time})"
        )
    use, regions = StepUse(step), [r for kind in choice for r in kind]
    sums = "gradients of weights in them"
    if any(SUM in map(r.states.get, r.losses) for r in regions):
        sums = f"losses that are no cross entropies, and {sums},"
    why = f"{sums} are sums over parts, so they differ from the unsplit ones by rounding"
    if any(scales_gradients(use, r) for r in regions):
        why += "; so do all gradients if the loss is scaled by a factor that is no power of two"
    why += f"; {_about_rows(problems, step, choice)}"
    return RewrittenStep(_split(problems, step, choice), (f"{step.name}: split {'; '.join(texts)}; {why}",))


def _about_rows(problems: StepProblems, step: CapturedStep, choice: SplitChoice) -> str:
    """Return text on whether rows have the same bits in parts: tested here if costs are measured here, else assumed for
    parts of `ROWS` rows or more."""
    if problems.options.costs != PROFILE:
        lengths = [b - a for kind, k in choice.items() for a, b in pairwise(bounds_of(kind[0], k))]
        short = f"; parts of fewer than {ROWS} may round otherwise" if min(lengths) < ROWS else ""
        return (
            f"rows are taken to have the same bits in parts of {ROWS} rows or more, which is tested only with "
            f"costs={PROFILE!r}{short}"
        )
    if not (changed := _changed(problems, step, choice)):
        return "the rows of all ops in them were tested here, and have the same bits in parts"
    ops = ", ".join(dict.fromkeys(str(step.call[name].target) for name in changed))
    return f"so does all that depends on {len(changed)} of the ops, whose rows have other bits in parts here: {ops}"


def _changed(problems: StepProblems, step: CapturedStep, choice: SplitChoice) -> tuple[str, ...]:
    """Return the ops whose rows have other bits in parts; none if costs are not measured here."""
    if problems.options.costs != PROFILE:
        return ()
    parts = {r: k for kind, k in choice.items() for r in kind}
    return changed_rows(step, split_regions(step, parts), parts)


def _chosen(chooser: _Chooser, kinds: Sequence[SplitKind]) -> SplitChoice:
    """Return the splits of the plan with the least predicted time within the budget, or, if none can fit, with the
    smallest peak; none if the budget needs no recomputation. Of about equal ones, those whose rows keep their bits come
    first, then the fewest parts: each part reads the weights again."""
    amount = chooser.trials.amount
    if amount is not None and chooser.trial({}).kept_peak() <= amount:
        return {}
    least: SplitChoice = {}
    first: SplitChoice | None = None
    for least in _splits_of_what_binds(chooser, kinds):
        if (
            first is None
            and amount is not None
            and min_peak_bound(chooser.trial(least).graph).bytes <= amount
        ):
            first = least
    tried = sorted(_candidates(kinds, least if first is None else first, least), key=_parts)
    cheapest = min(chooser.trial(choice).graph.base_cost for choice in tried)
    within = first is not None
    outcomes = [chooser.outcome(choice, cheapest, within) for choice in tried]
    # (False, 1.04): a plan takes 1.04 times the step's time; (True, bytes): none fits, which is worse than any time.
    unfit, best = min(outcomes)
    alike = ALIKE if chooser.problems.options.costs == PROFILE else ALIKE_MODELLED
    alike = alike if within and not unfit else 0.0
    equal = [choice for choice, one in zip(tried, outcomes, strict=True) if one <= (unfit, best + alike)]
    kept = (choice for choice in equal if not _changed(chooser.problems, chooser.step, choice))
    return next(kept, equal[0])


def _parts(choice: SplitChoice) -> int:
    return sum(k * len(kind) for kind, k in choice.items())


def _candidates(kinds: Sequence[SplitKind], first: SplitChoice, least: SplitChoice) -> Iterator[SplitChoice]:
    """Yield choices of splits to try: ``first``, the first that may fit, those in which more is split, and ``least``,
    the one of the least bound."""
    large = [kind for kind in kinds if _saved(kind) >= LARGE * sum(map(_saved, kinds))]
    yield first
    found = [first]
    for more in (large[:1], large):
        for k in PARTS[1:]:
            choice = {**first, **{kind: max(k, first.get(kind, 0)) for kind in more}}
            if choice not in found:
                found.append(choice)
                yield choice
    if least not in found:
        yield least


def _splits_of_what_binds(chooser: _Chooser, kinds: Sequence[SplitKind]) -> Iterator[SplitChoice]:
    """Yield choices of splits, from none: in each next one, the ops that bind the smallest peak have more parts."""
    choice: dict[SplitKind, int] = {}
    while True:
        yield dict(choice)
        bound = (min_peak_bound(chooser.trial(choice).graph).op or "").partition(".")[0]
        kind = next((one for one in kinds if any(bound in r.calls for r in one)), None)
        left = [k for k in PARTS if kind is not None and k > choice.get(kind, 1)]
        if kind is None or not left:
            return
        choice[kind] = left[0]


def trials_of_step(problems: StepProblems, budget: Budget) -> SplitTrials:
    """Return trials of splits within ``budget`` for a step of which one call runs at a time."""
    amount, auto = budget.fixed, strategy_of_trials(problems.options)

    def trial(step: CapturedStep) -> SplitTrial:
        graph = problems.inverting_problem(step)

        def overhead() -> float:
            assert amount is not None
            return plan_within(auto, graph, amount).estimate.overhead

        return SplitTrial(graph, lambda: no_recompute(graph).peak, overhead)

    return SplitTrials(amount, trial)


def strategy_of_trials(asked: PlanOptions) -> Auto:
    """Return the strategy that plans a step with splits on trial."""
    auto = asked.strategy if isinstance(asked.strategy, Auto) else Auto()
    return replace(auto, time_limit=TRIAL * asked.time_limit)


class _Chooser:
    """Makes trials of a step with different splits, each once, and compares them."""

    def __init__(self, problems: StepProblems, step: CapturedStep, trials: SplitTrials) -> None:
        self.problems, self.step, self.trials = problems, step, trials
        self._made: dict[frozenset[tuple[SplitKind, int]], SplitTrial] = {}

    def trial(self, choice: SplitChoice) -> SplitTrial:
        """Return the trial of the step with these splits."""
        key = frozenset(choice.items())
        if key not in self._made:
            self._made[key] = self.trials.of(_split(self.problems, self.step, choice))
        return self._made[key]

    def time(self, choice: SplitChoice) -> float:
        """Return the time of the step with these splits ÷ that without splits, both without recomputation."""
        whole = self.trial({}).graph.base_cost
        return self.trial(choice).graph.base_cost / whole if whole else 1.0

    def outcome(self, choice: SplitChoice, cheapest: float, within: bool) -> tuple[bool, float]:
        """Return a pair to be minimised: (False, relative time) of a plan that fits; (True, smallest peak) if none is
        found; (False, smallest peak) unless ``within``. ``cheapest``: the least cost of a step with splits, without
        recomputation. ``within``: False if no plan can fit, or the smallest peak is wanted."""
        if not within:
            return False, self.smallest_peak(choice)
        trial = self.trial(choice)
        try:
            time = 1 + trial.overhead()
            noise = NOISE if self.problems.options.costs == PROFILE else 1.0
            return False, time * max(1.0, trial.graph.base_cost / (noise * cheapest) if cheapest else 1.0)
        except InfeasibleBudget as error:
            return True, error.smallest

    def smallest_peak(self, choice: SplitChoice) -> int:
        """Return the smallest peak found with these splits, in bytes."""
        auto, graph = strategy_of_trials(self.problems.options), self.trial(choice).graph
        seconds = min(auto.time_limit, TRIAL_PER_OP * len(graph.ops))
        effort = Effort(seconds, auto.counted or MOVES_PER_OP * len(graph.ops))
        # Block plans alone to start from: the search back in time would take most of a trial.
        blocks = leanest_plans(graph, effort)
        return find_smallest_peak(graph, effort, rules=rules_of(auto), blocks=blocks).peak


def about_splits(problems: StepProblems, step: CapturedStep, error: InfeasibleBudget) -> InfeasibleBudget:
    """Return ``error``, that no plan fits, with what is known of splits. Its floor becomes that of any splits
    (``auto``) or is said to be that of the stated ones. If none were asked for, a hint says how small a peak splits
    reach, if smaller. If finding this out fails, ``error`` is returned unchanged."""
    asked = problems.options.split
    if isinstance(asked, tuple):
        return replace(error, floor=f"{error.floor}, with the stated splits")
    try:
        if asked == AUTO_SPLIT:
            return _with_any_splits(problems, step, error)
        text = _reached_by_splits(problems, step, error.smallest)
    except RematplanError:  # it must not take the place of the refusal
        return error
    return replace(error, hint="; ".join(part for part in (error.hint, text) if part))


def _with_any_splits(problems: StepProblems, step: CapturedStep, error: InfeasibleBudget) -> InfeasibleBudget:
    """Return the refusal ``error`` of chosen splits with the floor of any splits. The refusal is called proven if the
    budget is below that floor, and only then."""
    floor = split_floor(step, problems.inverting_problem(step), splittable(step, find_regions(step)))
    if error.budget < floor.bytes:
        return replace(error, known="proven", floor=floor_text(floor))
    return replace(
        error, known="searched" if error.known == "proven" else error.known, floor=floor_text(floor)
    )


def _reached_by_splits(problems: StepProblems, step: CapturedStep, smallest: int) -> str:
    """Return text that states the peak of a short search with split regions, and the bound of all splits; empty if the
    op that binds the peak cannot be split, or if the peak is not below ``smallest``."""
    chooser = _Chooser(problems, step, trials_of_step(problems, parse_budget("least")))
    whole = chooser.trial({}).graph
    bound = min_peak_bound(whole).op
    if bound not in step.call or rule_of(step, step.call[bound]) is None:
        return ""  # to find regions takes longer
    regions = find_regions(step)
    if not any(bound in region.calls for region in regions):
        return ""
    regions = splittable(step, regions)
    *_, least = _splits_of_what_binds(chooser, kinds_of(step, regions))
    peak = chooser.smallest_peak(least) if least else smallest
    if peak >= smallest:
        return ""
    floor = split_floor(step, whole, regions).bytes
    return f"with split=auto: {show_bytes(peak)} ({peak} bytes), and no splits need less than {show_bytes(floor)}"
