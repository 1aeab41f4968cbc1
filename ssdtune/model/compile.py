"""Blocks compiled by torch.compile, once for each kind of block instead of once for each block.

All blocks run through one compiled function, which gets block and weights as arguments. torch notes which of a block's
attributes the code reads, and compiles again for a block in which one of them differs (a window, a scale, experts); all
others share what is there. So kinds need not be told apart here. The number of a block is one of these attributes, but
blocks read it for their cache only, which training has none of.

In training a block runs with gradients even where nobody asks for them, and so by the same kernels when it is run
again in backward. Without that, what it gives would depend on the memory plan. Its input gets a gradient always, for the
same reason and so that the first block isn't a kind of its own. Dropout draws as it does without torch.compile.

What memory a compiled block takes is `ssdtune.train.prepare`'s business; what the machine needs is in
`ssdtune.model.toolchain`. Letters: B sequences, S positions, D hidden size.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Mapping
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch._dynamo import config as dynamo_config
from torch._dynamo import lookup_backend
from torch._dynamo.decorators import maybe_mark_dynamic
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch._functorch import config as functorch_config
from torch.func import functional_call
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves, tree_map_only

from ssdtune.errors import BackendUnavailableError, first_line
from ssdtune.model.toolchain import missing_tool
from ssdtune.units import format_time

logger = logging.getLogger(__name__)

BACKEND = "inductor"
OPTIONS: dict[str, Any] = {
    "fallback_random": True,  # the same dropout masks as without torch.compile
    "compile_threads": 1,  # processes that help would take memory that nobody planned
}
MOST_VARIANTS = 64
"""Kinds of blocks times shapes times training or not; more are computed without torch.compile."""
OLDEST_TORCH = (2, 8)
"""Older ones do not let autograd's hooks for saved tensors run beside compiled code."""


def require_compiler(device: torch.device) -> None:
    """Compile something small, which also loads all that compiling takes, so that its memory can be seen.

    Raises:
        BackendUnavailableError: It cannot be done here; the message says why and what to do.
    """
    version = tuple(int(number) for number in torch.__version__.split(".")[:2])
    problem = missing_tool(for_card=device.type != "cpu")
    if version < OLDEST_TORCH:
        problem = f"torch {torch.__version__} is too old. Install torch 2.8 or newer"
    if not problem:
        try:
            values = torch.ones(8, device=device, requires_grad=True)
            _compiled(_small, _backend)(values).sum().backward()
        except Exception as error:  # whatever a compiler may come up with
            problem = f"a test failed: {_reason(error)}"
    if problem:
        raise BackendUnavailableError(
            f"torch_compile cannot be used: {problem}, or leave torch_compile out."
        )


class CompiledBlocks:
    """Runs a block as `torch.func.functional_call` does, compiled; where that fails, says so once and runs it as it is.

    Args:
        lengths_vary: Micro-batches differ in length: kernels are made for any B and S, not for those of a few shapes.

    Attributes:
        num_graphs: How often something was compiled.
    """

    def __init__(self, *, lengths_vary: bool) -> None:
        self.num_graphs = 0
        self._lengths_vary = lengths_vary
        self._uncompiled: set[Hashable] = set()
        self._what = ""
        self._run = _compiled(_run, self._compile)

    def __call__(
        self,
        block: nn.Module,
        weights: Mapping[str, torch.Tensor],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Return what the block returns.

        Args:
            weights: By their names in the block.
            args: Hidden state [B, S, D] and what else it is called with.
        """
        # Memory is counted, or something else looks at single operations.
        is_watched = _get_current_dispatch_mode() is not None
        if is_watched or (self._uncompiled and _kind(block) in self._uncompiled):
            return _as_it_is(block, weights, args, kwargs)
        if not block.training:
            return self._call(block, weights, args, kwargs)
        if torch.is_grad_enabled():
            return self._call(block, weights, _with_gradient(args), kwargs)
        trained = {name for name, parameter in block.named_parameters() if parameter.requires_grad}
        leaves = {
            name: weight.detach().requires_grad_(name in trained)
            for name, weight in weights.items()
        }
        with torch.enable_grad():
            result = self._call(block, leaves, _with_gradient(args), kwargs)
        return tree_map_only(torch.Tensor, torch.Tensor.detach, result)

    def _call(
        self,
        block: nn.Module,
        weights: Mapping[str, torch.Tensor],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        hidden, name = args[0], type(block).__name__
        self._what = f"{name} for {' x '.join(map(str, hidden.shape))}"
        if self._lengths_vary:
            _mark(hidden, (args, kwargs))
        try:
            with dynamo_config.patch(recompile_limit=MOST_VARIANTS):
                return _as_it_is(_Within(block, self._run), weights, args, kwargs, "block.")
        except FailOnRecompileLimitHit:
            reason = (
                f"{MOST_VARIANTS} variants of blocks and shapes were compiled, and these are more"
            )
        except TorchDynamoException as error:
            reason = _reason(error)
        self._uncompiled.add(_kind(block))
        logger.warning(
            "%s cannot be compiled: %s. Blocks like it run without torch.compile.", name, reason
        )
        return _as_it_is(block, weights, args, kwargs)

    def _compile(self, graph: Any, inputs: Any) -> Any:
        """Compile one graph, as torch asks for."""
        start = time.perf_counter()
        if not self.num_graphs:
            logger.info("compiling blocks, once for each kind and shape; torch keeps what it can")
        self.num_graphs += 1
        compiled = _backend(graph, inputs)
        logger.info("compiled %s in %s", self._what, format_time(time.perf_counter() - start))
        return compiled


class _Within(nn.Module):
    """Runs a compiled function on a block whose weights are in place; not compiled itself."""

    def __init__(self, block: nn.Module, run: Callable[..., Any]) -> None:
        super().__init__()
        self.block = block
        self._run = run

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(self.block, args, kwargs)


def _run(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return block(*args, **kwargs)


def _small(values: torch.Tensor) -> torch.Tensor:
    return values.sin() + 1


def _compiled(function: Any, backend: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    # torch counts what it compiled by code object, and this one's count begins at 0.
    own = FunctionType(function.__code__.replace(), function.__globals__)
    compiled: Callable[..., Any] = torch.compile(
        own, backend=backend, fullgraph=True, dynamic=False
    )
    return compiled


def _backend(graph: Any, inputs: Any) -> Any:
    options = {"config_patches": OPTIONS} if BACKEND == "inductor" else {}
    # Backward now, too, so that it is timed, and what fails fails here.
    with functorch_config.patch(force_non_lazy_backward_lowering=True):
        return lookup_backend(BACKEND)(graph, inputs, **options)


def _as_it_is(
    block: nn.Module,
    weights: Mapping[str, torch.Tensor],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    prefix: str = "",
) -> Any:
    weights = {prefix + name: weight for name, weight in weights.items()}
    return functional_call(block, weights, args, dict(kwargs), tie_weights=False)


def _with_gradient(args: tuple[Any, ...]) -> tuple[Any, ...]:
    hidden = args[0]
    return (hidden if hidden.requires_grad else hidden.detach().requires_grad_(), *args[1:])


def _mark(hidden: torch.Tensor, values: Any) -> None:
    """Let torch know which sizes vary: those that are B or S, but D."""
    varying = set(hidden.shape[:2]) - {1}
    for tensor in tree_leaves(values):
        if isinstance(tensor, torch.Tensor):
            sizes = tensor.shape[:2] if tensor is hidden else tensor.shape
            for dimension, size in enumerate(sizes):
                if size in varying:
                    maybe_mark_dynamic(tensor, dimension)


def _kind(block: nn.Module) -> Hashable:
    """Return what blocks that fail for the same reason have in common."""
    return tuple(type(module) for module in block.modules())


def _reason(error: Exception) -> str:
    return first_line(getattr(error, "inner_exception", error))  # of a compiler that failed
