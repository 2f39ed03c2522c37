"""Who compiles the pieces of a model, where they are kept, and which processes help.

In:  options, the piece passes, the arguments of a trace.
Out: a `PieceCompiler`, and what tunes in the background.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from piecewise_backend import _torch
from piecewise_backend.ahead import Ahead
from piecewise_backend.artifact_store import ArtifactStore, open_store, temporary_store
from piecewise_backend.background import BackgroundTuning
from piecewise_backend.compiler import EagerCompiler, PieceCompiler
from piecewise_backend.config import Config
from piecewise_backend.counters import CompilationCounter
from piecewise_backend.dump import GraphDump
from piecewise_backend.inductor_compiler import InductorCompiler
from piecewise_backend.jobs import Setup
from piecewise_backend.passes import PassList
from piecewise_backend.pools import pool_maker
from piecewise_backend.sizes import Sizes

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Compiling:
    """How the pieces of one trace are compiled."""

    config: Config
    passes: PassList
    device: torch.device
    store: ArtifactStore | None

    @classmethod
    def of(cls, config: Config, passes: PassList, example_inputs: Sequence[Any]) -> Compiling:
        """As options say.

        Args:
            passes: those of stage "piece".
            example_inputs: of the trace.
        """
        tensors = [value for value in example_inputs if isinstance(value, torch.Tensor)]
        others = [tensor.device for tensor in tensors if tensor.device.type != "cpu"]
        return cls(config, passes, others[0] if others else torch.device("cpu"), _store(config))

    def compiler(self, counters: CompilationCounter, dump: GraphDump) -> PieceCompiler:
        """What compiles pieces in this process."""
        if self.config.compiler == "eager":
            return EagerCompiler()
        patches = dict(self.config.inductor_compile_config)
        # Other processes on a device would count as memory of graphs.
        is_alone = self.config.compile_workers == 0 or self.config.max_graph_memory is not None
        ahead = None if is_alone else Ahead(self._setup, self.config.compile_workers)
        return InductorCompiler(
            patches, counters, self.passes, dump.pass_writer, self.store, ahead, self._graphs()
        )

    def _graphs(self) -> str:
        made = pool_maker(self.device, self.config)
        return "" if made is None else getattr(made, "__name__", str(made))

    def in_background(self, sizes: Sizes) -> BackgroundTuning | None:
        """What tunes while the model serves; None if nothing is to.

        Args:
            sizes: symbol values, for those that are no token counts.
        """
        make_pool = pool_maker(self.device, self.config)
        if self.config.tuning != "background" or make_pool is None or self.store is None:
            return None
        make_setup = functools.partial(self._setup, self.store.root)
        return BackgroundTuning(make_setup, make_pool, sizes)

    def _setup(self, folder: Path) -> Setup:
        return Setup(
            device=self.device,
            settings=_torch.settings_of_process(self.device),
            patches=dict(self.config.inductor_compile_config),
            passes=self.passes.passes,
            validate_passes=self.config.validate_passes,
            folder=folder,
            max_bytes=self.config.max_cache_size,
            graphs=self._graphs(),
        )


def _store(config: Config) -> ArtifactStore | None:
    if config.compiler == "eager":
        return None
    store = None
    if config.cache_dir is not None:
        store = open_store(config.cache_dir, max_bytes=config.max_cache_size)
    if store is not None or config.tuning != "background":
        return store
    try:
        return temporary_store()
    except OSError as error:
        log.warning("nothing is tuned in the background: %s", error)
        return None
