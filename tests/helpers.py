"""Toy ops, toy models and the few verbs that tests are written with.

The ops are in the namespace `pwtest`. Nothing is registered as a splitting op: `compile` names
`SPLIT_OPS`, so that a test which wants an op inside a piece says so.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

import piecewise_backend as pw
from piecewise_backend.splitting import split_graph
from piecewise_backend.steps import SplitGraph

T = TypeVar("T")

CAPTURE_SIZES = (4, 8, 16)

KEPT: collections.deque[Any] = collections.deque(maxlen=64)
"""What ops returned last. Kept alive, so that the allocator cannot hide a stale address by
handing out the same memory again."""


@torch.library.custom_op("pwtest::attn", mutates_args=["out"])
def attn(q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
    """Out-style attention: writes q + k + v."""
    out.copy_(q + k + v)


@attn.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
    return None


@torch.library.custom_op("pwtest::layer_attn", mutates_args=["out"])
def layer_attn(q: Tensor, k: Tensor, v: Tensor, out: Tensor, layer: str) -> None:
    """Out-style attention of a named layer: writes q + k + v + the number in the name."""
    out.copy_(q + k + v + number_in(layer))


@layer_attn.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, out: Tensor, layer: str) -> None:
    return None


@torch.library.custom_op("pwtest::double", mutates_args=["out"])
def double(x: Tensor, out: Tensor) -> None:
    """Out-style, with one input: writes 2 * x."""
    out.copy_(x * 2)


@double.register_fake
def _(x: Tensor, out: Tensor) -> None:
    return None


@torch.library.custom_op("pwtest::fresh", mutates_args=[])
def fresh(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention that returns a new tensor, q + k + v."""
    KEPT.append(q + k + v)
    return KEPT[-1]


@fresh.register_fake
def _(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.empty_like(q)


@torch.library.custom_op("pwtest::pair", mutates_args=[])
def pair(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Returns two new tensors, x + y and x - y."""
    KEPT.append((x + y, x - y))
    return KEPT[-1]


@pair.register_fake
def _(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


@torch.library.custom_op("pwtest::parts", mutates_args=[])
def parts(x: Tensor, count: int) -> list[Tensor]:
    """Returns a list: x, x + 1, x + 2, ..."""
    KEPT.append([x + i for i in range(count)])
    return KEPT[-1]


@parts.register_fake
def _(x: Tensor, count: int) -> list[Tensor]:
    return [torch.empty_like(x) for _ in range(count)]


@torch.library.custom_op("pwtest::both", mutates_args=["out"])
def both(x: Tensor, out: Tensor) -> Tensor:
    """Writes 2 * x and returns x + 1."""
    out.copy_(x * 2)
    KEPT.append(x + 1)
    return KEPT[-1]


@both.register_fake
def _(x: Tensor, out: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("pwtest::keyword", mutates_args=["out"])
def keyword(x: Tensor, out: Tensor, *, scale: float = 1.0) -> None:
    """To be called with keywords, also for what is written: writes scale * x."""
    out.copy_(x * scale)


@keyword.register_fake
def _(x: Tensor, out: Tensor, *, scale: float = 1.0) -> None:
    return None


@torch.library.custom_op("pwtest::named", mutates_args=[])
def named(x: Tensor, name: str) -> Tensor:
    """An op for inside of pieces, with a string: x + the number in it."""
    return x + number_in(name)


@named.register_fake
def _(x: Tensor, name: str) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("pwtest::indexed", mutates_args=[])
def indexed(x: Tensor, index: int) -> Tensor:
    """An op for inside of pieces, with an integer: x + index."""
    return x + index


@indexed.register_fake
def _(x: Tensor, index: int) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("pwtest::scaled", mutates_args=[])
def scaled(x: Tensor, scale: float, *, bias: float = 0.0) -> Tensor:
    """An op for inside of pieces, with floats: x * scale + bias."""
    return x * scale + bias


@scaled.register_fake
def _(x: Tensor, scale: float, *, bias: float = 0.0) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("pwtest::optional", mutates_args=["x"])
def optional(x: Tensor, name: str | None = None, scale: float | None = None) -> None:
    """An op for inside of pieces that writes, with optional constants."""
    x.mul_(1.0 if scale is None else scale).add_(number_in(name or ""))


@optional.register_fake
def _(x: Tensor, name: str | None = None, scale: float | None = None) -> None:
    return None


@torch.library.custom_op("pwtest::widen", mutates_args=[])
def widen(x: Tensor, factor: int) -> Tensor:
    """An op for inside of pieces whose integer makes its shape."""
    return x.repeat(1, factor)


@widen.register_fake
def _(x: Tensor, factor: int) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[1] * factor)


SPLIT_OPS = (
    "pwtest::attn",
    "pwtest::layer_attn",
    "pwtest::double",
    "pwtest::fresh",
    "pwtest::pair",
    "pwtest::parts",
    "pwtest::both",
    "pwtest::keyword",
)


def declare(capture: str, *ops: str, **traits: Any) -> None:
    """Register splitting ops, those of the tests unless named; the test's end undoes it."""
    for op in ops or SPLIT_OPS:
        pw.register_splitting_op(op, capture=capture, **traits)


def number_in(name: str) -> int:
    """The digits of a layer's name as a number."""
    return int("".join(filter(str.isdigit, name)) or 0)


def out_attn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """`attn` into a new buffer, as models call it."""
    out = torch.empty_like(q)
    torch.ops.pwtest.attn(q, k, v, out)
    return out


def rows(num_tokens: int, width: int = 4, *, seed: int = 0, dtype: Any = torch.float32) -> Tensor:
    """Random input, the same for the same arguments; no row is zero."""
    generator = torch.Generator().manual_seed(1000 * seed + num_tokens)
    return torch.randn(num_tokens, width, generator=generator).add_(3).to(dtype)


def new_data(model: nn.Module) -> None:
    """Other memory under the same parameters."""
    for p in model.parameters():
        p.data = p.data * 1.5


def new_parameters(model: nn.Module) -> None:
    """Other parameters under the same names."""
    for module in model.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(p * 1.5, requires_grad=False))


def assigned_state(model: nn.Module) -> None:
    """A checkpoint that is not copied into the parameters but takes their place."""
    state = {name: p * 1.5 for name, p in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    model.requires_grad_(False)


class Decoder(nn.Module):
    """Layers of linear, out-style attention and linear, with a residual stream."""

    def __init__(self, num_layers: int = 2, width: int = 4, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(num_layers))
        self.out = nn.ModuleList(nn.Linear(width, width) for _ in range(num_layers))
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for index, (qkv, out) in enumerate(zip(self.qkv, self.out, strict=True)):
            q, k, v = qkv(x).chunk(3, -1)
            attended = torch.empty_like(q)
            torch.ops.pwtest.layer_attn(q, k, v, attended, f"layers.{index}")
            x = x + out(attended)
        return x


def compile(function: Any, **options: Any) -> Any:
    """`torch.compile(function, backend="piecewise")` without Inductor, graphs emulated."""
    given = {
        "compiler": "eager",
        "graph_impl": "emulated",
        "splitting_ops": list(SPLIT_OPS),
        "cudagraph_capture_sizes": list(CAPTURE_SIZES),
    }
    return torch.compile(function, backend="piecewise", fullgraph=True, options=given | options)


def trace(function: Callable[..., Any], *args: Any) -> fx.GraphModule:
    """The graph that Dynamo hands to a backend, dimension 0 of every tensor being dynamic."""
    seen = _during_trace(function, args, lambda gm: gm)
    torch._dynamo.reset()
    return seen


def split(function: Callable[..., Any], *args: Any, ops: Any = SPLIT_OPS) -> SplitGraph:
    """Trace and cut, the cutting done while Dynamo's trace is current."""
    return _during_trace(function, args, lambda gm: split_graph(gm, ops))


def _during_trace(
    function: Callable[..., Any], args: Sequence[Any], look: Callable[[fx.GraphModule], T]
) -> T:
    seen: list[T] = []

    def record(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        seen.append(look(gm))
        return gm.forward

    with torch.no_grad():
        torch.compile(function, backend=record, fullgraph=True)(*mark_dynamic(args))
    assert len(seen) == 1, f"{len(seen)} graphs"
    return seen[0]


def mark_dynamic(args: Sequence[Any]) -> Sequence[Any]:
    """Tell Dynamo that dimension 0 of every tensor varies."""
    for arg in args:
        if isinstance(arg, Tensor) and arg.dim() > 0:
            torch._dynamo.maybe_mark_dynamic(arg, 0)
    return args


def agrees_with_eager(
    function: Callable[..., Any],
    make_inputs: Callable[[int], Sequence[Any]],
    *,
    sizes: Sequence[int] = (4, 3, 8, 5, 16, 13),
    calls: int = 4,
    **options: Any,
) -> pw.Report:
    """Call piecewise and eager side by side, and compare outputs and inputs after each call.

    Sizes alternate, so that each is replayed after others used the same memory; outputs of
    all calls are kept and compared once more at the end.
    """
    compiled = compile(function, **options)
    kept = []
    with torch.no_grad(), quiet_fallbacks():
        for call, size in itertools.product(range(calls), sizes):
            given, wanted = make_inputs(size), make_inputs(size)
            _vary(given, call)
            _vary(wanted, call)
            if call == 0:
                mark_varying(given, make_inputs(size + 2))
            got, expected = compiled(*given), function(*wanted)
            where = f"call {call} of size {size}: "
            same(got, expected, where + "outputs")
            same(given, wanted, where + "inputs afterwards")
            kept.append((got, expected, where + "outputs, looked at after all calls"))
    for got, expected, where in kept:
        same(got, expected, where)
    return pw.report(compiled)


def mark_varying(args: Sequence[Any], others: Sequence[Any]) -> None:
    """Tell Dynamo which dimensions vary, from the arguments of two sizes."""
    for arg, other in zip(pytree.tree_leaves(args), pytree.tree_leaves(others), strict=True):
        if isinstance(arg, Tensor):
            for dim, (size, other_size) in enumerate(zip(arg.shape, other.shape, strict=True)):
                if size != other_size:
                    torch._dynamo.maybe_mark_dynamic(arg, dim)


@contextlib.contextmanager
def quiet_fallbacks() -> Iterator[None]:
    """For tests that look at numbers, not at how they were served."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


def _vary(args: Sequence[Any], call: int) -> None:
    """Other values in every call, so that a stale replay shows."""
    for arg in args:
        if isinstance(arg, Tensor) and arg.is_floating_point() and 0 not in arg.stride():
            arg.add_(call)


def same(got: Any, expected: Any, where: str) -> None:
    """Assert equal structure, numbers and dtypes; what eager makes contiguous is."""
    got_leaves, got_spec = pytree.tree_flatten(got)
    leaves, spec = pytree.tree_flatten(expected)
    assert got_spec == spec, f"{where}: {got_spec} instead of {spec}"
    for index, (a, b) in enumerate(zip(got_leaves, leaves, strict=True)):
        if isinstance(b, Tensor):
            message = f"{where}, leaf {index}"
            torch.testing.assert_close(a, b, equal_nan=True, msg=lambda m, at=message: f"{at}: {m}")
            assert a.is_contiguous() or not b.is_contiguous(), f"{message}: not contiguous"
        else:
            assert type(a) is type(b), f"{where}, leaf {index}: {a!r} instead of {b!r}"
            assert a == b, f"{where}, leaf {index}: {a!r} instead of {b!r}"
