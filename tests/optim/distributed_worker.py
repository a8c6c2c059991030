"""One of several processes of `test_distributed_kfac`: trains a model in parallel and compares with one process.

usage: distributed_worker.py RANK SIZE RENDEZVOUS_FILE CHECK...
"""

import copy
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from hook_source import HookSource
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import rematplan
from rematplan.ir import UsageError
from rematplan.optim.checkpoint import merged
from rematplan.optim.distributed import Ranks
from rematplan.optim.kfac import KFAC
from rematplan.optim.step_memory import sums_bytes
from rematplan.optim.update import MOMENTUM
from rematplan.runtime.costs.measure import peak_above_entry
from rematplan.runtime.statistics.packing import packed_size

STEPS = 6
BATCH = 24
OPTIONS = {"inverse_every": 4, "early_steps": 3, "weight_decay": 0.01, "others": torch.optim.AdamW}


def network() -> nn.Module:
    """Convolutions, a norm without factors, linear layers, one whose factors have two owners; nothing that sees the
    whole batch.
    """
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.Tanh(),
        nn.Conv2d(4, 6, 3, groups=2, bias=False),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(54, 48),
        nn.Tanh(),
        nn.Linear(48, 5),
    ).double()


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, 2, 5, 5, generator=generator, dtype=torch.float64)
    return x, torch.randint(5, (BATCH,), generator=generator)


def equal_share(rank: int, size: int) -> slice:
    return slice(rank * BATCH // size, (rank + 1) * BATCH // size)


def unequal_share(rank: int, size: int) -> slice:
    """The last process has what the others leave: most of the batch."""
    return slice(rank * 3, BATCH if rank == size - 1 else (rank + 1) * 3)


def step(model: nn.Module, kfac: KFAC, at: int, share: slice, **more: float) -> None:
    kfac.zero_grad()
    x, y = (t[share] for t in batch(at))
    nn.functional.cross_entropy(model(x), y).backward()
    kfac.step(**more)


def alone(steps: int = STEPS) -> nn.Module:
    model = network()
    kfac = KFAC(model, 0.05, source=HookSource(model), **OPTIONS)
    for at in range(steps):
        step(model, kfac, at, slice(None))
    return model


def same(model: nn.Module, other: nn.Module, how: str) -> None:
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        found = p.full_tensor() if hasattr(p, "full_tensor") else p
        torch.testing.assert_close(found, q, rtol=1e-7, atol=1e-9)
    if distributed.get_rank() == 0:
        print(f"{how}: equal", flush=True)


def reduced_here(
    share: Callable[[int, int], slice], grad_workers: int, inverse: str = "auto"
) -> tuple[nn.Module, KFAC]:
    rank, size = distributed.get_rank(), distributed.get_world_size()
    model = network()
    exchange = Ranks(grad_workers=grad_workers)
    kfac = KFAC(model, 0.05, source=HookSource(model), exchange=exchange, **OPTIONS | {"inverse": inverse})
    part = share(rank, size)
    for at in range(STEPS):
        step(model, kfac, at, part, rows=part.stop - part.start)
    return model, kfac


def own_reduction(whole: nn.Module) -> None:
    model, kfac = reduced_here(equal_share, 1)
    same(model, whole, "own_reduction")
    assert_owners_hold_all_factors_once(kfac)


def assert_owners_hold_all_factors_once(kfac: KFAC) -> None:
    sides = {(n, at): side for n, layer in kfac.layers.items() for at, side in enumerate(layer.sides)}
    averages = everybodys([key for key, side in sides.items() if side.total is not None])
    assert sorted(averages) == sorted(sides)
    inverses = everybodys([n for n, layer in kfac.layers.items() if layer.inverted])
    assert sorted(inverses) == sorted(kfac.layers)
    resident = sum(nbytes(t) for s in sides.values() for t in (s.total, s.inverse and s.inverse.matrix))
    momentum = sum(state[MOMENTUM].nbytes for state in kfac.state.values())
    others = sum(t.nbytes for s in kfac._others.state.values() for t in s.values())
    sent = (kfac.layers[name].no_sums(which=which).nbytes for name, which in kfac._exchange.parts())
    one = max(map(sums_bytes, kfac.layers.values()))
    early = sum(sent) + one if kfac._exchange.early else 0
    assert kfac.reserved_bytes() == resident + momentum + others + early


def nbytes(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.nbytes


def everybodys(mine: list[object]) -> list[object]:
    """The items of all processes."""
    found: list[list[object]] = [[]] * distributed.get_world_size()
    distributed.all_gather_object(found, mine)
    return [item for items in found for item in items]


def unequal(whole: nn.Module) -> None:
    same(reduced_here(unequal_share, 1)[0], whole, "unequal")


def two_workers(whole: nn.Module) -> None:
    same(reduced_here(unequal_share, 2)[0], whole, "two_workers")


def all_workers(whole: nn.Module) -> None:
    model, _ = reduced_here(equal_share, distributed.get_world_size())
    same(model, whole, "all_workers")


def planned(whole: nn.Module) -> None:
    """Statistics of a planned module, wrapped or not, in place of hooks."""
    rank, size = distributed.get_rank(), distributed.get_world_size()
    x = batch(0)[0][equal_share(rank, size)]
    for wrap in (lambda m: m, DistributedDataParallel):
        model = rematplan.plan_module(
            network(),
            (x,),
            budget="1GiB",
            strategy="store_all",
            costs="roofline",
            statistics=rematplan.Kronecker(fisher="empirical"),
        )
        wrapped = wrap(model)
        kfac = KFAC(wrapped, 0.05, exchange=Ranks(reduce_gradients=wrapped is model), **OPTIONS)
        for at in range(STEPS):
            step(wrapped, kfac, at, equal_share(rank, size))
        for p, q in zip(model.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-7, atol=1e-9)
    same(model, whole, "planned")


def early(whole: nn.Module) -> None:
    """Statistics that leave during the backward, of two micro-batches, wrapped or not, beside gradients of DDP."""
    rank, size = distributed.get_rank(), distributed.get_world_size()
    share = equal_share(rank, size)
    x = batch(0)[0][share]
    for wrap in (lambda m: m, DistributedDataParallel):
        model = rematplan.plan_module(
            network(),
            (x[: len(x) // 2],),
            budget="1GiB",
            strategy="store_all",
            costs="roofline",
            statistics=rematplan.Kronecker(fisher="empirical"),
        )
        wrapped = wrap(model)
        exchange = Ranks(reduce_gradients=wrapped is model, early=True)
        kfac = KFAC(wrapped, 0.05, exchange=exchange, loss_scale=1 / 2, **OPTIONS)
        for at in range(STEPS):
            if at == STEPS // 2:  # a backward that leads to no update
                nn.functional.cross_entropy(wrapped(x[: len(x) // 2]), batch(at)[1][: len(x) // 2]).backward()
            kfac.zero_grad()
            images, labels = (t[share].chunk(2) for t in batch(at))
            for image, label in zip(images, labels, strict=True):
                (nn.functional.cross_entropy(wrapped(image), label) / 2).backward()
            kfac.step()
        for p, q in zip(model.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-7, atol=1e-9)
    assert_owners_hold_all_factors_once(kfac)
    leave_during_the_backward()
    same(model, whole, "early")


def leave_during_the_backward() -> None:
    """The last layer's statistics are on their way before the first layer has its gradient."""
    torch.manual_seed(0)
    wide = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4))).double()
    x = torch.randn(4, 512, dtype=torch.float64)
    options = {"budget": "1GiB", "strategy": "store_all", "costs": "roofline"}
    statistics = rematplan.Kronecker(fisher="empirical")
    model = rematplan.plan_module(wide, (x,), statistics=statistics, **options)
    optimizer = KFAC(model, 0.05, exchange=Ranks(early=True), **OPTIONS)
    events: list[str] = []
    real = distributed.reduce
    distributed.reduce = lambda *args, **kwargs: events.append("sent") or real(*args, **kwargs)
    model[0].weight.register_post_accumulate_grad_hook(lambda _: events.append("first layer"))
    model(x).square().mean().backward()
    distributed.reduce = real
    assert optimizer.reserved_bytes()  # the module does not keep its listener alive
    assert events.count("sent") == 4, events
    assert events.index("sent") < events.index("first layer"), events


def data_parallel(whole: nn.Module) -> None:
    model = network()
    kfac = KFAC(model, 0.05, source=HookSource(model), exchange=Ranks(reduce_gradients=False), **OPTIONS)
    wrapped = DistributedDataParallel(model)
    for at in range(STEPS):
        step(wrapped, kfac, at, equal_share(distributed.get_rank(), distributed.get_world_size()))
    same(model, whole, "data_parallel")


def sharded(whole: nn.Module) -> None:
    model = network()
    source = HookSource(model)
    model = fully_shard(model)
    kfac = KFAC(model, 0.05, source=source, exchange=Ranks(reduce_gradients=False), **OPTIONS)
    for at in range(STEPS):
        step(model, kfac, at, equal_share(distributed.get_rank(), distributed.get_world_size()))
    same(model, whole, "sharded")


def planned_and_sharded(whole: nn.Module) -> None:
    """A planned module under FSDP2, whose parameters during a forward are not those that the optimizer moves; once with
    one batch a step, once with two micro-batches.
    """
    share = equal_share(distributed.get_rank(), distributed.get_world_size())
    for parts in (1, 2):
        x = batch(0)[0][share].chunk(parts)[0]
        statistics = rematplan.Kronecker(fisher="empirical")
        settings = {"budget": "1GiB", "strategy": "store_all", "costs": "roofline"}
        model = fully_shard(rematplan.plan_module(network(), (x,), statistics=statistics, **settings))
        kfac = KFAC(model, 0.05, exchange=Ranks(reduce_gradients=False), loss_scale=1 / parts, **OPTIONS)
        for at in range(STEPS):
            kfac.zero_grad()
            for images, labels in zip(*(t[share].chunk(parts) for t in batch(at)), strict=True):
                (nn.functional.cross_entropy(model(images), labels) / parts).backward()
            kfac.step()
        for p, q in zip(model.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(p.full_tensor(), q, rtol=1e-7, atol=1e-9)
    same(model, whole, "planned_and_sharded")


def other_size(whole: nn.Module) -> None:
    """States of all processes, merged, continue a run on one process; that of each continues its own to the bit."""
    rank, size = distributed.get_rank(), distributed.get_world_size()
    model = network()
    kfac = KFAC(model, 0.05, source=HookSource(model), exchange=Ranks(), **OPTIONS)
    half, share = STEPS // 2, equal_share(rank, size)
    for at in range(half):
        step(model, kfac, at, share)
    states: list[dict[str, object]] = [{}] * size
    distributed.all_gather_object(states, kfac.state_dict())
    single, resumed = resumable(model)
    with pytest.raises(UsageError, match="merged"):
        resumed.load_state_dict(states[rank])
    resumed.load_state_dict(copy.deepcopy(merged(states)))
    own, again = resumable(model, exchange=Ranks())
    again.load_state_dict(copy.deepcopy(states[rank]))
    other, whole_state = resumable(model, exchange=Ranks())
    whole_state.load_state_dict(copy.deepcopy(merged(states)))
    twin = network()
    straight = KFAC(twin, 0.05, source=HookSource(twin), **OPTIONS)
    for at in range(half):
        step(twin, straight, at, slice(None))
    for at in range(half, half + 2):
        step(single, resumed, at, slice(None))
        step(twin, straight, at, slice(None))
        for part, its in ((model, kfac), (own, again), (other, whole_state)):
            step(part, its, at, share)
    assert all(map(torch.equal, own.parameters(), model.parameters()))
    for p, q in zip(other.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-7, atol=1e-9)
    assert_owners_hold_all_factors_once(whole_state)
    del whole
    same(single, twin, "other_size")


def resumable(model: nn.Module, **options: object) -> tuple[nn.Module, KFAC]:
    """A copy of a model, and an optimizer of it without any state."""
    found = copy.deepcopy(model)
    for module in found.modules():
        module._forward_hooks.clear()
    return found, KFAC(found, 0.05, source=HookSource(found), **OPTIONS, **options)


def counted(whole: nn.Module) -> None:
    """The bytes that a step communicates are those of SGD and of the packed factors."""
    rank, size = distributed.get_rank(), distributed.get_world_size()
    model = network()
    kfac = KFAC(model, 0.05, source=HookSource(model), exchange=Ranks(), **OPTIONS, factors_every=2)
    with counting() as sent:
        for at in range(2):
            step(model, kfac, at, equal_share(rank, size))
    matrices = sum(p.numel() for layer in kfac.layers.values() for p in layer.parameters)
    rest = sum(p.numel() for p in model.parameters()) - matrices
    sides = [side for layer in kfac.layers.values() for side in layer.sides]
    parts = kfac._exchange.parts()
    split = {name for name, which in parts if len(which) == 1}
    assert split == {"6.weight"}
    # Packed factors; the rows and samples of each part; and both traces, where a layer has two owners.
    factors = sum(k * packed_size(n) for n, k in ((s.size, *s.blocks, 1)[:2] for s in sides))
    factors += 2 * len(parts) + 2 * 2 * len(split)
    # A reduce-scatter and an all-gather of n numbers are an all-reduce of n numbers. Beyond it each owner gets the
    # sum of the weights, and gives its part of the product that clips updates.
    assert sent["reduce_scatter"] == 8 * (factors + 2 * (matrices + size))
    assert sent["broadcast"] == 8 * 2 * (matrices + size)
    assert sent["all_reduce"] == 8 * 2 * (rest + 1)
    # The smaller inverse of a divided layer goes to the owner of the larger one, in the first of these two steps.
    smaller = sum(min(side.size**2 for side in kfac.layers[name].sides) for name in split)
    assert sum(everybodys([sent.pop("send", 0)])) == 8 * smaller
    assert sent.pop("send_object_list", 0) == 0
    assert set(sent) == {"reduce_scatter", "broadcast", "all_reduce"}
    if rank == 0:
        print("counted: equal", flush=True)
    del whole


@contextmanager
def counting() -> Iterator[Counter[str]]:
    """Count the bytes that are handed to each collective."""
    sent: Counter[str] = Counter()
    real = {name: getattr(distributed, name) for name in dir(distributed) if name.startswith(KINDS)}

    def counts(name: str) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            given = args[1] if name == "reduce_scatter" else args[0]
            tensors = given if isinstance(given, list) else [given]
            sent[name] += sum(t.nbytes for t in tensors if isinstance(t, Tensor))
            return real[name](*args, **kwargs)

        return call

    for name in real:
        setattr(distributed, name, counts(name))
    try:
        yield sent
    finally:
        for name, function in real.items():
            setattr(distributed, name, function)


KINDS = (
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "gather",
    "isend",
    "reduce",
    "scatter",
    "send",
)


def bounded(whole: nn.Module) -> None:
    """A step allocates temporarily no more than it says."""
    del whole
    for workers in (1, distributed.get_world_size()):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(200, 300), nn.Tanh(), nn.Linear(300, 300), nn.LayerNorm(300))
        kfac = KFAC(model, 0.05, source=HookSource(model), exchange=Ranks(grad_workers=workers), **OPTIONS)
        for _ in range(2):
            kfac.zero_grad()
            model(torch.randn(4, 200)).square().mean().backward()
            peak, _ = peak_above_entry(kfac.step, torch.device("cpu"))
        assert peak <= kfac.step_bytes() < 4 * peak
    if distributed.get_rank() == 0:
        print("bounded: equal", flush=True)


def failing(whole: nn.Module) -> None:
    """The last process fails in the third step."""
    del whole
    rank, size = distributed.get_rank(), distributed.get_world_size()
    model = network()
    kfac = KFAC(model, 0.05, source=HookSource(model), exchange=Ranks(), **OPTIONS)
    for at in range(STEPS):
        if at == 2 and rank == size - 1:
            raise ValueError("the last process fails")
        step(model, kfac, at, equal_share(rank, size))


def main() -> None:
    """Make the named checks."""
    rank, size, rendezvous, *checks = sys.argv[1:]
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=int(rank), world_size=int(size)
    )
    whole = alone() if set(checks) - {"failing", "counted", "other_size", "bounded"} else network()
    for check in checks:
        globals()[check](whole)
    distributed.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # a thread of Gloo that frees a tensor while Python shuts down would abort the process


if __name__ == "__main__":
    main()
