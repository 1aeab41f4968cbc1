"""What is dear in a block is computed once: the second time it is given, whatever was done to it in between."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn.functional import linear, scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from ssdtune.errors import SsdtuneError
from ssdtune.model.products import Product, product_bytes, recorded, replayed

SIZE = 32
Block = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Counted(TorchDispatchMode):
    """Counts what is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.append(func._schema.name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


def plain(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return linear(torch.nn.functional.silu(linear(x, weight)), weight)


def in_place(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    inner = linear(x, weight)
    inner.mul_(2).relu_()
    return linear(inner, weight).add_(x)


def attention(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    heads = linear(x, weight).view(2, 5, 4, 8).transpose(1, 2)
    return linear(
        scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).reshape(2, 5, SIZE),
        weight,
    )


def dropping(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    heads = linear(x, weight).view(2, 5, 4, 8).transpose(1, 2)
    mixed = scaled_dot_product_attention(heads, heads, heads, dropout_p=0.5)
    return torch.nn.functional.dropout(linear(mixed.transpose(1, 2).reshape(2, 5, SIZE), weight))


def adapted(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return linear(x, weight) + linear(linear(x, weight[:4]), weight[:, :4])


def tensors() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(2, 5, SIZE, generator=generator), torch.randn(SIZE, SIZE)
    return x.requires_grad_(), weight.requires_grad_()


def gradients(
    block: Block, x: torch.Tensor, weight: torch.Tensor, products: list[Product] | None = None
) -> tuple[tuple[torch.Tensor, ...], list[str]]:
    """Return result and gradients of a block, and what was computed forward."""
    torch.manual_seed(3)
    with Counted() as counted:
        if products is None:
            output = block(x, weight)
        else:
            with replayed(products, SIZE):
                output = block(x, weight)
    return (output, *torch.autograd.grad(output.square().sum(), (x, weight))), counted.names


@pytest.mark.parametrize(
    ("block", "dear"),
    [
        (plain, {"mm": 2}),
        (in_place, {"mm": 2}),
        (attention, {"mm": 2, "_scaled_dot_product_flash_attention_for_cpu": 1}),
        (dropping, {"mm": 2, "bmm": 2}),
        (adapted, {"mm": 2}),  # of three: the last sums over few numbers
    ],
)
def test_what_is_dear_is_computed_once(block: Block, dear: dict[str, int]) -> None:
    x, weight = tensors()
    wanted, before = gradients(block, x, weight)
    torch.manual_seed(3)
    with recorded(SIZE) as products:
        output = block(x, weight)
    assert torch.equal(output, wanted[0])
    assert product_bytes(products) >= 2 * 5 * SIZE * 4
    found, after = gradients(block, x, weight, products)
    assert all(map(torch.equal, found, wanted))
    saved = {name: before.count(name) - after.count(name) for name in set(before)}
    assert {name: count for name, count in saved.items() if count > 0} == dear


@pytest.mark.parametrize(
    "other",
    [
        linear,  # one product less
        lambda x, weight: plain(plain(x, weight), weight),
        lambda x, weight: plain(x[:, :4], weight),
        lambda x, weight: torch.baddbmm(x, x, weight.expand(2, SIZE, SIZE)),
    ],
    ids=["less", "more", "other shapes", "other products"],
)
def test_a_block_that_does_something_else_is_refused(other: Block) -> None:
    x, weight = tensors()
    with recorded(SIZE) as products:
        plain(x, weight)
    with pytest.raises(SsdtuneError, match=r"does not compute the same .* --recompute always"):
        gradients(other, x, weight, products)


def test_nothing_else_is_held() -> None:
    """Neither graph nor weights: only results."""
    x, weight = tensors()
    with recorded(SIZE) as products:
        output = plain(x, weight)
    kept = [result for product in products for result in product.results]
    assert not any(tensor.requires_grad or tensor.grad_fn for tensor in kept)
    assert sum(tensor.nbytes for tensor in kept) == product_bytes(products) == 2 * output.nbytes
