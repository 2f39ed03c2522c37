"""Pattern matching, order and fake values of FX graphs, as passes need them."""

from __future__ import annotations

import copy
import functools
import inspect
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch._inductor.config as inductor_config
from torch import fx, nn
from torch._dynamo.utils import counters
from torch._inductor import pattern_matcher
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.fx_passes import joint_graph
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch._subclasses.functional_tensor import FunctionalTensorMode, dispatch_functionalize
from torch.fx import subgraph_rewriter
from torch.utils import _pytree as pytree
from torch.utils._ordered_set import OrderedSet

from piecewise_backend._torch.calls import may_write

Rewriter = Callable[[fx.Graph], int]
VALUE_KEYS = ("val", "example_value")
"""Where a node keeps its fake value: inside Inductor, and in Dynamo's graph."""


def positional_parameters(function: Callable[..., Any]) -> list[str]:
    """The names of the parameters of a pattern."""
    return list(inspect.signature(function).parameters)


def value_of(node: fx.Node) -> Any:
    """The fake tensor or symbolic number that a node stands for, or None if unknown."""
    return next((node.meta[key] for key in VALUE_KEYS if key in node.meta), None)


def has_value(node: fx.Node) -> bool:
    """It is known what the node stands for, be it None."""
    return any(key in node.meta for key in VALUE_KEYS)


def piece_rewriter(
    pattern: Callable[..., Any],
    replacement: Callable[..., Any],
    example_inputs: Callable[[], Sequence[Any]],
    scalars: Mapping[str, float | int],
    requires: Callable[..., bool] | None,
) -> Rewriter:
    """A rewriter of graphs inside Inductor, with Inductor's own matcher.

    The pattern is traced to the ops that the running version of torch makes of it, so that it
    looks like the graphs it is to be found in. There is no public spelling.
    """
    names = positional_parameters(pattern)
    matcher = pattern_matcher.PatternMatcherPass()

    numbers: dict[str, Any] = {}

    # The matcher traces the pattern anew for what it has found, and then asks whether to go on.
    @functools.wraps(pattern)
    def remembering(*args: Any) -> Any:
        numbers.update((n, arg) for n, arg in zip(names, args, strict=True) if n in scalars)
        return pattern(*args)

    def accepts(match: Any) -> bool:
        tensors = {n: fx.map_arg(match.kwargs[n], value_of) for n in names if n not in scalars}
        return requires is None or bool(requires(**tensors, **numbers))

    # A parameter that is 1 in the example would be gone with the multiplication by it.
    can_be_simplified = not {0, 1}.intersection(scalars.values())
    with torch.no_grad(), torch._guards.tracing(None), unset_fake_temporarily(), FakeTensorMode():
        given = iter(example_inputs())
        pattern_matcher.register_replacement(
            remembering,
            replacement,
            [next(given) for name in names if name not in scalars],
            _traced if can_be_simplified else pattern_matcher.fwd_only,
            [matcher],
            extra_check=accepts,
            scalar_workaround=dict(scalars) or None,
        )
    return matcher.apply


def _traced(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.GraphModule:
    """The graph of a function as passes in Inductor get to see it; see `simplified`."""
    module = pattern_matcher.fwd_only(fn, *args, **kwargs)
    return fx.GraphModule(module, simplified(module.graph) or module.graph)


def simplified(pattern: fx.Graph) -> fx.Graph | None:
    """A pattern without what Inductor takes out of graphs; None if there is nothing of the kind.

    Inductor's matcher traces patterns as they are, while since torch 2.14 factors of 1 and
    summands of 0 are gone from graphs by then: `x * (1.0 / scale)` would not be found. Ends when
    the matcher simplifies both.
    """
    if not inductor_config.joint_graph_constant_folding:
        return None
    module = fx.GraphModule(nn.Module(), copy.deepcopy(pattern))
    joint_graph.remove_no_ops(module, OrderedSet(), OrderedSet())
    module.graph.eliminate_dead_code()
    return module.graph if len(module.graph.nodes) < len(pattern.nodes) else None


def trace_pattern(
    function: Callable[..., Any], example_inputs: Callable[[], Sequence[Any]]
) -> fx.Graph:
    """The graph of a function, decomposed as Inductor's matcher decomposes its patterns.

    There is no public spelling. Ops that write, which some decompositions have too, are made
    functional as they are in the graphs that Inductor gives to passes.
    """
    with torch.no_grad(), torch._guards.tracing(None), unset_fake_temporarily(), FakeTensorMode():
        inputs = list(example_inputs())
        module = pattern_matcher.fwd_only(function, inputs)
        targets = [node.target for node in module.graph.nodes]
        if any(isinstance(t, torch._ops.OpOverload) and t._schema.is_mutable for t in targets):
            functional = dispatch_functionalize(module, FunctionalTensorMode())
            module = pattern_matcher.fwd_only(functional, inputs)
        return module.graph


def graph_rewriter(
    pattern: Callable[..., Any],
    replacement: Callable[..., Any],
    example_inputs: Callable[[], Sequence[Any]],
    scalars: Mapping[str, float | int],
    requires: Callable[..., bool] | None,
) -> Rewriter:
    """A rewriter of graphs as Dynamo traced them, with the matcher of torch.fx.

    Those graphs write in place, which that matcher does not see. It computes the replacement
    where the results are first read, so nothing may write between what was found and there.
    """

    def accepts(match: Any, graph: fx.Graph, pattern_graph: fx.Graph) -> bool:
        if any(map(may_write, _passed_over(match, graph))):
            return False
        parameters = [n for n in pattern_graph.nodes if n.op == "placeholder"]
        found = {
            str(node.target): fx.map_arg(match.nodes_map[node], value_of) for node in parameters
        }
        return requires is None or bool(requires(**found))

    wanted = fx.symbolic_trace(pattern).graph
    _leave_defaults_out(wanted)

    def rewrite(graph: fx.Graph) -> int:
        module = graph.owning_module
        assert module is not None
        replaced = subgraph_rewriter.replace_pattern_with_filters(
            module, wanted, replacement, match_filters=[accepts]
        )
        return len(replaced)

    return rewrite


def _passed_over(match: Any, graph: fx.Graph) -> list[fx.Node]:
    """The nodes between those of a match, and up to where its replacement goes."""
    position = {node: i for i, node in enumerate(graph.nodes)}
    inside = set(match.nodes_map.values()).difference(match.placeholder_nodes)
    places = [position[node] for node in inside if node in position]
    readers = [position[user] for node in match.returning_nodes for user in node.users]
    end = max([*places, *([min(readers)] if readers else [])])
    return [n for n, i in position.items() if min(places) < i < end and n not in inside]


def _leave_defaults_out(graph: fx.Graph) -> None:
    """Write calls as a user does, `silu(x)`: the tracer of torch.fx adds `inplace=False`."""
    for node in graph.nodes:
        if node.op == "call_function" and inspect.isfunction(node.target):
            known = inspect.signature(node.target).parameters
            node.kwargs = {
                name: value
                for name, value in node.kwargs.items()
                if name not in known or known[name].default is not value
            }


class GraphPass(CustomGraphPass):
    """A function over a graph as Inductor takes it, with a key for its caches."""

    def __init__(self, function: Callable[[fx.Graph], None], key: str) -> None:
        self._function = function
        self._key = key

    def __call__(self, graph: fx.Graph) -> None:
        """Run the function."""
        self._function(graph)

    def uuid(self) -> str:
        """The key."""
        return self._key

    def __reduce__(self) -> tuple[Any, ...]:
        """Inductor pickles its options to hash them; the function is not part of that."""
        return (GraphPass, (_nothing, self._key))


def _nothing(graph: fx.Graph) -> None:
    return None


def count_in_inductor(name: str, number: int) -> None:
    """Add to a counter that Inductor keeps with what it caches.

    When it takes a graph from its cache, no pass runs, but the counters grow as if they had.
    """
    counters["inductor"][name] += number


def inductor_counts(prefix: str) -> dict[str, int]:
    """Inductor's counters whose names start so."""
    found = counters["inductor"].items()
    return {name.removeprefix(prefix): n for name, n in found if name.startswith(prefix)}


def sort_nodes(graph: fx.Graph) -> None:
    """Bring nodes into an order in which they can run; fails if there is none."""
    pattern_matcher.stable_topological_sort(graph)


def fake_mode_of(graph: fx.Graph) -> FakeTensorMode | None:
    """The mode that the values of a graph live in."""
    values = (value_of(node) for node in graph.nodes)
    return next((v.fake_mode for v in values if isinstance(v, FakeTensor)), None)


def complete_value(node: fx.Node, mode: FakeTensorMode) -> None:
    """Compute the value of a node that has none, as one that a pass has just made."""
    if has_value(node) or node.op in ("placeholder", "output"):
        return
    key = next((k for n in node.graph.nodes for k in VALUE_KEYS if k in n.meta), VALUE_KEYS[0])
    if node.op == "get_attr":
        held = operator.attrgetter(str(node.target))(node.graph.owning_module)
        if isinstance(held, torch.Tensor):
            node.meta[key] = mode.from_tensor(held)
    elif node.op in ("call_function", "call_method"):
        node.meta[key] = fake_call(node, mode)


def fake_call(node: fx.Node, mode: FakeTensorMode) -> Any:
    """What a node computes from the values of its inputs."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), value_of)
    with mode, torch.no_grad():
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        assert callable(node.target)
        return node.target(*args, **kwargs)


def has_order(node: fx.Node) -> bool:
    """Running this node earlier or not at all may be noticed: it writes, or draws numbers."""
    target = node.target
    tags = getattr(target, "tags", ())
    return node.is_impure() or torch.Tag.nondeterministic_seeded in tags


def functionalized_writes(node: fx.Node) -> Iterator[fx.Node]:
    """The tensors that a functionalized node would write if it ran in place."""
    ops = torch.ops.higher_order
    if node.target is ops.auto_functionalized_v2:
        yield from node.kwargs.get("_all_bases", ())  # type: ignore[misc]
    elif node.target is ops.auto_functionalized:
        schema = node.args[0]._schema  # type: ignore[union-attr]
        written = [node.kwargs.get(a.name) for a in schema.arguments if a.is_write]
        yield from (leaf for leaf in pytree.tree_leaves(written) if isinstance(leaf, fx.Node))


def target_name(node: fx.Node) -> str:
    """What a node calls, for people: `aten.mul.Tensor`, `add`, `softmax`."""
    target = node.target
    if isinstance(target, str | torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return str(target)
    return str(getattr(target, "__name__", target))
