"""The fused ops as benchmark cases: arguments of a size, the op, and plain torch for the same.

In:  an op's name, hidden size, rows.
Out: `FusedCase` with arguments on the device; how many bytes a call has to move; repeated calls.
Knows nothing of timing.

Note [Repeated calls]
A kernel of two microseconds takes longer to launch than to run. So a timed step is one replay of
a CUDA graph that holds many calls, the same number for every contender: launching costs all of them
the same, next to nothing. The calls of a graph run one after the other on the same inputs, so small
inputs are in the L2 cache, for all alike; the large inputs exceed it several times.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import piecewise_backend.passes.ops  # noqa: F401  # defines torch.ops.piecewise
from piecewise_backend.passes.ops import reference

EPS = 1e-6
GROUP_SIZE = 128
HEAD_DIM = 128
NORMS = ("rms_norm", "add_rms_norm")
SCALES = ("static", "dynamic", "group")
QUANT_OPS = tuple(f"{p}_{s}_quant" for p in (*NORMS, "silu_mul") for s in SCALES)
OPS = (*QUANT_OPS, "qk_norm_rope")

Call = Callable[..., Any]


@dataclasses.dataclass(frozen=True, slots=True)
class FusedCase:
    """One op at one size."""

    name: str
    args: tuple[Any, ...]

    @property
    def fused(self) -> Call:
        """The op."""
        op: Call = getattr(torch.ops.piecewise, self.name).default
        return op

    @property
    def plain(self) -> Call:
        """Plain torch for the same, a new function each time: nothing compiled carries over."""
        name = self.name

        def plain(*args: Any) -> Any:
            return plain_call(name, args)

        return plain

    def bytes_moved(self) -> int:
        """What a call reads and writes at least: every argument and every result once."""
        tensors = [t for t in (*self.args, *results(self.fused(*self.args))) if _is_tensor(t)]
        return sum(t.numel() * t.element_size() for t in tensors)


def make_case(name: str, hidden: int, num_rows: int, device: torch.device) -> FusedCase:
    """Random bfloat16 values; ``hidden`` columns come out of a quantising op."""
    torch.manual_seed(0)

    def values(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16)

    if name == "qk_norm_rope":
        return FusedCase(name, _qk_args(hidden, num_rows, values))
    args: list[Any] = [values(num_rows, 2 * hidden if name.startswith("silu") else hidden)]
    if name.startswith("add"):
        args.append(values(num_rows, hidden))
    if not name.startswith("silu"):
        args.append(values(hidden))
    if "static" in name:
        args.append(torch.full((1,), 0.02, device=device))
    if not name.startswith("silu"):
        args.append(EPS)
    if "group" in name:
        args.append(GROUP_SIZE)
    return FusedCase(name, tuple(args))


def rows_of_bytes(name: str, hidden: int, num_bytes: int) -> int:
    """Rows with which the values that come in have so many bytes."""
    columns = 2 * hidden if name.startswith("silu") else hidden
    if name == "qk_norm_rope":
        columns += _kv_heads(hidden) * HEAD_DIM
    return num_bytes // (2 * columns)


def plain_call(name: str, args: tuple[Any, ...]) -> Any:
    """The op in plain torch."""
    if name == "qk_norm_rope":
        return reference.qk_norm_rope(*args)
    x, rest = args[0], args[1:]  # Dynamo knows no list that is unpacked from a tuple
    new_residual: tuple[Tensor, ...] = ()
    if name.startswith("add"):
        x, rest = x + rest[0], rest[1:]
        new_residual = (x,)
    is_silu = name.startswith("silu")
    y = reference.silu_mul(x) if is_silu else reference.rms_norm(x, rest[0], EPS)
    scale = rest[0 if is_silu else 1] if "static" in name else None
    outputs = reference.quant(y, scale, GROUP_SIZE if "group" in name else 0)
    return (*outputs, *new_residual)


def repeated(step: Callable[[], object], device: torch.device, num_calls: int) -> Call:
    """A step of many calls. See Note [Repeated calls]."""

    def calls() -> None:
        for _ in range(num_calls):
            step()

    if device.type != "cuda":
        return calls
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calls()
    return graph.replay


def results(found: Any) -> tuple[Any, ...]:
    """What a call returned, as a tuple."""
    return tuple(found) if isinstance(found, tuple | list) else (found,)


def check_same(case: FusedCase, name: str, call: Call) -> None:
    """Refuse to time what computes something else.

    float8 has 3 bits: where a scale was rounded to its neighbour, so are up to all values of a row.
    """
    for got, expected in zip(
        results(call(*case.args)), results(plain_call(case.name, case.args)), strict=True
    ):
        difference = (got.float() - expected.float()).norm() / expected.float().norm()
        if not difference.item() <= 0.05:
            raise RuntimeError(f"{name} of {case.name} is off by {difference.item():.3f}")


def _qk_args(hidden: int, num_rows: int, values: Callable[..., Tensor]) -> tuple[Any, ...]:
    num_heads, num_kv_heads = max(1, hidden // HEAD_DIM), _kv_heads(hidden)
    sizes = [n * HEAD_DIM for n in (num_heads, num_kv_heads, num_kv_heads)]
    q, k, _ = values(num_rows, sum(sizes)).split(sizes, dim=-1)
    angles = values(num_rows, HEAD_DIM // 2).float()
    heads = (part.unflatten(-1, (-1, HEAD_DIM)) for part in (q, k))
    return *heads, values(HEAD_DIM), values(HEAD_DIM), angles.cos(), angles.sin(), EPS


def _kv_heads(hidden: int) -> int:
    return max(1, hidden // HEAD_DIM // 4)


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)
