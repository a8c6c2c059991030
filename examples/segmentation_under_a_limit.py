"""Segmentation at high resolution under a memory limit: eager mode fails, the planned step trains.

The limit is set by the operating system (`RLIMIT_AS`, the size of the process's address space) after planning. The
plain U-Net fails in its first step; the planned one, with the same weights, trains for several steps.
"""

import ctypes
import gc
import resource

import torch
from torch import nn

import rematplan
from rematplan.models import build

SIDE = 192
"""The side of the image in pixels."""
LIMIT = 0.75
"""The memory that the process may take in addition, as a share of the step's peak without recomputation."""


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, images: torch.Tensor, masks: torch.Tensor
) -> float:
    """Make one step of the optimizer on the cross entropy for ``images`` and ``masks``, and return the loss."""
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(images), masks)
    loss.backward()
    optimizer.step()
    return loss.item()


def bytes_of_process() -> int:
    """Return the size of this process's address space in bytes."""
    with open("/proc/self/statm") as pages:
        return int(pages.read().split()[0]) * resource.getpagesize()


c_library = ctypes.CDLL(None)
# M_MMAP_THRESHOLD: a tensor's memory is returned to the system as soon as it is freed.
c_library.mallopt(-3, 2**18)

torch.manual_seed(0)
torch.set_num_threads(1)  # each further thread has a stack in the address space
images, masks = torch.randn(2, 3, SIDE, SIDE), torch.randint(2, (2, SIDE, SIDE))
model = build("unet", width=16)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

free = rematplan.plan_module(model, (images,), budget="100%", strategy="store_all")
planned = rematplan.plan_module(model, (images,), budget="55%", strategy="approx_dp")
print(
    f"without recomputation the step holds {free.plan.peak / 2**20:.0f} MiB, "
    f"as planned {planned.plan.peak / 2**20:.0f} MiB"
)

gc.collect()
c_library.malloc_trim(0)  # return memory that planning has freed to the system
limit = bytes_of_process() + int(LIMIT * free.plan.peak)
resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
try:
    train_step(model, optimizer, images, masks)
except (MemoryError, RuntimeError) as error:
    print("eager mode:", str(error).strip().splitlines()[0])
else:
    raise SystemExit("eager mode fitted: the limit is too generous for this example")
optimizer.zero_grad()

for step in range(3):
    print(f"planned, step {step}: loss {train_step(planned, optimizer, images, masks):.4f}")
