"""A table of all changes that rematplan makes in PyTorch, nearly all during a capture. Every new patch gets a row.

tests/runtime/capture/test_patches.py checks that what the rows name is the same before and after.
"""

from __future__ import annotations

from dataclasses import dataclass

from rematplan.runtime.capture.patches.eager_kernels import PREFIXES
from rematplan.runtime.capture.patches.size_arithmetic import OPERATIONS
from rematplan.runtime.graph.compat import (
    CHECKPOINT_GENERATOR,
    PUSH_SAVED_TENSORS_HOOKS,
    TORCH,
    triton_ops,
    tritons_calls_wrapped,
)
from rematplan.runtime.graph.host_generators import seeding_functions

_ROOM = "rematplan.runtime"
_OWN = "compares the thread: takes effect only in the one that captures, others get PyTorch's original"
_LOCAL = "PyTorch keeps it per thread"
_TRACING = (
    "affects all threads that trace while a capture runs (eager calls do not use it); the capture lock excludes only "
    "captures of other planned modules"
)
_ALL = "affects all threads while a capture runs"
_BLOCK = "when the block ends, also by an error"


@dataclass(frozen=True)
class Patch:
    """A change that capture makes in PyTorch while it runs."""

    what: tuple[str, ...]
    """The names in PyTorch that are changed; ``*`` matches any text."""
    why: str
    """What would go wrong without the change."""
    where: str
    """The module that makes the change."""
    versions: str = TORCH
    """The versions of PyTorch that need it."""
    threads: str = _OWN
    """Which threads the change affects."""
    undone: str = _BLOCK
    """When the change ends."""


PATCHES = (
    Patch(
        tuple(
            f"torch.ops.aten.{name}*.py_kernels"
            for name in (
                *("cudnn_batch_norm", "ctc_loss", "dropout", "matmul", "_pad_packed_sequence"),
                *PREFIXES,
            )
        ),
        "under tracing Python decompositions replace the kernels that eager mode runs, with other bits and memory",
        f"{_ROOM}.capture.patches.eager_kernels",
        threads=_TRACING,
    ),
    Patch(
        tuple(f"torch.ops.aten.{name}.py_kernels" for name in ("prod", "masked_fill", "cross_entropy_loss")),
        "eager mode chooses between formulas by values, and a tracer takes another formula",
        f"{_ROOM}.capture.patches.eager_formulas",
        threads=_TRACING,
    ),
    Patch(
        ("torch.nn.RNNBase.flatten_parameters",),
        "it reads the addresses of weights, which a tracer's tensors do not have",
        f"{_ROOM}.capture.patches.eager_kernels",
    ),
    Patch(
        ("torch.backends.cudnn.enabled",),
        "cuDNN's recurrent layers read the addresses of their weights; PyTorch's cells do not",
        f"{_ROOM}.capture.patches.eager_kernels",
        threads=f"{_ALL} a recurrent layer: other calls of cuDNN meanwhile get PyTorch's kernels",
        undone="when the layer is traced, also by an error",
    ),
    Patch(
        ("torch.utils.checkpoint.CheckpointFunction", f"torch.utils.checkpoint.{CHECKPOINT_GENERATOR}"),
        "a model's checkpoints would run ops twice in the graph; the plan decides what is recomputed",
        f"{_ROOM}.capture.patches.checkpoint",
    ),
    Patch(
        ("torch.autograd.Function.apply", "torch.no_grad"),
        "an audit runs a model without its own recomputation: the forward of a Function is differentiated by autograd",
        f"{_ROOM}.capture.patches.autograd_functions",
    ),
    Patch(
        (f"torch._C._autograd.{PUSH_SAVED_TENSORS_HOOKS}",),
        "a tracer drops hooks on saved tensors, which may change the gradients, so a forward that uses them is refused",
        f"{_ROOM}.capture.patches.saved_tensors",
    ),
    Patch(
        ("torch.set_autocast_enabled", "torch.clear_autocast_cache"),
        "autocast's cache does not know a tracer's tensors; our cache must see when autocast is switched and ends",
        f"{_ROOM}.capture.patches.autocast_cache",
    ),
    Patch(
        tuple(f"torch.{name}.__repr__" for name in ("SymInt", "SymFloat", "SymBool")),
        "a symbolic size has another text than the size, so a model that reads the text would be traced wrongly",
        f"{_ROOM}.capture.patches.size_text",
    ),
    Patch(
        tuple(f"torch.fx.experimental.sym_node.SymNode.{name}" for name in (*OPERATIONS, "wrap_int")),
        "PyTorch computes the same expressions of symbolic sizes again for each tensor: a third of a capture's time",
        f"{_ROOM}.capture.patches.size_arithmetic",
    ),
    Patch(
        ("sympy.core.expr.Expr.is_number",),
        "SymPy searches an expression of sizes for symbols whenever PyTorch asks whether it is a number",
        f"{_ROOM}.capture.patches.size_arithmetic",
        threads="affects all threads: each expression is searched once",
    ),
    Patch(
        ("torch.fx.experimental.proxy_tensor._extract_tensor_metadata",),
        "a tracer describes each tensor a second time, for passes that do not run here: a twentieth of a capture's "
        "time where sizes are symbols",
        f"{_ROOM}.capture.patches.trace_costs",
        threads=_TRACING,
    ),
    Patch(
        ("torch.fx._lazy_graph_module._use_lazy_graph_module_flag",),
        "PyTorch writes and compiles Python code for each traced graph, although a capture reads only the graph's "
        "nodes: 4 % of a capture's time",
        f"{_ROOM}.capture.patches.trace_costs",
        threads=_TRACING,
    ),
    Patch(
        ("torch._decomp.decompositions_for_rng.PhiloxState.reset",),
        "a trace makes twelve empty tensors for states of generators that it never uses: 4 % of the time that captures "
        "of small steps take",
        f"{_ROOM}.capture.patches.trace_costs",
        threads=_TRACING,
    ),
    Patch(
        ("garbage collector",),
        "the many objects of a trace make Python search all objects for cycles again and again: a twelfth of a "
        "capture's time",
        f"{_ROOM}.capture.patches.trace_costs",
        threads=f"{_ALL}: no thread collects cycles",
    ),
    Patch(
        ("torch._functorch._aot_autograd.schemas.MemoryFormatMeta.from_tensor",),
        "PyTorch assumes contiguous gradients of outputs where sizes are symbols, so the backward of an output that is "
        "not contiguous would make other calls",
        f"{_ROOM}.capture.patches.tangent_strides",
    ),
    Patch(
        ("isinstance in the model's Python modules", "len in the model's Python modules"),
        "a symbolic size is no int, so a branch by isinstance(size, int) would be traced wrongly, and len(tensor) "
        "makes it an int; Python modules of the model's packages, and those outside of installed packages, "
        "get global variables isinstance and len",
        f"{_ROOM}.capture.patches.size_types",
        threads="compares the thread: others get what the builtin answers",
    ),
    Patch(
        ("torch.ops.aten._to_copy.py_kernels",),
        "a weight that autocast casts for several uses would be cast for each, and its gradients added up in float32",
        f"{_ROOM}.capture.patches.autocast_cache",
        threads="compares the thread: takes effect only in the one that captures; others that trace get the same op",
    ),
    Patch(
        ("torch.Tensor.data", "torch.Tensor.grad"),
        "a tracer does not see what a forward assigns as the data of a tensor, and knows no gradients of parameters",
        f"{_ROOM}.capture.patches.tensor_data",
    ),
    Patch(
        ("torch.tensor", "torch.as_tensor"),
        "they read the memory of tensors in a list, which a tracer's tensors do not have",
        f"{_ROOM}.capture.patches.lists_of_tensors",
    ),
    Patch(
        ("torch.Tensor.__format__", "torch._subclasses.functional_tensor.FunctionalTensor.__repr__"),
        "a traced tensor has no numbers for a text, so what a forward does with its text must be recognised",
        f"{_ROOM}.guards.tensor_reads",
    ),
    Patch(
        ("torch.Tensor.tolist", "torch.Tensor.numpy", "torch.Tensor.item"),
        "the first two read a tensor's memory without a call that a tracer could see; a number that only leaves the "
        "forward is computed by the step",
        f"{_ROOM}.guards.tensor_reads",
    ),
    Patch(
        ("torch.nn.Module.__setattr__", "torch.nn.Module.__getattribute__"),
        "a plan depends on the attributes that a forward reads; the classes of records in modules' attributes are "
        "changed too, with their __getattr__",
        f"{_ROOM}.guards.attributes",
    ),
    Patch(
        tuple(f"{owner.__name__}.{name}" for owner, name in seeding_functions()),
        "a graph cannot seed the generator at each step, so a forward that does so is refused",
        f"{_ROOM}.capture.unrepeatable_draws",
    ),
    Patch(
        (
            "torch.nn.modules.module._global_forward_pre_hooks",
            "torch.nn.modules.module._global_forward_hooks",
        ),
        "each op is recorded with the innermost module that calls it",
        f"{_ROOM}.capture.joint_trace",
    ),
    Patch(
        ("torch.compiler._is_compiling_flag",),
        "many models that inspect values for a shortcut skip that while being compiled; set only for such models",
        f"{_ROOM}.capture.joint_trace",
        threads=f"{_ALL} such a model: every caller is told that it is being compiled",
    ),
    Patch(
        ("torch._inductor.config.fallback_random", "torch._functorch.config.backward_pass_autocast"),
        "random calls must stay even if nothing reads them, since later draws depend on them; a backward runs outside "
        "autocast's block",
        f"{_ROOM}.capture.joint_trace",
        threads=f"{_LOCAL}, as of 2.13",
    ),
    Patch(
        ("tracing context",),
        "the fakes of some ops have other strides than the kernels' results, or refuse arguments that the kernels take",
        f"{_ROOM}.capture.patches.fake_layouts",
        threads=_LOCAL,
    ),
    Patch(
        ("dispatch modes",),
        "tensors changed in place would have other strides than in eager mode",
        f"{_ROOM}.capture.patches.in_place_layouts",
        threads=_LOCAL,
    ),
    Patch(
        ("dispatch modes",),
        "a tracer turns a user's op that writes into its arguments into an operator that takes functions",
        f"{_ROOM}.capture.patches.recorded_writes",
        threads=_LOCAL,
    ),
    Patch(
        ("triton.runtime.jit.KernelInterface.__getitem__",),
        "Triton's kernels take addresses, which a tracer's tensors do not have; changed if Triton is imported",
        f"{_ROOM}.capture.patches.recorded_writes",
    ),
    Patch(
        (".".join((triton_ops.__name__, tritons_calls_wrapped[1])),),
        "torch.library.wrap_triton would record an operator that takes functions",
        f"{_ROOM}.capture.patches.recorded_writes",
        threads=_TRACING,
    ),
    Patch(
        ("importlib._bootstrap._find_and_load",),
        "a module is imported once, so what it adds to a registry must stay when a trace restores Python state",
        f"{_ROOM}.guards.recording",
    ),
    Patch(
        ("dispatch modes",),
        "a tracer removes ops without a result, checks among them",
        f"{_ROOM}.capture.patches.assertion_ops",
        threads=_LOCAL,
    ),
    Patch(
        ("torch.fx.node._side_effectful_functions",),
        "PyTorch removes a check in a backward as dead code; registered by torch.fx.has_side_effect",
        f"{_ROOM}.capture.patches.assertion_ops",
        versions="torch<2.13",
        threads="affects all tracers: they keep the three ops that only check values",
        undone="never: it is made at import, and is true of these ops",
    ),
    Patch(
        ("dispatch modes",),
        "values by which a forward decides must be computed and recorded",
        f"{_ROOM}.guards.decisions_by_values",
        threads=_LOCAL,
    ),
    Patch(
        ("torch.optim.optimizer._global_optimizer_post_hooks",),
        "an optimizer's step ends the training step of which statistics are taken, and only a hook tells of it",
        f"{_ROOM}.statistics.recorder",
        threads="all optimizers call the hook; it ignores those that have no parameter of a planned module",
        undone="never: the first planned module with statistics registers the hook",
    ),
    Patch(
        ("logger torch._subclasses.fake_tensor",),
        "it prints a traceback for each op that fails on fakes, though we catch the error and report it in one line",
        f"{_ROOM}.graph.quiet_logs",
        threads=f"{_ALL}: other messages of this logger are dropped",
    ),
)
"""The rows, from kernels to settings. Two changes are never undone; their rows say so. (The ops in torch.ops.rematplan
are also defined at import, but they change nothing of PyTorch.)"""
