"""Python source of a code object, for people.

In:  a code object, such as Dynamo writes.
Out: text that Python can parse: source where depyf finds one, else the disassembly in comments.
"""

from __future__ import annotations

import dis
import io
import warnings
from types import CodeType

_HEADER = "# Written by piecewise_backend: what runs in place of {name} ({file}:{line}).\n"


def decompiled(code: CodeType) -> str:
    """The source of `code`; the head says what it is, and why it is a disassembly if it is one."""
    head = _HEADER.format(name=code.co_qualname, file=code.co_filename, line=code.co_firstlineno)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what depyf itself is warned of
            import depyf  # noqa: PLC0415  # a second that only dumps and errors need

            source = str(depyf.decompile(code))
        compile(source, "<decompiled>", "exec")
    except Exception as error:  # depyf raises anything; its text need not be Python
        reason = f"# depyf could not decompile it ({type(error).__name__}: {_first_line(error)}).\n"
        listing = io.StringIO()
        dis.dis(code, file=listing)
        return head + reason + "".join(f"# {line}\n" for line in listing.getvalue().splitlines())
    return head + source


def lines_around(source: str, text: str, context: int = 3) -> str:
    """The first line of `source` that has `text`, with a few lines around it."""
    lines = source.splitlines()
    at = next((i for i, line in enumerate(lines) if text in line), 0)
    return "\n".join(lines[max(at - context, 0) : at + context + 1])


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]
