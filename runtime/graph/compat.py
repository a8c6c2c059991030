"""All private names that this package imports from PyTorch; no other file of ``runtime/`` or ``rematplan/`` refers
to one.

A release may move or remove one. This file then fails at import with its name. Names that take long to load, or that
some builds lack, are looked up at first use (`LATER`).
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import forward_ad
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize
from torch.utils import checkpoint

TORCH = "torch>=2.11"
"""The requirement on PyTorch under which these names exist; the same text is in pyproject.toml."""
TESTED_TORCH = ("2.11", "2.13", "2.14", "2.15")
"""The versions with which the whole test suite was run (``make test TORCH=2.15.0``)."""

_OLDER_PIPELINES = torch.torch_version.TorchVersion(torch.__version__) < "2.13"
"""Whether PyTorch is older than 2.13, the version that changed its pipelines. Of these, only 2.11 was tested."""

PIPELINES_SEND_TO_THEMSELVES = _OLDER_PIPELINES
"""Whether PyTorch's pipeline schedules, before their first step, send a message from a rank to itself where two
neighbouring stages are on one rank. Gloo cannot send it."""

MESSAGES_HAVE_GRADIENTS = _OLDER_PIPELINES
"""Whether PyTorch's pipeline stages send back a gradient for every message that they receive. Newer versions
send one only for messages that require a gradient."""

STEPS_COPY_RANDOM_STATE = not _OLDER_PIPELINES
"""Whether PyTorch copies the state of the random number generator before the first step of a pipeline."""

COMPILED_BACKWARDS_KEEP_TANGENTS = torch.torch_version.TorchVersion(torch.__version__) < "2.13"
"""Whether the gradients of outputs stay allocated until the backward of a graph that `torch.compile` compiled ends.
Otherwise they are freed after their last use. With PyTorch 2.11 they stay; 2.12 was not tried."""


def is_tested(version: str = torch.__version__) -> bool:
    """Return whether the test suite was run with this version of PyTorch, compared by its first two numbers."""
    return ".".join(version.split("+")[0].split(".")[:2]) in TESTED_TORCH


def _missing(what: str) -> ImportError:
    return ImportError(
        f'torch {torch.__version__} lacks a private name that rematplan uses: {what}; pip install "{TORCH}", or say '
        f"in rematplan/runtime/graph/compat.py what replaces it"
    )


try:
    from torch import _from_functional_tensor as from_functional_tensor
    from torch import _functionalize_commit_update as functionalize_commit_update
    from torch import _functionalize_replace as functionalize_replace
    from torch import _functionalize_sync as functionalize_sync
    from torch import _is_functional_tensor as is_functional_tensor
    from torch._C import DispatchKey, _functions
    from torch._C import _AutoDispatchBelowAutograd as AutoDispatchBelowAutograd
    from torch._C import _current_autograd_node as current_autograd_node
    from torch._C import _current_graph_task_id as current_graph_task
    from torch._C import _DisableAutocast as DisableAutocast
    from torch._C import _dispatch_tls_is_dispatch_key_excluded as is_dispatch_key_excluded
    from torch._C import _get_cudnn_enabled as get_cudnn_enabled
    from torch._C import _get_cudnn_sdp_enabled as get_cudnn_sdp_enabled
    from torch._C import _get_dispatch_mode as get_dispatch_mode
    from torch._C import _get_flash_sdp_enabled as get_flash_sdp_enabled
    from torch._C import _get_math_sdp_enabled as get_math_sdp_enabled
    from torch._C import _get_mem_efficient_sdp_enabled as get_mem_efficient_sdp_enabled
    from torch._C import _get_mkldnn_enabled as get_mkldnn_enabled
    from torch._C import _get_overrideable_sdp_enabled as get_overrideable_sdp_enabled
    from torch._C import _get_sdp_priority_order as get_sdp_priority_order
    from torch._C import _get_tracing_state as get_tracing_state
    from torch._C import _len_torch_dispatch_stack as dispatch_stack_depth
    from torch._C import _set_cudnn_enabled as set_cudnn_enabled
    from torch._C import _TorchDispatchModeKey as TorchDispatchModeKey
    from torch._C._autograd import _disable_profiler_legacy as disable_profiler_legacy
    from torch._C._autograd import _enable_profiler_legacy as enable_profiler_legacy
    from torch._C._autograd import _get_current_graph_task_keep_graph as keeps_graph
    from torch._C._autograd import _profiler_enabled as profiler_enabled
    from torch._C._autograd import _top_saved_tensors_default_hooks as top_saved_tensors_hooks
    from torch._C._dynamo.guards import TensorGuards
    from torch._C._functorch import (
        is_functorch_wrapped_tensor,
        is_legacy_batchedtensor,
        peek_interpreter_stack,
    )
    from torch._C._profiler import ProfilerConfig, ProfilerState
    from torch._C._profiler import _ExperimentalConfig as ExperimentalConfig
    from torch._compile import _disable_dynamo as disable_dynamo
    from torch._guards import CompileContext, TracingContext, detect_fake_mode, tracing
    from torch._library import triton as triton_ops
    from torch._ops import HigherOrderOperator, OpOverload
    from torch._ops import _len_torch_dispatch_stack_pre_dispatch as pre_dispatch_stack_depth
    from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        FakeTensor,
        FakeTensorMode,
        unset_fake_temporarily,
    )
    from torch._subclasses.functional_tensor import FunctionalTensor
    from torch.fx._lazy_graph_module import _use_lazy_graph_module as lazy_graph_modules
    from torch.nn.utils.stateless import _reparametrize_module as reparametrize_module
    from torch.overrides import _get_current_function_mode_stack as function_modes
    from torch.utils import _pytree as pytree
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes
    from torch.utils._sympy.printers import PythonPrinter

    DelayedError = _functions.DelayedError  # its module cannot be imported by name
    at_end_of_backward = torch.autograd.Variable._execution_engine.queue_callback
except (ImportError, AttributeError) as error:
    raise _missing(str(error)) from error

if TYPE_CHECKING:
    from torch._C import DispatchKeySet
    from torch._C import _cuda_clearCublasWorkspaces as clear_cublas_workspaces
    from torch._C import _dispatch_tls_local_exclude_set as excluded_dispatch_keys
    from torch._C import _dispatch_tls_local_include_set as included_dispatch_keys
    from torch._C import _ForceDispatchKeyGuard as ForceDispatchKeyGuard
    from torch._decomp.decompositions_for_rng import PhiloxState
    from torch._dispatch.python import enable_python_dispatcher
    from torch._dynamo import OptimizedModule
    from torch._dynamo import config as dynamo_config
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop
    from torch._dynamo.eval_frame import _callback_from_stance as callback_from_stance
    from torch._dynamo.exc import TorchDynamoException
    from torch._dynamo.source import LocalSource
    from torch._dynamo.trace_rules import get_torch_obj_rule_map
    from torch._functorch import config as functorch_config
    from torch._functorch._aot_autograd.schemas import MemoryFormatMeta
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
    from torch._functorch.partitioners import _size_of as node_bytes
    from torch._functorch.partitioners import estimate_runtime
    from torch._inductor import config as inductor_config
    from torch._inductor import memory as inductor_memory
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner
    from torch._inductor.custom_graph_pass import CustomKnapsackSolver, CustomPartitionerFn
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.virtualized import V as inductor_graph
    from torch.distributed.utils import _apply_to_tensors as apply_to_tensors
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.utils import _device as device_mode
    from torch.utils._ordered_set import OrderedSet

LATER = {
    "AsyncCompile": ("torch._inductor.async_compile", "AsyncCompile"),
    "CustomKnapsackSolver": ("torch._inductor.custom_graph_pass", "CustomKnapsackSolver"),
    "CustomPartitionerFn": ("torch._inductor.custom_graph_pass", "CustomPartitionerFn"),
    "DispatchKeySet": ("torch._C", "DispatchKeySet"),
    "ForceDispatchKeyGuard": ("torch._C", "_ForceDispatchKeyGuard"),
    "LocalSource": ("torch._dynamo.source", "LocalSource"),
    "MemoryFormatMeta": ("torch._functorch._aot_autograd.schemas", "MemoryFormatMeta"),
    "OrderedSet": ("torch.utils._ordered_set", "OrderedSet"),
    "OptimizedModule": ("torch._dynamo", "OptimizedModule"),
    "PhiloxState": ("torch._decomp.decompositions_for_rng", "PhiloxState"),
    "TorchDynamoException": ("torch._dynamo.exc", "TorchDynamoException"),
    "aot_autograd": ("torch._dynamo.backends.common", "aot_autograd"),
    "aot_export_joint_with_descriptors": (
        "torch._functorch.aot_autograd",
        "aot_export_joint_with_descriptors",
    ),
    "apply_to_tensors": ("torch.distributed.utils", "_apply_to_tensors"),
    "boxed_nop": ("torch._dynamo.backends.debugging", "boxed_nop"),
    "callback_from_stance": ("torch._dynamo.eval_frame", "_callback_from_stance"),
    "clear_cublas_workspaces": ("torch._C", "_cuda_clearCublasWorkspaces"),  # missing in CPU builds
    "compile_fx": ("torch._inductor.compile_fx", "compile_fx"),
    "compile_fx_inner": ("torch._inductor.compile_fx", "compile_fx_inner"),
    "device_mode": ("torch.utils._device", ""),
    "dynamo_config": ("torch._dynamo.config", ""),
    "enable_python_dispatcher": ("torch._dispatch.python", "enable_python_dispatcher"),
    "estimate_runtime": ("torch._functorch.partitioners", "estimate_runtime"),
    "excluded_dispatch_keys": ("torch._C", "_dispatch_tls_local_exclude_set"),
    "functorch_config": ("torch._functorch.config", ""),
    "get_torch_obj_rule_map": ("torch._dynamo.trace_rules", "get_torch_obj_rule_map"),
    "included_dispatch_keys": ("torch._C", "_dispatch_tls_local_include_set"),
    "inductor_config": ("torch._inductor.config", ""),
    "inductor_graph": ("torch._inductor.virtualized", "V"),
    "inductor_memory": ("torch._inductor.memory", ""),
    "make_fx": ("torch.fx.experimental.proxy_tensor", "make_fx"),
    "node_bytes": ("torch._functorch.partitioners", "_size_of"),
    "select_decomp_table": ("torch._inductor.decomposition", "select_decomp_table"),
}
"""Names that are looked up at first use: the module that defines each, and its name there. An empty name
stands for the module itself."""


def _looked_up(name: str) -> Any:
    module, private = LATER[name]
    try:
        found = import_module(module)
        return getattr(found, private) if private else found
    except (ImportError, AttributeError) as error:
        raise _missing(str(error)) from error


if not TYPE_CHECKING:  # a type checker would otherwise accept every name as an attribute of this module

    def __getattr__(name: str) -> Any:
        if name not in LATER:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = globals()[name] = _looked_up(name)
        return found


def _name_in(module: ModuleType | type, *names: str) -> str:
    """Return the first of ``names`` that a module or class has; an error names them if it has none."""
    for name in names:
        if hasattr(module, name):
            return name
    raise _missing(f"{module.__name__!r} has no attribute {' or '.join(map(repr, names))}")


COMPILING_FLAG = _name_in(torch.compiler, "_is_compiling_flag")
"""The name of the flag in `torch.compiler` that tells a forward whether it is being compiled."""
CHECKPOINT_GENERATOR = _name_in(
    checkpoint, "_checkpoint_without_reentrant_generator_impl", "_checkpoint_without_reentrant_generator"
)
"""The name in `torch.utils.checkpoint` of the generator that runs before and after a function under
non-reentrant checkpointing. Before PyTorch 2.14 it has no suffix."""
c_autograd = torch._C._autograd  # no module that `import` finds by name
PUSH_SAVED_TENSORS_HOOKS = _name_in(c_autograd, "_push_saved_tensors_default_hooks")
"""The name in `c_autograd` of the function by which `torch.autograd.graph.saved_tensors_hooks` pushes its hooks."""
tritons_calls_wrapped = (triton_ops, _name_in(triton_ops, "is_wrap_triton_enabled"))
"""The module and the name of the function that says whether `torch.library.wrap_triton` records an operator."""
_name_in(forward_ad, "_current_level")
_name_in(parametrize, "_cache_enabled")
_name_in(torch.nn.Module, "_compiled_call_impl")
_name_in(DistributedDataParallel, "_active_ddp_module")


def forward_mode_level() -> int:
    """Return the innermost open level of forward-mode differentiation, counted from 0; -1 if none is open."""
    return forward_ad._current_level


def any_mode() -> bool:
    """Return whether a Python dispatch mode (such as a tracer's) is active in this thread. The check is cheaper than
    disabling modes without need."""
    return bool(dispatch_stack_depth() or pre_dispatch_stack_depth())


def parametrizations_are_cached() -> bool:
    """Return whether the caller is inside a `torch.nn.utils.parametrize.cached` block."""
    return bool(parametrize._cache_enabled)


def is_compiled_in_place(module: torch.nn.Module) -> bool:
    """Return whether calls of a module run code that `torch.nn.Module.compile` made."""
    return module._compiled_call_impl is not None


def replicating() -> DistributedDataParallel | None:
    """Return the `DistributedDataParallel` whose forward runs now; None if none does."""
    active: DistributedDataParallel | None = DistributedDataParallel._active_ddp_module
    return active


def replicated_parameters(wrapper: DistributedDataParallel) -> list[torch.nn.Parameter]:
    """Return the wrapper's parameters, whose gradients, if any, are averaged over its processes."""
    return list(wrapper._module_parameters)
