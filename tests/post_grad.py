"""The graph that Inductor gives to passes, rewritten and run as it stands: no code is made."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._inductor.config as inductor_config
from torch import Tensor, fx
from torch._inductor.compile_fx import compile_fx

from piecewise_backend import _torch
from piecewise_backend.passes import Pass, PassList, extended, passes_for
from piecewise_backend.passes.fusions import FUSIONS, ONE_ROW


class SeenError(Exception):
    """The passes ran: nothing more is wanted of Inductor."""


@dataclasses.dataclass(frozen=True, slots=True)
class Rewritten:
    """What passes made of a function."""

    module: fx.GraphModule
    inputs: list[Any]
    matches: dict[str, int]
    """Of the fusions that matched, without the `fuse_` in their names."""

    def ops(self) -> list[str]:
        """The ops that are called, without namespace and overload."""
        called = (n for n in self.module.graph.nodes if n.op == "call_function")
        return [_torch.target_name(n).split(".")[-2:][0] for n in called]

    def calls(self, op: str) -> list[fx.Node]:
        """The calls of a fused op."""
        target = getattr(torch.ops.piecewise, op).default
        return list(self.module.graph.find_nodes(op="call_function", target=target))

    def run(self) -> list[Any]:
        """The results for the arguments that were given."""
        found = self.module(*self.inputs)
        return list(found) if isinstance(found, tuple | list) else [found]


def rewritten(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    *,
    only: str | None = None,
    num_dynamic: int = 1,
    more: Sequence[Pass] = (),
) -> Rewritten:
    """Fuse in what Inductor makes of `function`.

    Args:
        function: compiled as it is, without gradients.
        args: of these, tensors of at least two dimensions have the token count as their first.
        only: the one fusion to run; all if not given.
        num_dynamic: 0: token counts are not symbolic.
        more: passes beside the fusions.
    """
    names = [f"fuse_{only}"] if only else list(FUSIONS)
    chosen = extended(passes_for((), dict.fromkeys(names, True)), more)
    passes = PassList(chosen, validate=True)
    seen: list[Rewritten] = []
    inputs: list[Any] = []
    known = {*FUSIONS, *ONE_ROW}

    def look(graph: fx.Graph) -> None:
        records = passes.run(graph, "a test")
        found = {r.name.removeprefix("fuse_"): r.matches for r in records if r.name in known}
        module = fx.GraphModule(graph.owning_module, graph)  # type: ignore[arg-type]
        seen.append(Rewritten(module, inputs, {name: n for name, n in found.items() if n}))
        raise SeenError

    def backend(gm: fx.GraphModule, given: list[Any]) -> Any:
        inputs[:] = [int(item) if isinstance(item, torch.SymInt) else item for item in given]
        return compile_fx(gm, given)

    for arg in args:
        if num_dynamic and isinstance(arg, Tensor) and arg.dim() > 1 and arg.shape[0] > 1:
            torch._dynamo.maybe_mark_dynamic(arg, 0)
    hook = _torch.GraphPass(look, "")
    torch._dynamo.reset()
    with inductor_config.patch(post_grad_custom_post_pass=hook, fx_graph_cache=False):
        try:
            with torch.no_grad():
                torch.compile(function, fullgraph=True, backend=backend)(*args)
        except Exception:
            if not seen:
                raise
    return seen[0]
