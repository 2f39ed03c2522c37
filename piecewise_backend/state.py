"""The tensors that a graph reads from the state of a model: fetched once, checked on every call.

In:  how the user's program names them (`L['self']._modules['proj']._parameters['weight']`), and
     the objects that those names start from.
Out: `ModelState`: the tensors, and whether any of them was replaced by another.
Knows nothing of graphs.

Note [Links]
A name is a chain of look-ups. Whatever replaces a tensor - a new parameter, a buffer that
`module.to` moved, another layer, another list of caches - changes what one link of some chain
finds. So the links are what is checked: each of them once, however many names share it. Where
Python tells of changed dictionaries, links through those are checked only after a change.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Mapping, Sequence
from types import CellType
from typing import Any

from torch import nn

from piecewise_backend.dict_watch import DictWatch, dict_watcher, sees_attributes
from piecewise_backend.errors import ContractError
from piecewise_backend.sources import PLAIN_VALUES, parsed, text_of


class ModelState:
    """The tensors behind some names, in order."""

    def __init__(
        self,
        names: Mapping[int, str],
        namespace: Mapping[str, Any],
        cells: Mapping[str, CellType],
        aliases: Sequence[tuple[str, str]] = (),
        looked_at: Sequence[str] = (),
    ) -> None:
        """Fetch them.

        Args:
            names: python expressions by position in the graph's arguments.
            namespace: what the expressions start from: `L`, the arguments of the trace; `G`,
                the globals; helpers.
            cells: closure variables, which are named like arguments.
            aliases: pairs of names for one object.
            looked_at: names of what else the trace took something from. Plain values among it
                became part of the code, and must stay what they are.
        """
        self._expressions = {i: parsed(name) for i, name in names.items()}
        self._aliases = [(parsed(a), parsed(b)) for a, b in aliases]
        self._namespace = namespace
        self._cells = cells
        self._constants: list[tuple[ast.expr, Any]] = []
        self.values: dict[int, Any] = {}
        self.was_replaced: Callable[[], bool] = bool
        """Is any of the tensors another object than in `values`?"""
        self._find_constants(looked_at)
        self.fetch()

    def _find_constants(self, names: Sequence[str]) -> None:
        links = _Links(self._namespace, self._cells)
        for name in names:
            expression = parsed(name)
            try:
                value = links.follow(expression)
            except (AttributeError, KeyError, IndexError, TypeError):
                continue  # a guard may be about something that is not there
            if value is None or isinstance(value, PLAIN_VALUES):
                self._constants.append((expression, value))

    def fetch(self) -> None:
        """Look every tensor up again.

        Raises:
            ContractError: something that the trace read is gone.
        """
        links = _Links(self._namespace, self._cells)
        values = {i: _follow(links, expression) for i, expression in self._expressions.items()}
        for one, other in self._aliases:
            if _follow(links, one) is not _follow(links, other):
                raise ContractError(
                    f"{text_of(one)} and {text_of(other)} were one object when the model "
                    "was traced and are two now; compile the model anew"
                )
        for expression, traced in self._constants:
            value = _follow(links, expression)
            if not _is_same(value, traced):
                raise ContractError(
                    f"{text_of(expression)} was {traced!r} when the model was traced, which is "
                    f"part of the compiled code, and is now {value!r}; compile the model anew"
                )
        self.values, self.was_replaced = values, links.check()


def _is_same(value: Any, traced: Any) -> bool:
    """Also NaN; and a zero of the same sign."""
    if isinstance(traced, float | complex):
        return type(value) is type(traced) and repr(value) == repr(traced)
    return type(value) is type(traced) and bool(value == traced)


def _follow(links: _Links, expression: ast.expr) -> Any:
    try:
        return links.follow(expression)
    except (AttributeError, KeyError, IndexError, TypeError) as error:
        raise ContractError(
            f"{text_of(expression)} was read by the trace and is gone "
            f"({type(error).__name__}: {error}); compile the model anew"
        ) from error


class _Links:
    """Follows chains of look-ups, and writes the function that checks them. See Note [Links]."""

    def __init__(self, namespace: Mapping[str, Any], cells: Mapping[str, CellType]) -> None:
        self._namespace = dict(namespace)
        self._cells = cells
        self._found: dict[str, Any] = {}
        self._bound: dict[str, Any] = {}
        self._through_dicts: list[tuple[dict[Any, Any], str]] = []
        self._others: list[str] = []

    def follow(self, node: ast.expr) -> Any:
        """What an expression finds."""
        text = text_of(node)
        if text not in self._found:
            self._found[text] = self._look_up(node)
        return self._found[text]

    def _look_up(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Name):
            if node.id not in self._namespace:
                raise ContractError(
                    f"the graph takes {node.id}, which is made anew for every call, such as a "
                    "random number of Python's; draw it outside of the model and pass it in"
                )
            return self._namespace[node.id]
        if isinstance(node, ast.Attribute):
            return self._attribute(self.follow(node.value), node.attr)
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            return self._item(node.value, node.slice.value)
        code = compile(ast.Expression(node), "<source>", "eval")
        function = functools.partial(eval, code, self._namespace)
        return self._note(function(), f"{self._bind(function)}()")

    def _item(self, base: ast.expr, key: Any) -> Any:
        if isinstance(base, ast.Name) and base.id == "L":
            if key in self._cells:
                return self._attribute(self._cells[key], "cell_contents")
            return self._namespace["L"][key]  # an argument of the trace stays what it was
        holder = self.follow(base)
        return self._note(holder[key], f"{self._bind(holder)}[{key!r}]", holder)

    def _attribute(self, holder: Any, name: str) -> Any:
        own = holder.__dict__ if isinstance(holder, nn.Module) else {}
        if name in own:
            watched = own if sees_attributes() else None
            return self._note(own[name], f"{self._bind(own)}[{name!r}]", watched)
        # Of another object, a class, a slot or a property: asked for as the program does.
        return self._note(getattr(holder, name), f"{self._bind(holder)}.{name}")

    def _note(self, value: Any, expression: str, holder: object = None) -> Any:
        condition = f"{expression} is not {self._bind(value)}"
        if isinstance(holder, dict):
            self._through_dicts.append((holder, condition))
        else:
            self._others.append(condition)
        return value

    def _bind(self, value: Any) -> str:
        name = f"v{id(value)}"
        self._bound[name] = value
        return name

    def check(self) -> Callable[[], bool]:
        """A function that says whether any link finds something else by now."""
        conditions = [condition for _, condition in self._through_dicts]
        if (watcher := dict_watcher()) is None:
            return self._write([*conditions, *self._others])
        look, others = self._write(conditions), self._write(self._others)
        watch = DictWatch((holder for holder, _ in self._through_dicts), watcher)
        flag = watch.flag

        def was_replaced(watch: DictWatch = watch) -> bool:
            if flag[0]:
                flag[0] = False  # before looking: another thread may change something meanwhile
                if look():
                    flag[0] = True  # until the state is fetched anew
                    return True
            return others()

        return was_replaced

    def _write(self, conditions: list[str]) -> Callable[[], bool]:
        if not conditions:
            return bool  # never
        arguments = ", ".join(f"{name}={name}" for name in self._bound)  # faster than globals
        lines = "".join(f"        if {condition}: return True\n" for condition in conditions)
        source = (
            f"def was_replaced({arguments}):\n    try:\n{lines}"
            "    except (AttributeError, KeyError, IndexError):\n        return True\n"
            "    return False\n"
        )
        namespace = dict(self._bound)
        exec(compile(source, "<piecewise state>", "exec"), namespace)
        return namespace.pop("was_replaced")  # type: ignore[no-any-return]  # no cycle
