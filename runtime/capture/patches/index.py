"""All that capture changes in PyTorch for the whole process, or for its thread: one row each.

A new patch gets a row here. tests/runtime/capture/test_patches.py captures a model and compares what the rows name
before and after.
"""

from __future__ import annotations

from dataclasses import dataclass

from rematplan.runtime.graph.compat import CHECKPOINT_GENERATOR, TORCH

_ROOM = "rematplan.runtime"
_OWN = "takes effect in the thread that captures, which it compares; others get PyTorch's own"
_LOCAL = "PyTorch keeps it for each thread apart"
_TRACING = (
    "affects all threads that trace while a capture runs (eager calls of others do not look there); the capture lock "
    "keeps out captures of other planned modules only"
)
_ALL = "affects all threads while a capture runs"
_BLOCK = "when the block is left, by an error too"
RECURRENT = ("gru", "lstm", "rnn_relu", "rnn_tanh")


@dataclass(frozen=True)
class Patch:
    """Something of PyTorch's that is another while we work. ``what``: its names, with ``*`` for any text. ``why``:
    what would go wrong without. ``where``: our module that does it. ``versions``: of PyTorch that need it. ``threads``:
    whom it affects. ``undone``: when it is as before."""

    what: tuple[str, ...]
    why: str
    where: str
    versions: str = TORCH
    threads: str = _OWN
    undone: str = _BLOCK


PATCHES = (
    Patch(
        tuple(
            f"torch.ops.aten.{name}*.py_kernels"
            for name in (
                *(
                    "cudnn_batch_norm",
                    "ctc_loss",
                    "dropout",
                    "hardshrink",
                    "softshrink",
                    "_pad_packed_sequence",
                ),
                *("upsample_", "_upsample_", "multi_margin_loss", "multilabel_margin_loss", *RECURRENT),
            )
        ),
        "under tracing Python decompositions replace the kernels that eager mode runs, with other bits and memory",
        f"{_ROOM}.capture.patches.eager_kernels",
        threads=_TRACING,
    ),
    Patch(
        tuple(f"torch.ops.aten.{name}.py_kernels" for name in ("prod", "masked_fill", "cross_entropy_loss")),
        "eager mode looks at values to choose between formulas, and a tracer takes another formula",
        f"{_ROOM}.capture.patches.eager_formulas",
        threads=_TRACING,
    ),
    Patch(
        ("torch.nn.RNNBase.flatten_parameters",),
        "it looks at where weights lie, and a tracer's lie nowhere",
        f"{_ROOM}.capture.patches.eager_kernels",
    ),
    Patch(
        ("torch.backends.cudnn.enabled",),
        "cuDNN's recurrent layers look at where their weights lie; PyTorch's own cells do not",
        f"{_ROOM}.capture.patches.eager_kernels",
        threads=f"{_ALL} a recurrent layer: what calls cuDNN meanwhile gets PyTorch's own kernels",
        undone="when the layer is traced, by an error too",
    ),
    Patch(
        (
            "torch.utils.checkpoint.CheckpointFunction",
            f"torch.utils.checkpoint.{CHECKPOINT_GENERATOR}",
        ),
        "a model's own checkpoints would run ops twice in the graph; what runs again is for the plan to say",
        f"{_ROOM}.capture.patches.checkpoint",
    ),
    Patch(
        ("torch.set_autocast_enabled", "torch.clear_autocast_cache"),
        "autocast's cache does not know a tracer's tensors; ours has to be told when autocast is switched and left",
        f"{_ROOM}.capture.patches.autocast_cache",
    ),
    Patch(
        ("torch.ops.aten._to_copy.py_kernels",),
        "a weight that autocast casts for several uses would be cast for each, and its gradients added up in float32",
        f"{_ROOM}.capture.patches.autocast_cache",
        threads="takes effect in the thread that captures, which it compares; others that trace get the same op by it",
    ),
    Patch(
        ("torch.Tensor.data",),
        "a tracer does not see what a forward assigns as the data of a tensor",
        f"{_ROOM}.capture.patches.tensor_data",
    ),
    Patch(
        ("torch.Tensor.tolist", "torch.Tensor.numpy"),
        "both read a tensor's memory without a call that a tracer could see",
        f"{_ROOM}.guards.tensor_reads",
    ),
    Patch(
        ("torch.nn.Module.__setattr__", "torch.nn.Module.__getattribute__"),
        "a plan depends on the attributes that a forward reads; classes of records that modules hold get the same, and "
        "their __getattr__ too",
        f"{_ROOM}.guards.attributes",
    ),
    Patch(
        tuple(
            f"{owner}.{name}"
            for owner in ("torch", "torch.random")
            for name in ("manual_seed", "seed", "initial_seed", "set_rng_state")
        ),
        "a graph cannot seed the generator at each step, so a forward that does is refused",
        f"{_ROOM}.capture.host_random",
    ),
    Patch(
        (
            "torch.nn.modules.module._global_forward_pre_hooks",
            "torch.nn.modules.module._global_forward_hooks",
        ),
        "each op is noted with the innermost module that makes it",
        f"{_ROOM}.capture.capture",
    ),
    Patch(
        ("torch.compiler._is_compiling_flag",),
        "many models that look at values to take a shortcut do not when they are being compiled; set only for them",
        f"{_ROOM}.capture.capture",
        threads=f"{_ALL} such a model: whoever asks is told that it is being compiled",
    ),
    Patch(
        ("torch._inductor.config.fallback_random", "torch._functorch.config.backward_pass_autocast"),
        "draws that nothing reads have to stay, for those after them depend on them; a backward runs outside of "
        "autocast's block",
        f"{_ROOM}.capture.capture",
        threads=f"{_LOCAL}, as of 2.13",
    ),
    Patch(
        ("tracing context",),
        "the fakes of some ops lie otherwise than what the kernels give, or refuse what the kernels take",
        f"{_ROOM}.capture.patches.fake_layouts",
        threads=_LOCAL,
    ),
    Patch(
        ("dispatch modes",),
        "what is written in place would lie otherwise than in eager mode",
        f"{_ROOM}.capture.patches.fake_layouts",
        threads=_LOCAL,
    ),
    Patch(
        ("dispatch modes",),
        "a tracer leaves out ops that give nothing, checks among them",
        f"{_ROOM}.capture.patches.checks",
        threads=_LOCAL,
    ),
    Patch(
        ("torch.fx.node._side_effectful_functions",),
        "PyTorch removes a check in a backward as dead code; registered by torch.fx.has_side_effect",
        f"{_ROOM}.capture.patches.checks",
        versions="torch<2.13",
        threads="affects all tracers: they keep the three ops that only check values",
        undone="never: it is made at import, and says what is so of these ops",
    ),
    Patch(
        ("dispatch modes",),
        "values that a forward decides by have to be computed and noted",
        f"{_ROOM}.guards.values",
        threads=_LOCAL,
    ),
    Patch(
        ("logger torch._subclasses.fake_tensor",),
        "it prints the traceback of each op that does not fit, though we catch the error and say it in one line",
        f"{_ROOM}.graph.quiet_logs",
        threads=f"{_ALL}: what others would log there is dropped",
    ),
)
"""The rows, from kernels to settings. One is made at import, and says so; the ops in torch.ops.rematplan, made then
too, change nothing that was there."""
