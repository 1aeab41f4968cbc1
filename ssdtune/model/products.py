"""What is dear to compute in a block, kept from the forward pass for the backward pass; the rest is cheap and made again.

Results of matrix products and of attention are recorded while a block runs forward (`recorded`), in order. When it runs
again for its backward pass it is given them instead of computing them (`replayed`): norms, activation functions,
rotary positions, conversions and sums are computed. The graph is made then, so that nothing of it, no weights
either, has to be kept in between; and both passes compute the same bits, as the same kernels run on the same values.

Where recorded results wait is `ssdtune.swap.activations`' business. The idea is that of selective activation
checkpointing: Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models (2022), section 5.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from ssdtune.errors import SsdtuneError

MATRIX_PRODUCTS = {
    "aten::mm": 0, "aten::addmm": 1, "aten::bmm": 0, "aten::baddbmm": 1, "aten::_grouped_mm": 0,
}  # fmt: skip
"""Operations, and which argument is the matrix over whose last dimension they sum."""
ATTENTION = (
    "aten::_scaled_dot_product_",
    "aten::_flash_attention_forward",
    "aten::_efficient_attention_forward",
)
"""How the names of attention kernels begin."""
CHEAP_SHARE = 1 / 8
"""Of the hidden size: a product that sums over no more numbers is cheap for the room that its result takes. Such are the
scores of attention where they are made, and the second product of an adapter."""


@dataclass
class Product:
    """A recorded operation.

    Attributes:
        given: Shapes and dtypes of the tensors it had.
        results: What came out, flat: tensors, or what stands for them meanwhile, and numbers.
    """

    operation: Any
    given: list[tuple[torch.Size, torch.dtype]]
    results: list[Any]
    form: TreeSpec = field(repr=False)

    def change(self, function: Callable[[Any], Any]) -> None:
        """Replace each result by what the function makes of it."""
        self.results = [function(result) for result in self.results]


@contextmanager
def recorded(hidden_size: int) -> Iterator[list[Product]]:
    """Record what is dear of a block that runs with gradients; autograd saves nothing meanwhile."""
    mode = _Recording(hidden_size)
    with mode, torch.autograd.graph.saved_tensors_hooks(lambda _: None, _never):
        yield mode.products


@contextmanager
def replayed(products: Sequence[Product], hidden_size: int) -> Iterator[None]:
    """Give a block that runs again what was recorded, each once.

    Raises:
        SsdtuneError: It doesn't do what it did when it was recorded.
    """
    mode = _Replaying(products, hidden_size)
    with mode:
        yield
    if mode.waiting:
        raise _different(mode.waiting[-1], None)


class _Recording(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.products: list[Product] = []
        self._hidden_size = hidden_size

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if _changes_arguments(func):
            self._keep_what_changes(func, args, kwargs)
        result = func(*args, **kwargs)
        if _is_dear(func, args, kwargs, self._hidden_size):
            leaves, form = tree_flatten(result)
            # Autograd will put its graph on the result itself.
            self.products.append(Product(func, _given(args), [_apart(x) for x in leaves], form))
        return result

    def _keep_what_changes(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Copy recorded results that an operation is about to change in place."""
        written = {_storage(tensor) for tensor in _written(func, args, kwargs)}

        def copied(result: Any) -> Any:
            changes = isinstance(result, torch.Tensor) and _storage(result) in written
            return result.clone() if changes else result

        for product in self.products:
            product.change(copied)


class _Replaying(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self, products: Sequence[Product], hidden_size: int) -> None:
        super().__init__()
        self.waiting = list(reversed(products))
        self._hidden_size = hidden_size

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not _is_dear(func, args, kwargs, self._hidden_size):
            return func(*args, **kwargs)
        product, now = self.waiting.pop() if self.waiting else None, _given(args)
        if product is None or product.operation is not func or product.given != now:
            raise _different(product, (func, now))
        # What was changed in place or read into a slot is no tensor of this graph.
        return tree_unflatten([_apart(result) for result in product.results], product.form)


def product_bytes(products: Sequence[Product]) -> int:
    """Return the memory that recorded results take."""
    tensors = [x for product in products for x in product.results if isinstance(x, torch.Tensor)]
    return sum({_storage(t): t.untyped_storage().nbytes() for t in tensors}.values())


def _is_dear(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], hidden_size: int) -> bool:
    """Say whether a result is worth keeping; the same in both passes, as it depends on shapes only."""
    matrix, dropout = _kind(func)
    if matrix is not None:
        return bool(args[matrix].shape[-1] > CHEAP_SHARE * hidden_size)
    if dropout is None:
        return False
    # What draws random numbers is run again, so that what comes after draws the same.
    return not (args[dropout] if dropout < len(args) else kwargs.get("dropout_p", 0.0))


@cache
def _changes_arguments(func: Any) -> bool | None:
    """Say whether an operation works in place; None of one that is made of others."""
    schema = getattr(func, "_schema", None)
    return None if schema is None else bool(schema.is_mutable)


@cache
def _kind(func: Any) -> tuple[int | None, int | None]:
    """Return where a product has its matrix, and attention its dropout; None of what it is not."""
    if _changes_arguments(func) is not False:
        return None, None
    schema = func._schema
    if schema.name in MATRIX_PRODUCTS:
        return MATRIX_PRODUCTS[schema.name], None
    if schema.name.startswith(ATTENTION) and "backward" not in schema.name:
        names = [argument.name for argument in schema.arguments]
        return None, names.index("dropout_p") if "dropout_p" in names else len(names)
    return None, None


def _given(args: tuple[Any, ...]) -> list[tuple[torch.Size, torch.dtype]]:
    return [(arg.shape, arg.dtype) for arg in args if isinstance(arg, torch.Tensor)]


def _apart(result: Any) -> Any:
    """Return a tensor of its own with the same memory; anything else as it is."""
    return result.detach() if isinstance(result, torch.Tensor) else result


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors that an operation changes."""
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            yield from (leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, torch.Tensor))


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _never(_: Any) -> torch.Tensor:
    raise AssertionError("the graph of a forward pass is made in backward")


def _different(product: Product | None, now: tuple[Any, Any] | None) -> SsdtuneError:
    def text(operation: Any, given: Any) -> str:
        return f"{operation} of {', '.join(str(list(shape)) for shape, _ in given)}"

    before = text(product.operation, product.given) if product else "nothing more"
    return SsdtuneError(
        f"a block does not compute the same when it is run again: {text(*now) if now else 'nothing more'} where it was "
        f"{before}. Results of this model's products can't be kept; use --recompute always."
    )
