"""The tensors and submodules of a module before a forward, and those that the forward adds or replaces."""

from __future__ import annotations

from typing import Any

from torch import nn

from rematplan.ir import ModelError
from rematplan.runtime.guards.places import Buffers
from rematplan.runtime.guards.repeated_writes import Write


class ModuleTensors:
    """The parameters, buffers and submodules of a model before a forward, which may add or replace buffers. The old
    tensor of a replaced buffer may be known elsewhere, so a planned call does not write into it."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = [object.__getattribute__(module, "__dict__") for module in model.modules()]
        self.names = [name for name, _ in model.named_modules()]
        self.before = [
            (dict(m["_buffers"]), tuple(m["_parameters"]), dict(m["_modules"])) for m in self.modules
        ]
        self.undone: list[tuple[dict[str, Any], str, Any]] = []

    def changes(self) -> list[tuple[Write, Any]]:
        """Return the buffers that the forward added or replaced, each with its tensor; `ModelError` for a new
        parameter and for another submodule."""
        found = []
        for at, (now, (buffers, parameters, modules)) in enumerate(
            zip(self.modules, self.before, strict=True)
        ):
            made = {
                "makes the parameter": [name for name in now["_parameters"] if name not in parameters],
                "makes or replaces the submodule": [
                    name for name, part in now["_modules"].items() if part is not modules.get(name)
                ],
            }
            for what, new in made.items():
                if new:
                    path = f"{self.names[at]}.{new[0]}".lstrip(".")
                    raise ModelError(f"the forward {what} {path}; call the model once before it is planned")
            for name, tensor in now["_buffers"].items():
                if _is_other(tensor, buffers.get(name)):
                    found.append((Write(Buffers(at), name, "set"), tensor))
        return found

    def restore(self) -> None:
        """Undo the changes of buffers that `changes` returns: delete those added, and keep the new tensors of those
        replaced for `redo`."""
        self.undone = []
        for now, (buffers, _, _) in zip(self.modules, self.before, strict=True):
            for name, tensor in list(now["_buffers"].items()):
                if name not in buffers:
                    del now["_buffers"][name]
                elif _is_other(tensor, buffers[name]):
                    self.undone.append((now["_buffers"], name, tensor))
                    now["_buffers"][name] = buffers[name]

    def redo(self) -> None:
        """Give the buffers that `restore` set back to their old tensors the new ones again. A backward may read
        them."""
        for buffers, name, tensor in self.undone:
            buffers[name] = tensor


def _is_other(tensor: Any, before: Any) -> bool:
    return tensor is not None and tensor is not before
