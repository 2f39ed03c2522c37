"""A split graph as text: the table of its pieces, and a Python file.

In:  a split graph and its distinct pieces.
Out: text for dumps, reports and tests.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from piecewise_backend.canonical import Instance
from piecewise_backend.steps import Host, Piece, SplitGraph, SplitOp, Step, Value, map_leaves

_HEADER = '''"""Computation graph, as cut by piecewise_backend.

{table}

Each piece is compiled as one and captured into one graph per size; a split op runs in between.
Written for reading; importing it needs the libraries that define the ops it calls.
"""

import torch
from torch import device, inf, nan  # noqa: F401

'''


def type_text(example: Any) -> str:
    """`float32[s0, 64]` for a tensor, the expression for a number."""
    if not isinstance(example, torch.Tensor):
        return str(example)
    sizes = ", ".join(str(size) for size in example.shape)
    return f"{str(example.dtype).removeprefix('torch.')}[{sizes}]"


def piece_table(split: SplitGraph, instances: Sequence[Instance]) -> str:
    """One line per step: what it is, which distinct piece serves it, how large it is."""
    distinct = {instance.piece.index: instance.distinct.index for instance in instances}
    rows = [("step", "kind", "distinct", "nodes", "returns")]
    for step in split.steps:
        returns = _grouped([type_text(step.examples[name]) for name in step.outputs if name])
        if isinstance(step, Piece):
            nodes = sum(n.op not in ("placeholder", "output") for n in step.module.graph.nodes)
            rows.append((str(step.index), "piece", str(distinct[step.index]), str(nodes), returns))
        else:
            rows.append((str(step.index), f"split op {step.op_name}", "", "1", returns or "-"))
    return align(rows)


def _grouped(types: Sequence[str]) -> str:
    """`2 x float32[s0, 64], float32[s0, 8]`"""
    counts = Counter(types)
    return ", ".join(f"{n} x {text}" if n > 1 else text for text, n in counts.items())


def align(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells as text with aligned columns, a rule under the first."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def sketch(split: SplitGraph) -> str:
    """The cut in a few words per step, for golden tests."""
    return "\n".join(_sketch_step(step) for step in split.steps)


def _sketch_step(step: Step) -> str:
    if isinstance(step, SplitOp):
        return f"{step.index} split op: {step.op_name}"
    called = [n for n in step.module.graph.nodes if n.op.startswith("call_")]
    names = [n.target if isinstance(n.target, str) else n.target.__name__ for n in called]
    return f"{step.index} piece: {' '.join(names)}"


def render_split_graph(split: SplitGraph, instances: Sequence[Instance]) -> str:
    """The whole of a graph as a Python file."""
    parts = [_HEADER.format(table=piece_table(split, instances))]
    parts += [_render_piece(step) for step in split.steps if isinstance(step, Piece)]
    parts.append(_render_stitching(split))
    return "\n".join(parts)


def _render_piece(piece: Piece) -> str:
    text = piece.module.print_readable(print_output=False)
    text = re.sub(
        r"^class .*:$", f"class Piece{piece.index}(torch.nn.Module):", text, count=1, flags=re.M
    )
    return text.strip() + "\n\n"


def _render_stitching(split: SplitGraph) -> str:
    inputs = [
        f"    {item.name},  # {type_text(item.example)}  {item.source}" for item in split.inputs
    ]
    lines = ["def computation_graph(", *inputs, "):"]
    lines += [f"    {line}" for step in split.steps for line in _render_step(step)]
    lines.append(f"    return {_text(split.outputs)}")
    return "\n".join(lines) + "\n"


def _render_step(step: Step) -> list[str]:
    targets = ", ".join(name or "_" for name in step.outputs)
    types = ", ".join(type_text(step.examples[name]) for name in step.outputs if name)
    comment = f"  # {types}" if types else ""
    if isinstance(step, Piece):
        left = f"{targets}, = " if len(step.outputs) == 1 else f"{targets} = " if targets else ""
        args = ", ".join(_text(ref) for ref in step.inputs)
        return [f"{left}Piece{step.index}()({args}){comment}"]
    left = f"{targets} = " if any(step.outputs) else ""
    args = ", ".join(
        [*(_text(arg) for arg in step.args), *(f"{k}={_text(v)}" for k, v in step.kwargs.items())]
    )
    name = f"torch.ops.{step.op_name.replace('::', '.')}"
    return [f"# {step.location}", f"{left}{name}({args}){comment}"]


class _Text:
    """Prints as the text it holds, so that nested arguments print as source."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def _text(structure: Any) -> str:
    def leaf(ref: Any) -> Any:
        if isinstance(ref, Value):
            return _Text(ref.name)
        if isinstance(ref, Host):
            return _Text(str(ref.expr))
        return ref if isinstance(ref, bool | int | float | str | None) else _Text(repr(str(ref)))

    return repr(map_leaves(structure, leaf))
