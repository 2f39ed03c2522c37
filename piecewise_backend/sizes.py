"""Size symbols of a graph: where a call shows their values, and what follows from those.

In:  a `SplitGraph` and the arguments it was traced with.
Out: `TokenDim` - which symbols are the token count, and why not if they are not;
     functions from symbol values to shapes and numbers.
Knows nothing of graphs or compilers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch

from piecewise_backend import _torch
from piecewise_backend.batch import FallbackReason
from piecewise_backend.errors import SplitError
from piecewise_backend.steps import GraphInput, Host, SplitGraph

Sizes = tuple[int, ...]
"""The value of each symbol of a graph, in the order of `SplitGraph.symbols`."""


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Where a call shows the value of a symbol: an integer argument, or a tensor's dimension."""

    argument: int
    dim: int | None

    def read(self, args: Sequence[Any]) -> int:
        """The value in this call."""
        value = args[self.argument]
        return int(value if self.dim is None else value.size(self.dim))

    def source(self) -> str:
        """The same as python source, over a sequence named `args`."""
        suffix = "" if self.dim is None else f".size({self.dim})"
        return f"args[{self.argument}]{suffix}"


@dataclasses.dataclass(frozen=True, slots=True)
class TokenDim:
    """The symbols of a graph, and which of them count tokens.

    A symbol matters only if a piece depends on it: what only split ops see is passed through.
    Dynamo may give every input a token symbol of its own, so those that agreed at the trace
    are taken as one; a call in which they differ is served without graphs.
    """

    symbols: tuple[sympy.Symbol, ...]
    places: tuple[Place, ...]
    tokens: frozenset[int]
    """Positions of the token symbols; empty when every shape is static."""
    problem: FallbackReason | None
    """Why no token count exists."""
    description: str
    """The varying dimensions as the user's program names them."""

    def read(self, args: Sequence[Any]) -> Sizes:
        """The value of every symbol in this call."""
        return tuple(place.read(args) for place in self.places)

    def key_function(self) -> Callable[[Sequence[Any]], Any]:
        """Reads the symbol values of a call as a dictionary key; generated, for the hot path."""
        places = [place.source() for place in self.places]
        body = places[0] if len(places) == 1 else f"({''.join(f'{p}, ' for p in places)})"
        return eval(f"lambda args: {body}")  # type: ignore[no-any-return]

    def key_of(self, sizes: Sizes) -> Any:
        """The key that `key_function` reads off a call with these symbol values."""
        return sizes[0] if len(sizes) == 1 else sizes

    def hints(self, example_args: Sequence[Any]) -> Sizes:
        """The value of every symbol at the trace."""
        return tuple(_torch.hint_of(_shown(place, example_args)) for place in self.places)

    def num_tokens(self, sizes: Sizes) -> int | FallbackReason:
        """The token count (0 for a static graph), or why the batch has none."""
        counts = {sizes[position] for position in self.tokens}
        if self.problem is not None:
            return self.problem
        if len(counts) > 1:
            return FallbackReason.TOKEN_DIMS_DIFFER
        return counts.pop() if counts else 0

    def padded(self, sizes: Sizes, num_tokens: int) -> Sizes:
        """The symbol values of the same batch with another token count."""
        return tuple(
            num_tokens if position in self.tokens else size for position, size in enumerate(sizes)
        )


def find_token_dim(split: SplitGraph, example_args: Sequence[Any]) -> TokenDim:
    """Decide which symbols are the token count.

    Raises:
        SplitError: a symbol that no argument shows directly.
    """
    places = tuple(_place(symbol, split.inputs) for symbol in split.symbols)
    in_pieces = {
        ref.expr for piece in split.pieces for ref in piece.inputs if isinstance(ref, Host)
    }
    positions = [i for i, symbol in enumerate(split.symbols) if symbol in in_pieces]
    hints = {_torch.hint_of(_shown(places[i], example_args)) for i in positions}
    named = [_name(places[i], split.inputs) for i in positions]
    problem = FallbackReason.SEVERAL_VARYING_DIMS if len(hints) > 1 else None
    return TokenDim(split.symbols, places, frozenset(positions), problem, ", ".join(named))


def _shown(place: Place, args: Sequence[Any]) -> int | torch.SymInt:
    value = args[place.argument]
    return value if place.dim is None else value.size(place.dim)  # type: ignore[no-any-return]


def _place(symbol: sympy.Symbol, inputs: Sequence[GraphInput]) -> Place:
    for position, item in enumerate(inputs):
        if isinstance(item.example, torch.SymInt) and _torch.size_expr(item.example) == symbol:
            return Place(position, None)
        if isinstance(item.example, torch.Tensor):
            for dim, size in enumerate(item.example.shape):
                if _torch.size_expr(size) == symbol:
                    return Place(position, dim)
    raise SplitError(f"size {symbol} appears in no argument by itself; mark that dimension static")


def _name(place: Place, inputs: Sequence[GraphInput]) -> str:
    suffix = "" if place.dim is None else f".size({place.dim})"
    return inputs[place.argument].source + suffix


class SizeFunction:
    """Several size expressions as one compiled python function of the symbol values."""

    def __init__(self, symbols: Sequence[sympy.Symbol], exprs: Sequence[sympy.Expr]) -> None:
        names = {symbol: f"s{i}" for i, symbol in enumerate(symbols)}
        body = "".join(f"{_torch.expr_source(expr, names)}, " for expr in exprs)
        source = f"lambda {', '.join(names.values())}: ({body})"
        self._function: Callable[..., tuple[Any, ...]] = eval(
            source, {"math": math, "torch": torch}
        )

    def __call__(self, sizes: Sizes) -> tuple[Any, ...]:
        """The values of the expressions."""
        return self._function(*sizes)


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """Shape and strides of a tensor as functions of the symbol values."""

    dtype: torch.dtype
    device: torch.device
    rank: int
    is_dynamic: bool
    """A dimension depends on the token count."""
    is_varying: bool
    """A dimension depends on some size."""
    _numbers: SizeFunction

    @classmethod
    def of(cls, example: torch.Tensor, token_dim: TokenDim) -> Layout:
        """The layout of one of Dynamo's fake tensors."""
        shape = [_torch.size_expr(size) for size in example.shape]
        stride = [_torch.size_expr(step) for step in example.stride()]
        tokens = {token_dim.symbols[i] for i in token_dim.tokens}
        is_dynamic = any(expr.free_symbols & tokens for expr in shape)
        is_varying = any(expr.free_symbols for expr in shape)
        numbers = SizeFunction(token_dim.symbols, shape + stride)
        return cls(example.dtype, example.device, len(shape), is_dynamic, is_varying, numbers)

    def shape(self, sizes: Sizes) -> tuple[int, ...]:
        """The shape at these symbol values."""
        return self._numbers(sizes)[: self.rank]

    def stride(self, sizes: Sizes) -> tuple[int, ...]:
        """The strides, in elements."""
        return self._numbers(sizes)[self.rank :]

    def num_bytes(self, sizes: Sizes) -> int:
        """Bytes from the first element to the end of the last."""
        shape, stride = self.shape(sizes), self.stride(sizes)
        if 0 in shape:
            return 0
        last = sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        return (last + 1) * self.dtype.itemsize

    def is_contiguous(self, sizes: Sizes) -> bool:
        """Row-major without gaps at these symbol values."""
        expected = 1
        for size, step in zip(
            reversed(self.shape(sizes)), reversed(self.stride(sizes)), strict=True
        ):
            if size > 1 and step != expected:
                return False
            expected *= size
        return True

    def rows(self, tensor: torch.Tensor, sizes: Sizes) -> torch.Tensor:
        """The part of a padded tensor that a batch with these symbol values fills."""
        for dim, size in enumerate(self.shape(sizes)):
            if tensor.size(dim) != size:
                tensor = tensor.narrow(dim, 0, size)
        return tensor

    def padding(self, tensor: torch.Tensor, sizes: Sizes) -> list[torch.Tensor]:
        """The other parts of it: one for each dimension that depends on the token count."""
        parts = []
        for dim, size in enumerate(self.shape(sizes)):
            if (total := tensor.size(dim)) != size:
                parts.append(tensor.narrow(dim, size, total - size))
        return parts
