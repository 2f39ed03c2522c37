"""What one process has another one do: compile a version of a piece, or find the fastest.

In:  pieces, options; bytes.
Out: bytes, or why there are none; in the other process, what is done there.
Knows nothing of processes.

What was done lies in a directory of artifacts, under keys that the other process has made of what
it has there. So nothing is taken on trust, and whoever does not find it does it himself.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from piecewise_backend import _torch
from piecewise_backend.artifact_store import open_store
from piecewise_backend.compiler import Specialization, Wanted
from piecewise_backend.counters import CompilationCounter
from piecewise_backend.facts import PieceFacts
from piecewise_backend.graphs import GraphPool, collector_paused, one_capture
from piecewise_backend.inductor_compiler import InductorCompiler
from piecewise_backend.passes import Pass, PassList
from piecewise_backend.piece_record import (
    RecordedPiece,
    made_up_inputs,
    rebuild_piece,
)
from piecewise_backend.trace_bytes import from_bytes, to_bytes
from piecewise_backend.tuning import Trial
from piecewise_backend.version import Numbers
from piecewise_backend.versions import Versions


@dataclasses.dataclass(frozen=True, slots=True)
class Setup:
    """What all jobs of a process have in common."""

    device: torch.device
    settings: Mapping[str, Any]
    """Of the process that compiles; see `_torch.under_settings`."""
    patches: Mapping[str, object]
    """Inductor options of the model."""
    passes: tuple[Pass, ...]
    """Piece passes of the model."""
    validate_passes: bool
    folder: Path
    """Where artifacts are kept."""
    max_bytes: int
    graphs: str
    """The kind of graphs that versions are compared under."""

    def as_message(self) -> bytes:
        """For another process.

        Raises:
            NoContentError: a pass that the other one could not make again.
        """
        return to_bytes(self, same_program=False)

    def compiler(self) -> InductorCompiler:
        """What compiles like the one of the process that made this."""
        store = open_store(self.folder, max_bytes=self.max_bytes)
        passes = PassList(self.passes, validate=self.validate_passes)
        return InductorCompiler(
            self.patches, CompilationCounter(), passes, store=store, graphs=self.graphs
        )


@dataclasses.dataclass(frozen=True, slots=True)
class CompileJob:
    """Compile a version, and store it."""

    piece: RecordedPiece
    numbers: Numbers
    special: Specialization | None

    def run(self, setup: Setup) -> None:
        """Do it."""
        piece = rebuild_piece(self.piece, self.numbers)
        setup.compiler().compile_ahead(Wanted(piece, self.numbers, self.special))


@dataclasses.dataclass(frozen=True, slots=True)
class TuneJob:
    """Find the fastest of some versions, and store it with what was found."""

    piece: RecordedPiece
    numbers: Numbers
    tried: tuple[Specialization, ...]
    facts: PieceFacts
    make_pool: Callable[[torch.device], GraphPool]

    def run(self, setup: Setup) -> None:
        """Do it, on inputs that are made up."""
        piece = rebuild_piece(self.piece, self.numbers)
        versions = Versions(piece, setup.compiler())
        pool = self.make_pool(setup.device)
        with one_capture, collector_paused(), _torch.ordinary_tensors(), pool.side_stream():
            inputs = made_up_inputs(piece, self.numbers)
            trial = Trial(versions, self.facts, self.numbers, inputs, pool, setup.device)
            trial.find_fastest(self.tried)


def message_of(job: CompileJob | TuneJob) -> bytes:
    """A job for another process.

    Raises:
        NoContentError: it has something that the other one could not make again.
    """
    return to_bytes((job.piece.modules, to_bytes(job, same_program=False)))


def job_of(message: bytes) -> CompileJob | TuneJob:
    """The opposite; imports what defines the ops of the piece."""
    modules, data = from_bytes(message)
    for module in modules:
        importlib.import_module(module)
    found: CompileJob | TuneJob = from_bytes(data)
    return found
