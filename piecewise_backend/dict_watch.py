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
            flags = [flag for flag in _flags.pop(address) if flag is not self.flag]
            if flags:
                _flags[address] = flags
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
    atexit.register(ctypes.pythonapi.PyDict_ClearWatcher, watcher)
    return int(watcher)


def _set_flags(event: int, address: int, key: int, value: int) -> int:
    for flag in _flags.get(address, ()):
        flag[0] = True
    return 0


_Callback = ctypes.PYFUNCTYPE(
    ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p
)
_on_change = _Callback(_set_flags)
