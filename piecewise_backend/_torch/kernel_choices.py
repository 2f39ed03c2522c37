"""What kernels of Inductor's chose when they ran for the first time.

A kernel that was compiled in several ways is timed at its first run, and one that is to be tuned
compiles itself anew until nothing gets faster. Inductor notes what came of it, by content of the
kernel, in a folder of the machine and in the list behind `torch.compiler.save_cache_artifacts`,
which gives out everything that the process ever compiled. Ends when that takes a selection.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from torch._inductor import config
from torch._inductor.codecache import PyCodeCache
from torch._inductor.runtime.autotune_cache import AutotuneCacheArtifact
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch.compiler._cache import CacheArtifactManager


def keeps_choices() -> bool:
    """Inductor keeps what kernels choose, as it does unless it is told otherwise."""
    return bool(config.autotune_local_cache and not config.force_disable_caches)


def num_noted() -> int:
    """How much Inductor has noted so far; see `choices_since`."""
    return len(CacheArtifactManager._seen_artifacts)


def choices_since(num: int) -> dict[str, str]:
    """What kernels chose since so much was noted: by their content."""
    new = itertools.islice(CacheArtifactManager._seen_artifacts, num, None)
    return {
        artifact.key: artifact.content.decode()
        for artifact in new
        if isinstance(artifact, AutotuneCacheArtifact)
    }


def set_choices(choices: Mapping[str, str]) -> None:
    """Let kernels that are loaded from now on choose the same, without timing anything."""
    for key, content in choices.items():
        AutotuneCacheArtifact(key, content.encode()).populate_cache()


@contextlib.contextmanager
def kernels_made_anew() -> Iterator[None]:
    """What is compiled inside shares no kernel with what the process has compiled before.

    A kernel that has tuned itself is another one in memory than what Inductor would store of it,
    which is the state before the first run. One that is made anew begins with what was chosen.
    Ends when Inductor stores a kernel as it is.
    """
    kept, PyCodeCache.modules_no_attr = PyCodeCache.modules_no_attr, {}
    try:
        yield
    finally:
        PyCodeCache.modules_no_attr = kept


@contextlib.contextmanager
def settled_kernels() -> Iterator[None]:
    """Kernels that are loaded inside have been tuned, and are not tuned again.

    That a kernel has tuned itself is an attribute of its configuration that Triton's own pickling
    drops. Ends when Triton keeps it, or Inductor does not tune what it loads.
    """
    original = CachingAutotuner.recheck_autotune_cache

    def recheck(kernel: Any, *args: Any, **kwargs: Any) -> None:
        original(kernel, *args, **kwargs)
        for result in kernel.compile_results:
            result.config.found_by_coordesc = True

    CachingAutotuner.recheck_autotune_cache = recheck  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        CachingAutotuner.recheck_autotune_cache = original  # type: ignore[method-assign]
