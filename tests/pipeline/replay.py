"""An independent count of the bytes that a rank holds, without code of the planner."""

from rematplan.planner.pipeline.actions import Action, StagePlan


def replayed(actions: tuple[Action, ...], plans: dict[int, StagePlan]) -> list[int]:
    """The most bytes before the first action, before and during each action, after the last one, at the step's end."""
    ledger: dict[tuple[object, ...], int] = {}
    for s, p in plans.items():
        ledger["states", s], ledger["torch", s] = p.states, p.torch_bytes

    def through(entries: tuple[tuple[str, int, int], ...]) -> int:
        before = [sum(ledger.values())]
        for kind, s, m in entries:
            if kind == "RECV_F":
                ledger["waits", "F", s, m] = plans[s].received
            elif kind == "FORGET_B":
                ledger.pop(("waits", "B", s, m), None)
            elif kind in ("RECV_B", "KEEP_B"):
                ledger["waits", "B", s, m] = plans[s].answered
            elif kind in ("DROP_F", "DROP_B"):
                ledger.pop(("output" if kind == "DROP_F" else "gradient", s, m), None)
            before.append(sum(ledger.values()))
        return max(before)

    def ahead(later: tuple[Action, ...]) -> None:
        for s, p in plans.items():
            kinds = [a.kind for a in later if a.stage == s]
            ledger["ahead", "F", s] = p.received * min(p.credits, kinds.count("F"))
            ledger["ahead", "B", s] = p.answered * min(p.credits, kinds.count("B") + kinds.count("I"))

    ahead(())
    series = [sum(ledger.values()) + max(p.opening for p in plans.values())]
    ahead(actions)
    for at, a in enumerate(actions):
        p, mine = plans[a.stage], (a.stage, a.microbatch)
        before = through(a.messages)
        ahead(actions[at + 1 :])
        ledger.pop(("waits", "F" if a.kind == "F" else "B", *mine) if a.kind != "W" else (), None)
        first_i, first_w = (("gradients", part, a.stage) not in ledger for part in "IW")
        back = p.first_backward if first_i and p.first_backward is not None else p.transient_backward
        weight = p.first_weight if first_w and p.first_weight is not None else p.transient_weight
        running = {
            "F": p.transient_forward,
            "I": back,
            "B": max(back, weight + p.whole + first_i * p.early_gradients),
            "W": weight,
        }[a.kind]
        others = sum(
            size for key, size in ledger.items() if key not in {("kept", *mine), ("deferred", *mine)}
        )
        series += [before, others + running]
        if a.kind == "F":
            ledger["kept", *mine] = p.kept_bytes
            if a.stage + 1 in plans:  # gets the output itself
                ledger["waits", "F", a.stage + 1, a.microbatch] = plans[a.stage + 1].received
            else:
                ledger["output", *mine] = p.loose
        else:
            ledger.pop(("kept", *mine), None)
            if a.kind == "I":
                ledger["deferred", *mine] = p.deferred_bytes
            else:
                ledger.pop(("deferred", *mine), None)
                if ("waits", "F", *mine) in ledger:
                    ledger["waits", "F", *mine] = p.received
                ledger["gradients", "W", a.stage] = p.gradients - p.early_gradients
            if a.kind != "W":
                ledger["gradients", "I", a.stage] = p.early_gradients
                ledger["left", *mine] = p.left
                ledger.pop(("waits", "F", a.stage + 1, a.microbatch), None)
                if ("output", *mine) in ledger:
                    ledger["output", *mine] = p.sent
                if a.stage - 1 in plans:
                    ledger["waits", "B", a.stage - 1, a.microbatch] = plans[a.stage - 1].answered
                    ledger["waits", "F", *mine] = max(
                        0, p.received - (p.deferred_input if a.kind == "I" else 0)
                    )
                else:
                    ledger["gradient", *mine] = p.returned
    before = through(actions[-1].after)
    divided = sum(ledger.values()) + max(p.ending for p in plans.values())
    after = sum(size for key, size in ledger.items() if key[0] not in ("waits", "output", "gradient"))
    return [*series, before, max(divided, after + sum(p.closing for p in plans.values()))]
