"""Notice changes of dictionaries without looking at them.

In:  dictionaries, such as those in which modules keep their parameters.
Out: a flag that is set as soon as any of them changes.

CPython calls a watcher before it changes a watched dictionary (`PyDict_Watch`, public since
3.12). Older Pythons have nothing like it.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import sys
from collections.abc import Iterable
from typing import Any

_flags: dict[int, list[list[bool]]] = {}
"""By address of a dictionary, the flags that its change sets."""


class DictWatch:
    """Watches dictionaries for as long as it lives."""

    def __init__(self, dictionaries: Iterable[dict[Any, Any]], watcher: int) -> None:
        self.flag = [False]
        """`[True]` once any of them may have changed; reset it to watch on."""
        self._watcher = watcher
        self._dictionaries = {id(dictionary): dictionary for dictionary in dictionaries}
        for address, dictionary in self._dictionaries.items():
            _flags.setdefault(address, []).append(self.flag)
            ctypes.pythonapi.PyDict_Watch(watcher, ctypes.py_object(dictionary))

    def __del__(self) -> None:
        for address, dictionary in self._dictionaries.items():
            watching = _flags.pop(address, None)
            if watching is None:  # the process ends
                return
            if others := [flag for flag in watching if flag is not self.flag]:
                _flags[address] = others
            else:
                ctypes.pythonapi.PyDict_Unwatch(self._watcher, ctypes.py_object(dictionary))


@functools.cache
def dict_watcher() -> int | None:
    """The number under which Python knows our watcher; None where there is none to be had."""
    if sys.version_info < (3, 12) or sys.implementation.name != "cpython":
        return None
    try:
        watcher = ctypes.pythonapi.PyDict_AddWatcher(_on_change)
    except RuntimeError:  # a process has eight of them
        return None
    # Dictionaries go on being changed when this module is no longer there to be told.
    atexit.register(_flags.clear)
    atexit.register(ctypes.pythonapi.PyDict_ClearWatcher, watcher)
    return int(watcher)


@functools.cache
def sees_attributes() -> bool:
    """A change of an object's attribute is a change of its `__dict__`.

    CPython 3.13 writes attributes past the dictionary and tells no watcher; so this is tried.
    """
    watcher = dict_watcher()
    if watcher is None:
        return False
    probe = _Probe()
    watch = DictWatch([probe.__dict__], watcher)
    probe.value = 1
    return watch.flag[0]


class _Probe:
    value = 0

    def __init__(self) -> None:
        self.value = 0


def _set_flags(event: int, address: int, key: int, value: int) -> int:
    for flag in _flags.get(address, ()):
        flag[0] = True
    return 0


_Callback = ctypes.PYFUNCTYPE(
    ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p
)
_on_change = _Callback(_set_flags)
