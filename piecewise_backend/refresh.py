"""What is refreshed before a step is replayed as one graph, and who waits for it.

In:  the hooks that the split ops of a graph were registered with, and a pool.
Out: what a plan calls before each replay, and how the split ops are called while it is recorded.
Knows nothing of streams.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch

from piecewise_backend.batch import BatchDescriptor
from piecewise_backend.graphs import GraphPool
from piecewise_backend.registry import traits_of
from piecewise_backend.split_ops import bind_split_op
from piecewise_backend.steps import SplitGraph, SplitOp


@dataclasses.dataclass(frozen=True, slots=True)
class Refresh:
    """The hooks of one captured step."""

    calls: tuple[Callable[[], object], ...]
    """To be called in this order before each replay. What runs on the update stream comes last,
    behind what the others launched."""
    first_reader: SplitOp | None
    """The first op that reads what is refreshed on the update stream."""
    _pool: GraphPool

    @classmethod
    def of(cls, split: SplitGraph, descriptor: BatchDescriptor, pool: GraphPool) -> Refresh:
        """Each hook once, in the order of the ops.

        Args:
            descriptor: what hooks are called with.
            pool: of the graph that is going to be captured.
        """
        hooks = [
            (op, hook) for op in split.split_ops for hook in traits_of(op.op_name).before_replay
        ]
        # The current stream is early enough for every op, the update stream is not.
        before = dict.fromkeys(hook.function for _, hook in hooks if not hook.is_on_update_stream)
        beside = {hook.function: None for _, hook in hooks if hook.function not in before}
        calls: list[Callable[[], object]] = [functools.partial(f, descriptor) for f in before]
        if beside:
            functions = [functools.partial(function, descriptor) for function in beside]
            calls.append(functools.partial(pool.refresh, functions))
        first_reader = next((op for op, hook in hooks if hook.function in beside), None)
        return cls(tuple(calls), first_reader, pool)

    def run(self) -> None:
        """Refresh for a step without a graph.

        Raises:
            Exception: whatever a hook does.
        """
        for call in self.calls:
            call()
        if self.first_reader is not None:
            self._pool.wait_for_refresh()

    def bind(self, op: SplitOp, device: torch.device) -> Callable[..., Any]:
        """The function that a plan calls for a split op while it is recorded."""
        function = bind_split_op(op, device)
        if op is not self.first_reader:
            return function
        wait = self._pool.wait_for_refresh

        def call(*args: Any, **kwargs: Any) -> Any:
            wait()
            return function(*args, **kwargs)

        return call
