"""Statistics of eager modules, computed by identity functions around layers, independently of captured steps."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rematplan.runtime.statistics.factors import Factors, Statistics


class HookSource:
    """Sums of all `nn.Linear` and `nn.Conv2d` of a model, each backward added until `statistics` is called.

    The loss is a mean over samples, of which ``samples`` are in each batch; G is in the scale of their sum.
    """

    def __init__(self, model: nn.Module, skip: tuple[str, ...] = ()) -> None:
        self.kinds = {
            name: m
            for name, m in model.named_modules()
            if isinstance(m, (nn.Linear, nn.Conv2d)) and f"{name}.weight" not in skip
        }
        self.sums: dict[str, list[Tensor | None]] = {}
        self.rows: dict[str, int] = {}
        self.samples, self.steps = 0, 0
        self.taken = False
        for name, module in self.kinds.items():
            module.register_forward_hook(self.hook(name))

    def layers(self) -> dict[str, Factors]:
        found = {}
        for name, m in self.kinds.items():
            a = m.weight[0].numel() + (m.bias is not None)
            groups = getattr(m, "groups", 1)
            g = m.weight.shape[0] // groups
            lead = (groups,) if groups > 1 else ()
            kind = {"dtype": m.weight.dtype, "device": "meta"}
            found[f"{name}.weight"] = self.factors(
                name, torch.empty(*lead, a, a, **kind), torch.empty(*lead, g, g, **kind), 0
            )
        return found

    def factors(self, name: str, a: Tensor, g: Tensor, rows: int) -> Factors:
        m = self.kinds[name]
        bias = m.bias is not None
        shape = tuple(m.weight.shape)
        return Factors(
            a, g, rows, self.samples, bias, f"{name}.bias" if bias else None, getattr(m, "groups", 1), shape,
            tuple(range(len(shape))),
        )  # fmt: skip

    def hook(self, name: str):
        def forward(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
            if not out.requires_grad or not module.training:
                return
            if self.taken:
                self.sums, self.rows, self.samples, self.taken = {}, {}, 0, False
                self.steps += 1
            x = rows_of(module, args[0].detach())
            n = len(args[0])
            if name == next(iter(self.kinds)):
                self.samples += n
            out.register_hook(lambda g: self.add(name, x, outputs_of(module, g * n)))

        return forward

    def add(self, name: str, x: Tensor, g: Tensor) -> None:
        a, g = x.mT @ x, g.mT @ g
        if self.kinds[name].weight.dim() == 2 or self.kinds[name].groups == 1:
            a, g = a[0], g[0]
        held = self.sums.get(name)
        self.sums[name] = [a, g] if held is None else [held[0] + a, held[1] + g]
        self.rows[name] = self.rows.get(name, 0) + x.shape[1]

    def statistics(self) -> Statistics | None:
        if not self.sums:
            return None
        self.taken = True
        factors = {f"{n}.weight": self.factors(n, a, g, self.rows[n]) for n, (a, g) in self.sums.items()}
        skipped = {f"{n}.weight": "its output was not used" for n in self.kinds if n not in self.sums}
        return Statistics(factors, skipped, self.steps)

    def state(self) -> None:
        return None

    def load(self, state: None) -> None:
        pass


def rows_of(module: nn.Module, x: Tensor) -> Tensor:
    """Inputs as rows, (groups, rows, columns), a one at the end for a bias."""
    if isinstance(module, nn.Linear):
        rows = x.reshape(1, -1, x.shape[-1])
    else:
        patches = nn.functional.unfold(x, module.kernel_size, module.dilation, module.padding, module.stride)
        rows = patches.unflatten(1, (module.groups, -1)).permute(1, 0, 3, 2).flatten(1, 2)
    return rows if module.bias is None else torch.cat((rows, torch.ones_like(rows[..., :1])), -1)


def outputs_of(module: nn.Module, g: Tensor) -> Tensor:
    """Gradients of outputs as rows, (groups, rows, columns)."""
    if isinstance(module, nn.Linear):
        return g.reshape(1, -1, g.shape[-1])
    return g.flatten(2).unflatten(1, (module.groups, -1)).permute(1, 0, 3, 2).flatten(1, 2)
