"""What a piece does to memory, found by running it on fake tensors.

In:  a distinct piece and example sizes.
Out: `PieceFacts`.
Knows nothing of compilers or graphs. Schemas and versions tell what was mutated, the dispatcher
tells whether anything is computed at all. Two things are listed: the ops that allocate, and the
namespaces of collectives.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import fx
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode

from piecewise_backend import _torch
from piecewise_backend.canonical import DistinctPiece
from piecewise_backend.fakes import piece_inputs
from piecewise_backend.sizes import Sizes, TokenDim
from piecewise_backend.steps import leaves_of

_ALLOCATIONS = {
    "aten::empty",
    "aten::empty_like",
    "aten::empty_strided",
    "aten::new_empty",
    "aten::new_empty_strided",
}
_COLLECTIVES = {
    "_c10d_functional",
    "_c10d_functional_autograd",
    "_dtensor",
    "c10d",
    "c10d_functional",  # as traces of older programs have them
    "cplib",
    "symm_mem",
}


@dataclasses.dataclass(frozen=True, slots=True)
class PieceFacts:
    """What a piece does besides returning tensors."""

    mutated: frozenset[int]
    """Positions of the inputs that it writes to."""
    has_kernels: bool
    """False if it only allocates or takes views: an empty graph would be captured."""
    devices: frozenset[torch.device]
    """Devices of the tensors it touches."""
    undefined: frozenset[int]
    """Positions of the outputs that it allocates and never writes: a split op will."""
    collectives: frozenset[str]
    """Names of torch's own ops in it that wait for other ranks."""


class _KernelRecorder(TorchDispatchMode):
    """Notes operators that compute, and the devices of what they return."""

    supports_higher_order_operators = True  # `torch.cond` and the like

    def __init__(self) -> None:
        super().__init__()
        self.has_kernels = False
        self.devices: set[torch.device] = set()
        self.collectives: set[str] = set()
        self.allocated: set[int] = set()
        self.written: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(func, HigherOrderOperator):
            self.has_kernels = True
            return result
        if func.namespace in _COLLECTIVES:
            self.collectives.add(func._schema.name)
        self._note_writes(func._schema, args, kwargs or {})
        is_view = any(
            out.alias_info is not None and not out.alias_info.is_write
            for out in func._schema.returns
        )
        leaves = result if isinstance(result, tuple | list) else (result,)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        # Asking a fake tensor for its device, as below, is a call of `prim::device`.
        is_query = not tensors and not func._schema.is_mutable
        if func._schema.name in _ALLOCATIONS:
            self.allocated.add(result.untyped_storage()._cdata)
        elif not is_view and not is_query:
            self.has_kernels = True
        self.devices |= {tensor.device for tensor in tensors}
        return result

    def _note_writes(self, schema: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Versions are not enough: an op made by `Library.define`, or a write through `.data`,
        does not count one."""
        given = dict(zip((argument.name for argument in schema.arguments), args, strict=False))
        for argument in schema.arguments:
            value = (given | dict(kwargs)).get(argument.name)
            if argument.alias_info is not None and argument.alias_info.is_write:
                for leaf in leaves_of(value):
                    if isinstance(leaf, torch.Tensor):
                        self.written.add(leaf.untyped_storage()._cdata)


def find_facts(piece: DistinctPiece, token_dim: TokenDim, sizes: Sizes) -> PieceFacts:
    """Run a piece on fake tensors of the given sizes."""
    values = dict(zip(token_dim.symbols, sizes, strict=True))

    def number(expr: sympy.Expr) -> int:
        return int(expr.xreplace(values))

    with _torch.ordinary_tensors(), _torch.FakeTensorMode():
        inputs = piece_inputs(piece, number, int)
        tensors = {i: x for i, x in enumerate(inputs) if isinstance(x, torch.Tensor)}
        before = {i: x._version for i, x in tensors.items()}
        with _KernelRecorder() as recorder:
            outputs = piece.module.forward(*inputs)
    mutated = frozenset(
        i
        for i, x in tensors.items()
        if x._version != before[i] or x.untyped_storage()._cdata in recorder.written
    )
    devices = recorder.devices | {x.device for x in tensors.values()}
    undefined = frozenset(
        position
        for position, output in enumerate(outputs)
        if output.untyped_storage()._cdata in recorder.allocated - recorder.written
    )
    collectives = frozenset(recorder.collectives | _collectives_in(piece.module))
    return PieceFacts(mutated, recorder.has_kernels, frozenset(devices), undefined, collectives)


def _collectives_in(module: fx.GraphModule) -> set[str]:
    """Those in graphs that its ops run, `torch.cond` say, as well: no dispatcher looks into them.
    What an op does that torch takes apart is for the dispatcher to tell."""
    graphs = [inner.graph for inner in module.modules() if isinstance(inner, fx.GraphModule)]
    ops = [op for g in graphs for node in g.nodes for op in _torch.overloads_of(node.target) or ()]
    return {op._schema.name for op in ops if op.namespace in _COLLECTIVES}
