"""Dynamo's names of what a trace read, as expressions over the parameters of a call.

In:  a name such as `L['batch'].ids`.
Out: `p_batch.ids`, for generated code; `batch.ids`, for people.
"""

from __future__ import annotations

import ast
import enum
import functools
import re
from typing import TypeGuard

import torch

PLAIN_VALUES = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, enum.Enum)
"""What becomes part of the code that Dynamo writes."""

_PREFIX = "p_"  # keeps the user's names apart from ours

# Nearly all sources are chains of look-ups. An attention layer has about a hundred, most of each
# like the one before: Python's parser would take half a second for 80 layers.
_CHAIN = re.compile(r"(?:L\['([^'\\]*)'\]|L|G)(?:\.[a-zA-Z_]\w*|\['[^'\\]*'\]|\[\d+\])*", re.ASCII)
_LAST_LINK = re.compile(r"(.*)(?:\.(\w+)|\['([^'\\]*)'\]|\[(\d+)\])", re.ASCII | re.DOTALL)
# More than a trace has: what is asked for in turns and does not fit is never found again.
_MOST_KEPT = 2**16


def parameter_name(name: str) -> str:
    """A parameter of the user's function in generated code."""
    return _PREFIX + name


def user_name(expression: str) -> str:
    """An expression over parameters as the user would write it."""
    return expression.removeprefix(_PREFIX).replace("torch_.", "torch.")


def parameter_expression(source: str) -> str:
    """Dynamo's name of a source, `L['batch'].ids`, over the parameters: `p_batch.ids`."""
    return ast.unparse(_Renamed().visit(ast.parse(source, mode="eval")))


class _Renamed(ast.NodeTransformer):
    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        if _is_local(node):
            return ast.Name(parameter_name(str(node.slice.value)), ast.Load())
        self.generic_visit(node)
        return node


@functools.lru_cache(_MOST_KEPT)
def parsed(source: str) -> ast.expr:
    """A source as a tree, which nobody is to change: several ask about each, and trees share what
    they start with.

    Raises:
        SyntaxError: not every name of Dynamo's is an expression.
    """
    links = _LAST_LINK.fullmatch(source) if _CHAIN.fullmatch(source) else None
    if links is None:
        return ast.parse(source, mode="eval").body
    start, attribute, key, index = links.groups()
    if attribute is not None:
        return ast.Attribute(parsed(start), attribute, ast.Load())
    return ast.Subscript(
        parsed(start), ast.Constant(key if index is None else int(index)), ast.Load()
    )


@functools.lru_cache(_MOST_KEPT)
def text_of(source: ast.expr) -> str:
    """A source as text again."""
    match source:
        case ast.Name(name):
            return name
        case ast.Attribute(ast.Name() | ast.Attribute() | ast.Subscript(), name):
            return f"{text_of(source.value)}.{name}"
        case ast.Subscript(ast.Name() | ast.Attribute() | ast.Subscript(), ast.Constant(key)):
            return f"{text_of(source.value)}[{key!r}]"
    return ast.unparse(source)


def root_of(source: str) -> str | None:
    """The local variable that a source starts from, or None: `self` of `L['self'].weight`."""
    if (chain := _CHAIN.fullmatch(source)) is not None:
        name: str | None = chain.group(1)
        return name
    for node in ast.walk(parsed(source)):
        if _is_local(node):
            return str(node.slice.value)
    return None


def is_plain(source: str) -> bool:
    """Attributes and items of locals and globals, and nothing that has to be called."""
    if _CHAIN.fullmatch(source):
        return True
    try:
        tree = parsed(source)
    except SyntaxError:
        return False
    while isinstance(tree, ast.Attribute | ast.Subscript):
        if isinstance(tree, ast.Subscript) and not isinstance(tree.slice, ast.Constant):
            return False
        tree = tree.value
    return isinstance(tree, ast.Name) and tree.id in ("L", "G")


def _is_local(node: ast.AST) -> TypeGuard[_Local]:
    """`L['name']`."""
    return (
        isinstance(node, ast.Subscript)
        and isinstance(node.value, ast.Name)
        and node.value.id == "L"
        and isinstance(node.slice, ast.Constant)
    )


class _Local(ast.Subscript):
    slice: ast.Constant
