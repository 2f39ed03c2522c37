"""Symbolic sizes: expressions, their source text, and an environment to compile in."""

from __future__ import annotations

import ast
import contextlib
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import sympy
import torch
import torch.fx.experimental._config as _symbolic_config
from torch import fx
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, guard_scalar
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.printers import PythonPrinter
from torch.utils._sympy.reference import PythonReferenceAnalysis

from piecewise_backend._torch.reads import source_text


def one_trace_for_all_sizes() -> contextlib.AbstractContextManager[object]:
    """Dynamo's sizes stay symbolic at 0 and 1 too, so that one trace serves every count.

    `backed_size_oblivious` has no public spelling that covers sizes of user inputs.
    """
    patch: Any = _symbolic_config.patch  # type: ignore[attr-defined]  # added by torch at import
    return cast("contextlib.AbstractContextManager[object]", patch(backed_size_oblivious=True))


@contextlib.contextmanager
def tracing_once() -> Iterator[None]:
    """Dynamo traces as for a single trace that serves all.

    What earlier traces of the same source line saw (another instance of the class) does not
    make a size dynamic, and a float stays a constant though sizes are dynamic.
    """
    config: Any = torch._dynamo.config
    with (
        one_trace_for_all_sizes(),
        config.patch(automatic_dynamic_shapes=False, specialize_float=True),
    ):
        yield


def number_of(value: object) -> sympy.Expr | int | float | bool:
    """A python or symbolic number as a plain number, or as an expression over size symbols.

    A symbolic float that does not come from sizes is pinned to its value by a guard: Dynamo
    made it symbolic (`dynamic=True`) though it is a constant of the model, such as an epsilon.
    """
    if isinstance(value, torch.SymFloat | torch.SymInt | torch.SymBool):
        expr = value.node.expr
        if any(str(s).startswith("zf") for s in expr.free_symbols):
            return guard_scalar(value)
        if expr.free_symbols:
            return expr
        return value.node.pytype(expr)
    assert isinstance(value, int | float)
    return value


def hint_of(value: int | torch.SymInt) -> int:
    """The number itself, or the example value of a symbolic one."""
    return value if isinstance(value, int) else int(cast(int, value.node.hint))


def size_expr(value: int | torch.SymInt) -> sympy.Expr:
    """A dimension or stride as a sympy expression."""
    return sympy.sympify(number_of(value))


def symbols_of_size(size: torch.SymInt) -> dict[sympy.Symbol, str]:
    """The symbols of a size, and how Dynamo names what shows each.

    There is no public way from a size to the environment that it lives in.
    """
    env: Any = size.node.shape_env
    sources = env.var_to_sources
    symbols = sorted(size.node.expr.free_symbols, key=str)
    return {symbol: source_text(sources[symbol][0]) for symbol in symbols}


def may_be_same_size(a: int | torch.SymInt, b: int | torch.SymInt) -> bool:
    """Sizes may be written in several ways; where that cannot be told, their examples decide.

    A plain number is no symbol, whatever its example. Nothing is assumed about either.
    """
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    exprs = [sympy.sympify(x) if isinstance(x, int) else x.node.expr for x in (a, b)]
    if sympy.expand(exprs[0] - exprs[1]) == 0:
        return True
    if any(e.is_number for e in exprs) and any(e.is_symbol for e in exprs):
        return False
    hints = [x if isinstance(x, int) else x.node.hint for x in (a, b)]
    return None in hints or bool(hints[0] == hints[1])


def expr_source(expr: sympy.Expr, names: Mapping[sympy.Symbol, str]) -> str:
    """Python source of a size expression, with each symbol under the given name."""
    renamed = expr.xreplace({s: sympy.Symbol(n, integer=True) for s, n in names.items()})
    return str(PythonPrinter().doprint(renamed))


def emit_expr(expr: sympy.Expr, symbols: Mapping[sympy.Symbol, fx.Proxy]) -> Any:
    """Write a size expression as nodes of an FX graph; returns the proxy (or a number)."""
    return sympy_interp(_ProxyAnalysis, dict(symbols), expr)


class _ProxyAnalysis(PythonReferenceAnalysis):
    """torch's own converts operands to float to divide or round them; a proxy stays a proxy."""

    int_truediv = staticmethod(operator.truediv)
    truediv = staticmethod(operator.truediv)

    @staticmethod
    def ceil_to_int(a: fx.Proxy, dtype: torch.dtype) -> fx.Proxy:
        return a.tracer.create_proxy("call_function", math.ceil, (a,), {})

    @staticmethod
    def floor_to_int(a: fx.Proxy, dtype: torch.dtype) -> fx.Proxy:
        return a.tracer.create_proxy("call_function", math.floor, (a,), {})

    @staticmethod
    def round_to_int(a: fx.Proxy, dtype: torch.dtype) -> fx.Proxy:
        return a.tracer.create_proxy("call_function", round, (a,), {})

    @staticmethod
    def trunc_to_int(a: fx.Proxy, dtype: torch.dtype) -> fx.Proxy:
        return a.tracer.create_proxy("call_function", math.trunc, (a,), {})


def _conjuncts(code: str) -> list[str]:
    """Split a python expression at its outermost `and`s."""
    tree = ast.parse(code, mode="eval").body
    terms = tree.values if isinstance(tree, ast.BoolOp) and isinstance(tree.op, ast.And) else [tree]
    return [ast.unparse(term) for term in terms]


class SizeEnv:
    """A shape environment of our own, in which a piece is compiled.

    Compiling in Dynamo's environment would turn what Inductor assumes about the token count
    into guards of the user's function (and lose it once guards are skipped). Here the
    assumptions stay with the piece: see `conditions`.
    """

    def __init__(self) -> None:
        # Not specialised on 0 and 1: a version compiled for many tokens serves those as well
        # unless Inductor says otherwise, and then it says so in `conditions`.
        self.shape_env = ShapeEnv(specialize_zero_one=False, duck_shape=False)
        self.fake_mode = FakeTensorMode(shape_env=self.shape_env)
        self._symints: list[Any] = []

    def symbol(
        self, hint: int, limits: tuple[int, int] | None = None, *, name: str | None = None
    ) -> sympy.Symbol:
        """A new size symbol whose example value is `hint`.

        Args:
            limits: the smallest and largest value it may have; `conditions` has them.
            name: of what shows the size; torch makes the symbol's own name of it.
        """
        source = ConstantSource(name or f"size{len(self._symints)}")
        symbol = self.shape_env.create_symbol(
            hint, source, dynamic_dim=DimDynamic.DYNAMIC, positive=None if hint < 0 else True
        )
        self._symints.append(self.shape_env.create_symintnode(symbol, hint=hint, source=source))
        if limits is not None:
            low, high = limits
            self.shape_env.constrain_symbol_range(symbol, compiler_min=low, compiler_max=high)
        return symbol

    def constant(self, value: int) -> sympy.Integer:
        """A size that has this value and no other; `conditions` says so."""
        self._symints.append(value)
        return sympy.Integer(value)

    def symint(self, expr: sympy.Expr) -> int | torch.SymInt:
        """A SymInt of this environment for an expression over its symbols."""
        if not expr.free_symbols:
            return int(expr)
        return self.shape_env.create_symintnode(expr, hint=None)

    def conditions(self) -> tuple[str, ...]:
        """What was assumed so far about the symbols, one python condition each."""
        code = self.shape_env.produce_guards_expression(self._symints, ignore_static=False)
        if not code:
            return ()
        # `0 <= size` is the definition of a size, not an assumption.
        return tuple(part for part in _conjuncts(code) if not part.startswith("0 <= "))

    def holds(self, conditions: Sequence[str], sizes: Sequence[int]) -> str | None:
        """The first condition that the sizes (in order of creation) violate, or None."""
        for condition in conditions:
            if not self.shape_env.evaluate_guards_expression(condition, list(sizes)):
                return condition
        return None
