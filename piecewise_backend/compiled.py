"""A split graph with everything known about its pieces: what is compiled, captured and run.

In:  a `SplitGraph` and the arguments of its trace.
Out: `CompiledGraph`.
Knows nothing of captures.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from piecewise_backend.canonical import DistinctPiece, Instance, identify
from piecewise_backend.compiler import PieceCompiler, Wanted
from piecewise_backend.errors import ContractError, SplitError
from piecewise_backend.facts import PieceFacts, find_facts
from piecewise_backend.passes import PassRecord, merged
from piecewise_backend.sizes import Layout, SizeFunction, Sizes, TokenDim, find_token_dim
from piecewise_backend.steps import SplitGraph
from piecewise_backend.version import Call, Numbers
from piecewise_backend.versions import Choice, Versions, numbers_of


@dataclasses.dataclass(frozen=True, slots=True)
class CompiledGraph:
    """The pieces of one graph, compiled for the sizes of its trace."""

    split: SplitGraph
    token_dim: TokenDim
    instances: tuple[Instance, ...]
    """One per piece, in order."""
    versions: tuple[Versions, ...]
    """One per distinct piece."""
    facts: tuple[PieceFacts, ...]
    """One per distinct piece."""
    layouts: dict[str, Layout]
    """Of every tensor of the graph that a piece or a split op reads or writes."""
    device: torch.device
    """Where its tensors live."""
    numbers: tuple[SizeFunction, ...]
    """For each instance, its integer inputs."""
    position_of: dict[int, int]
    """Step index of a piece -> its position among the instances."""
    compiler: PieceCompiler
    graph_passes: tuple[PassRecord, ...] = ()
    """What passes did before the graph was split."""
    uncut: str = ""
    """Which op stays inside of a piece for which pass, or why it does not."""

    @property
    def pieces(self) -> tuple[DistinctPiece, ...]:
        """The distinct pieces."""
        return tuple(versions.piece for versions in self.versions)

    def pass_records(self) -> dict[str, tuple[PassRecord, ...]]:
        """What passes did, by the graph that they ran over; versions of a piece added up."""
        found = {"the whole graph": self.graph_passes} if self.graph_passes else {}
        for versions in self.versions:
            if runs := [version.passes for version in versions.compiled if version.passes]:
                found[f"piece {versions.piece.index}"] = merged(runs)
        return found

    def numbers_at(self, position: int, sizes: Sizes) -> Numbers:
        """The integer inputs of an instance at these sizes."""
        return tuple(int(number) for number in self.numbers[position](sizes))

    def choice_at(self, position: int, sizes: Sizes) -> Choice:
        """What serves an instance at these sizes; compiles if need be."""
        versions = self.versions[self.instances[position].distinct.index]
        return versions.choose(self.numbers_at(position, sizes))

    def call_at(self, position: int, sizes: Sizes) -> Call:
        """What to call for an instance at these sizes."""
        return self.choice_at(position, sizes).call

    def choices_at(self, sizes: Sizes) -> tuple[Choice, ...]:
        """What serves every instance at these sizes."""
        return tuple(self.choice_at(position, sizes) for position in range(len(self.instances)))

    def as_whole_step(self) -> CompiledGraph:
        """The same, for batches in which every size is the token count.

        Sizes that only split ops see are symbols of their own, if the fake implementations do
        not say that they are equal; pieces are not concerned.
        """
        every = frozenset(range(len(self.token_dim.symbols)))
        return dataclasses.replace(
            self,
            token_dim=dataclasses.replace(self.token_dim, tokens=every),
            layouts={
                name: dataclasses.replace(layout, is_dynamic=layout.is_varying)
                for name, layout in self.layouts.items()
            },
        )

    def require_alike(self, state: Mapping[int, Any]) -> None:
        """What replaced state of the model is of the kind that the trace saw.

        Args:
            state: tensors by position among the inputs.

        Raises:
            ContractError: another dtype, device, rank, or size that does not vary.
        """
        for position, value in state.items():
            item = self.split.inputs[position]
            example = item.example
            if not isinstance(example, torch.Tensor):
                continue
            sizes = zip(example.shape, value.shape, strict=False)
            is_alike = (
                (value.dtype, value.device, value.dim())
                == (example.dtype, example.device, example.dim())
            ) and all(isinstance(a, torch.SymInt) or a == b for a, b in sizes)
            if not is_alike:
                raise ContractError(
                    f"{item.source} was a {example.dtype} tensor of shape {tuple(example.shape)} "
                    f"on {example.device} when the model was traced, and is now {value.dtype} of "
                    f"shape {tuple(value.shape)} on {value.device}; compile the model anew"
                )

    def static_num_tokens(self, args: Sequence[Any]) -> int:
        """What a graph without varying dimensions takes for tokens: its first input's rows."""
        for item, value in zip(self.split.inputs, args, strict=True):
            if not item.is_static and isinstance(value, torch.Tensor) and value.dim() > 0:
                return value.size(0)
        return 1


def compile_graph(
    split: SplitGraph,
    example_args: Sequence[Any],
    compiler: PieceCompiler,
    graph_passes: tuple[PassRecord, ...] = (),
    uncut: str = "",
) -> CompiledGraph:
    """Compile every distinct piece once, at the sizes of the trace.

    Raises:
        SplitError: tensors on more than one device.
    """
    instances = identify(split.pieces)
    token_dim = find_token_dim(split, example_args)
    sizes = token_dim.hints(example_args)
    distinct = list({instance.distinct.index: instance.distinct for instance in instances}.values())
    facts = tuple(find_facts(piece, token_dim, sizes) for piece in distinct)
    compiled = CompiledGraph(
        split=split,
        token_dim=token_dim,
        instances=instances,
        versions=tuple(Versions(piece, compiler) for piece in distinct),
        facts=facts,
        layouts=_layouts(split, token_dim),
        device=_only_device(split, facts),
        numbers=tuple(SizeFunction(split.symbols, numbers_of(i.inputs)) for i in instances),
        position_of={instance.piece.index: i for i, instance in enumerate(instances)},
        compiler=compiler,
        graph_passes=graph_passes,
        uncut=uncut,
    )
    compiler.prepare(_wanted_at(compiled, sizes))
    compiled.choices_at(sizes)
    return compiled


def _wanted_at(graph: CompiledGraph, sizes: Sizes) -> list[Wanted]:
    found: dict[int, Wanted] = {}
    for position, instance in enumerate(graph.instances):
        numbers, piece = graph.numbers_at(position, sizes), instance.distinct
        found.setdefault(piece.index, Wanted(piece, numbers))
    return list(found.values())


def _layouts(split: SplitGraph, token_dim: TokenDim) -> dict[str, Layout]:
    examples = {item.name: item.example for item in split.inputs}
    for step in split.steps:
        examples.update(step.examples)
    return {
        name: Layout.of(example, token_dim)
        for name, example in examples.items()
        if isinstance(example, torch.Tensor)
    }


def _only_device(split: SplitGraph, facts: Sequence[PieceFacts]) -> torch.device:
    devices = {device for fact in facts for device in fact.devices}
    if len(devices) > 1:
        where = {
            str(item.example.device): item.source
            for item in split.inputs
            if isinstance(item.example, torch.Tensor)
        }
        raise SplitError(
            f"the graph has tensors on {sorted(map(str, devices))} (for example {where}); move "
            "the model and its inputs to one device"
        )
    if devices:
        return devices.pop()
    tensors = [i.example for i in split.inputs if isinstance(i.example, torch.Tensor)]
    return tensors[0].device if tensors else torch.device("cpu")
