"""Write the straight-line function of a step, and compile it.

In:  steps of a split graph, and what each of them calls.
Out: `Plan`: a python function and its source.
Knows nothing of how pieces were compiled or captured.

Two kinds. `dynamic_plan` runs compiled pieces and split ops for any size. A captured plan,
written by `PlanWriter` while a size is captured, replays graphs: every address is known by
then, so nothing is looked up - bound replays, bound split ops, and `rows`, the views of the
static buffers that the split ops are given, prepared once per token count.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy
import torch

from piecewise_backend.canonical import Instance
from piecewise_backend.split_ops import bind_split_op
from piecewise_backend.steps import Constant, Host, SplitGraph, SplitOp, Value, map_leaves


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """A generated function with the source it was made from."""

    function: Callable[..., tuple[Any, ...]]
    source: str


class Source:
    """Lines of a function under construction, and the objects it refers to."""

    def __init__(self, signature: str) -> None:
        self.signature = signature
        self.lines: list[str] = []
        self.names: dict[str, Any] = {}

    def bind(self, value: Any, prefix: str = "k") -> str:
        """Name an object that the function uses."""
        name = f"{prefix}{len(self.names)}"
        self.names[name] = value
        return name

    def add(self, line: str) -> None:
        """Append a statement."""
        self.lines.append(line)

    def expression(self, structure: Any, leaf: Callable[[Any], str]) -> str:
        """Nested arguments as source text."""
        nested = functools.partial(self.expression, leaf=leaf)
        if isinstance(structure, tuple):
            return f"({''.join(f'{nested(item)}, ' for item in structure)})"
        if isinstance(structure, list):
            return f"[{', '.join(map(nested, structure))}]"
        if isinstance(structure, dict):
            return f"{{{', '.join(f'{k!r}: {nested(v)}' for k, v in structure.items())}}}"
        if isinstance(structure, slice):
            parts = (structure.start, structure.stop, structure.step)
            return f"slice({', '.join(map(nested, parts))})"
        if isinstance(structure, Value | Host | Constant):
            return leaf(structure)
        if structure is None or isinstance(structure, bool | int | str):
            return repr(structure)
        return self.bind(structure)

    def call(self, op: SplitOp, function: str, leaf: Callable[[Any], str]) -> str:
        """The call of a split op as source text."""
        args = [self.expression(arg, leaf) for arg in op.args]
        args += [f"{name}={self.expression(arg, leaf)}" for name, arg in op.kwargs.items()]
        return f"{function}({', '.join(args)})"

    def build(self, title: str) -> Plan:
        """Compile what was written."""
        body = "\n".join(f"    {line}" for line in self.lines)
        source = f"def plan({self.signature}):\n{body}\n"
        namespace = dict(self.names)
        exec(compile(source, f"<piecewise {title}>", "exec"), namespace)
        return Plan(namespace.pop("plan"), source)  # popped: it must not hold itself


def unpack(names: Sequence[str], source: str) -> str:
    """`(a, b, ) = source`, for any number of names."""
    return f"({''.join(f'{name}, ' for name in names)}) = {source}"


def dynamic_plan(
    split: SplitGraph,
    instances: Sequence[Instance],
    device: torch.device,
    bind: Callable[[SplitOp, torch.device], Callable[..., Any]] = bind_split_op,
) -> tuple[Plan, tuple[sympy.Expr, ...]]:
    """The plan without graphs: `plan(args, numbers, calls)`.

    Args:
        bind: gives the function that is called for a split op.

    Returns:
        The plan and the expressions whose values it takes as `numbers`; `calls` are the
        callables of the pieces, in order.
    """
    code = Source("args, numbers, calls")
    locals_of = {item.name: f"args[{i}]" for i, item in enumerate(split.inputs)}
    exprs = _host_exprs(split, instances)
    code.add(unpack([f"n{i}" for i in range(len(exprs))], "numbers"))
    code.add(unpack([f"piece_{i}" for i in range(len(instances))], "calls"))
    dying = _dying_values(split)

    def leaf(ref: Any) -> str:
        if isinstance(ref, Value):
            return locals_of[ref.name]
        return f"n{exprs[ref.expr]}" if isinstance(ref, Host) else code.expression(ref.value, leaf)

    by_index = {instance.piece.index: i for i, instance in enumerate(instances)}
    for step in split.steps:
        results = [
            "_" if name is None else f"v{step.index}_{i}" for i, name in enumerate(step.outputs)
        ]
        if isinstance(step, SplitOp):
            function = code.bind(bind(step, device), "op_")
            call = code.call(step, function, leaf)
            is_packed = step.returns_tuple
        else:
            position = by_index[step.index]
            refs = instances[position].inputs
            call = f"piece_{position}({', '.join(code.expression(ref, leaf) for ref in refs)})"
            is_packed = True
        code.add(_assign(results, call, is_packed))
        locals_of.update(
            {name: results[i] for i, name in enumerate(step.outputs) if name is not None}
        )
        if gone := [locals_of[name] for name in dying[step.index]]:
            code.add(f"del {', '.join(gone)}")
    code.add(f"return {code.expression(split.outputs, leaf)}")
    return code.build("dynamic plan"), tuple(exprs)


def _assign(results: Sequence[str], call: str, is_packed: bool) -> str:
    if not results or all(result == "_" for result in results):
        return call
    return (
        f"({''.join(f'{r}, ' for r in results)}) = {call}"
        if is_packed
        else f"{results[0]} = {call}"
    )


def _host_exprs(split: SplitGraph, instances: Sequence[Instance]) -> dict[sympy.Expr, int]:
    """Every host expression of the graph, numbered."""
    found: dict[sympy.Expr, int] = {}

    def visit(ref: Any) -> None:
        if isinstance(ref, Host):
            found.setdefault(ref.expr, len(found))

    for instance in instances:
        map_leaves(instance.inputs, visit)
    for op in split.split_ops:
        map_leaves((op.args, dict(op.kwargs)), visit)
    map_leaves(split.outputs, visit)
    return found


def _dying_values(split: SplitGraph) -> Mapping[int, list[str]]:
    """For each step, the intermediate values that nobody reads after it."""
    inputs = {item.name for item in split.inputs}
    dying: dict[int, list[str]] = {step.index: [] for step in split.steps}
    for name, last in split.last_use().items():
        if name not in inputs and last < len(split.steps):
            dying[last].append(name)
    return dying
