"""What kernels of Inductor's chose when they ran for the first time.

A kernel that was compiled in several ways is timed at its first run, and one that is to be tuned
compiles itself anew until nothing gets faster. Inductor notes what came of it beside the kernel's
code, in a folder of the machine, and looks there when the kernel is compiled or loaded. What else
it offers is `torch.compiler.save_cache_artifacts`, which gives out everything that the process
ever compiled. All of this ends when that takes a selection.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch._inductor import config
from torch._inductor.codecache import PyCodeCache
from torch._inductor.runtime.autotune_cache import AutotuneCache, AutotuneCacheArtifact
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._inductor.runtime.triton_heuristics import CachingAutotuner


def keeps_choices() -> bool:
    """Inductor keeps what kernels choose, as it does unless it is told otherwise."""
    return bool(config.autotune_local_cache and not config.force_disable_caches)


class _Watches:
    """Threads that want to know which kernels they run, while they want to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watches: list[tuple[int, list[Any]]] = []
        self._original: Any = None
        self._ours: Any = None

    def begin(self, kernels: list[Any]) -> None:
        """Collect what the thread runs from now on."""
        with self._lock:
            if not self._watches:
                self._original, self._ours = CachingAutotuner.run, self._watched()
                CachingAutotuner.run = self._ours  # type: ignore[method-assign]
            self._watches.append((threading.get_ident(), kernels))

    def end(self, kernels: list[Any]) -> None:
        """No more."""
        with self._lock:
            self._watches = [one for one in self._watches if one[1] is not kernels]
            if not self._watches:
                self._put_back()

    def forget(self) -> None:
        """In a forked process, which has none of the threads that watched, and perhaps the lock
        as one of them held it."""
        self._lock, self._watches = threading.Lock(), []
        self._put_back()

    def _put_back(self) -> None:
        if CachingAutotuner.run is self._ours:  # or somebody has put his own in front of it
            CachingAutotuner.run = self._original  # type: ignore[method-assign]

    def _watched(self) -> Any:
        original = CachingAutotuner.run

        def run(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            for thread, kernels in tuple(self._watches):
                if thread == threading.get_ident():
                    kernels.append(kernel)
            return original(kernel, *args, **kwargs)

        return run


# One for the process, as the method that it replaces is.
_watches = _Watches()
os.register_at_fork(after_in_child=_watches.forget)


@contextlib.contextmanager
def noted_choices() -> Iterator[dict[str, str]]:
    """What the kernels have chosen that this thread runs inside, now or before: filled at the end.

    By the last two parts of the path of Inductor's note, which are the content of the kernel.
    """
    kernels: list[Any] = []
    choices: dict[str, str] = {}
    _watches.begin(kernels)
    try:
        yield choices
    finally:
        _watches.end(kernels)
    for kernel in kernels:
        note = _note_of(kernel)
        # There is none of a kernel that was told what to choose, and had no choice; or somebody
        # has cleared Inductor's folder.
        with contextlib.suppress(OSError):
            if note is not None:
                choices["/".join(note.parts[-2:])] = note.read_text()


def set_choices(choices: Mapping[str, str]) -> None:
    """Let kernels that are loaded from now on choose the same, without timing anything."""
    for key, content in choices.items():
        AutotuneCacheArtifact(key, content.encode()).populate_cache()


@contextlib.contextmanager
def kernels_made_anew() -> Iterator[None]:
    """What is compiled inside shares no kernel with what was compiled before.

    A kernel that has tuned itself is another one in memory than what Inductor would store of it,
    which is the state before the first run. One that is made anew begins with what was chosen. So
    no other process helps: those of Inductor's pool have such kernels in memory as well. (On torch
    2.11 nor do they help another thread that compiles meanwhile.) Ends when Inductor stores a
    kernel as it is.
    """
    kept, PyCodeCache.modules_no_attr = PyCodeCache.modules_no_attr, {}
    try:
        with config.patch(compile_threads=1):
            yield
    finally:
        PyCodeCache.modules_no_attr = kept


@contextlib.contextmanager
def loaded_kernels(*, are_settled: bool) -> Iterator[None]:
    """Kernels that are loaded inside look for what they chose in the folder of this process.

    They come with the path of their code where they were compiled, another machine perhaps, and
    would look and write there. Ends when Inductor sets the path of what it loads.

    Args:
        are_settled: they have been tuned, and are not tuned again. That a kernel has tuned itself
            is an attribute of its configuration that Triton's own pickling drops. Ends when Triton
            keeps it, or Inductor does not tune what it loads.
    """
    original = CachingAutotuner.recheck_autotune_cache
    thread = threading.get_ident()

    def recheck(kernel: Any, *args: Any, **kwargs: Any) -> None:
        is_ours = threading.get_ident() == thread  # others may load kernels of their own meanwhile
        if is_ours:
            _move(kernel)
        original(kernel, *args, **kwargs)
        for result in kernel.compile_results if are_settled and is_ours else ():
            result.config.found_by_coordesc = True

    CachingAutotuner.recheck_autotune_cache = recheck  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        CachingAutotuner.recheck_autotune_cache = original  # type: ignore[method-assign]


def _move(kernel: Any) -> None:
    if kernel.filename is not None:
        kernel.filename = _here(kernel.filename)
    notes = _notes_of(kernel)
    if notes is not None and notes.local_cache is not None:
        where, path = notes.local_cache
        notes.local_cache = where, _here(path)


def _here(path: str) -> str:
    """Where this process has a file of Inductor's, which lie in folders by content."""
    return str(Path(cache_dir(), *Path(path).parts[-2:]))


def _notes_of(kernel: Any) -> AutotuneCache | None:
    """A kernel has them if it has a choice."""
    notes: AutotuneCache | None = getattr(kernel.save_cache_hook, "__self__", None)
    return notes


def _note_of(kernel: Any) -> Path | None:
    notes = _notes_of(kernel)
    return Path(notes.local_cache[1]) if notes and notes.local_cache else None
