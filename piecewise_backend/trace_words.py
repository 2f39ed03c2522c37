"""The key of a stored trace as its reader would say it.

In:  keys of traces, as JSON has them.
Out: the same, with names of the user's program: `L['self']._modules['0']` is `self[0]`.
Knows nothing of entries.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from piecewise_backend._torch import SEEN

_DIGEST = re.compile(r" ([0-9a-f]{8})[0-9a-f]{24}")
_NAMES = (
    (re.compile(r"G\['__builtins_dict__(?:_\d+)?'\]\['(\w+)'\]"), r"builtins.\1"),
    (re.compile(r"\b[LG]\['(\w+)'\]"), r"\1"),
    (re.compile(r"\._(?:modules|parameters|buffers)\['(\d+)'\]"), r"[\1]"),
    (re.compile(r"\._(?:modules|parameters|buffers)\['(\w+)'\]"), r".\1"),
    (re.compile(r"\b__import_(\w+)"), lambda found: found[1].replace("_dot_", ".")),
)
_TENSORS = ("Tensor", "Parameter", "Buffer")
_QUESTION = re.compile(r"(?P<source>.*?) (?P<kind>[A-Z]+(?:_[A-Z]+)*)(?P<detail> .*)?")


class _Words(str):
    """Text that is shown as it is."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def is_of_trace(key: Mapping[str, Any]) -> bool:
    """Of a stored trace, or of the questions that traces ask."""
    return "trace" in key


def function_of(key: Mapping[str, Any]) -> str:
    """What was traced: its module and name."""
    return str(key["trace"]["function"]).partition(" ")[0]


def call_of(key: Mapping[str, Any]) -> str:
    """What was traced and with which arguments: `shop.model.Model.forward(x: float32 [*, 4])`."""
    given = key["trace"].get("parameters", {}).items()
    arguments = ", ".join(f"{name}: {_parameter(value)}" for name, value in given)
    return f"{function_of(key)}({arguments})"


def in_words(one: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[Any, Any]:
    """Two keys that differ, to be compared.

    What one trace alone has read is mostly a consequence of what both have read and found
    different; it is left out then.
    """
    first, second = _worded(one), _worded(other)
    if first == second:  # in an order, say, of which there are no words
        return one, other
    names = first.keys() & second.keys()
    if any(first[name] != second[name] for name in names):
        return {name: first[name] for name in names}, {name: second[name] for name in names}
    return first, second


def _worded(key: Mapping[str, Any]) -> dict[str, Any]:
    trace, found = key["trace"], dict(key)
    found["trace"] = {
        "function": _text(str(trace["function"])),
        "instance": _instance(trace.get("instance")),
        "parameters": {n: _Words(_parameter(v)) for n, v in trace.get("parameters", {}).items()},
    }
    if "questions" in found:
        found["traces of such calls that read other things"] = found.pop("questions")
    answers = found.pop("answers", {})
    for question, answer in answers.get("reads", {}).items():
        _add_read(found, question, _answer(answer))
    for one, other in answers.get("same", ()):
        found[f"that {_name(other)} is {_name(one)}"] = True
    for name, number in answers.get("apart", ()):
        found[f"that {_name(name)} is not the equal one"] = number
    for group in ("functions", "ops"):
        for name, answer in answers.get(group, {}).items():
            found[f"{group[:-1]} {name}"] = _answer(answer)
    for fact in answers.get("fit", ()):
        name, has_name, size = fact.partition(": ")
        found[f"assumes {_name(name)}"] = _Words(size) if has_name else True
    return found


def _add_read(found: dict[str, Any], question: str, answer: Any) -> None:
    """`L['self'].act EQUALS_MATCH` is `reads self.act`, as is every other look with this answer."""
    parts = _QUESTION.fullmatch(question)
    source, kind, detail = parts.groups("") if parts else (question, "", "")
    if kind == SEEN:  # which object it is: told elsewhere
        return
    name = f"reads {_name(source + detail)}"
    found[name if found.get(name, answer) == answer else f"{name} ({kind})"] = answer


def _instance(instance: Any) -> Any:
    """What it is, its modules by the beginning of a hash."""
    if not isinstance(instance, dict):
        return instance
    return instance | {"tree": _Words(str(instance.get("tree"))[:8])}


def _name(source: str) -> str:
    for pattern, by in _NAMES:
        source = pattern.sub(by, source)
    return source


def _answer(answer: Any) -> Any:
    if isinstance(answer, str):
        return _text(answer)
    if not isinstance(answer, list):
        return answer
    if _is_tensor(answer):
        return _Words(_tensor(answer))
    if answer and all(isinstance(part, str) for part in answer):  # a class, and what is in it
        return {"class": _text(answer[0])} | {f"has {_text(part)}": True for part in answer[1:]}
    return [_answer(part) for part in answer]


def _parameter(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name}: {_parameter(part)}' for name, part in value.items())}}}"
    if not isinstance(value, list):
        return repr(_answer(value))
    if len(value) == 2 and _is_tensor(value[0]):  # the other one are the marks of its dimensions
        return _tensor(value[0])
    return f"[{', '.join(_parameter(part) for part in value[1:])}]"


def _is_tensor(value: Any) -> bool:
    """As `trace_content.tensor` has it, and nothing else that a trace reads has it."""
    match value:
        case [str(kind), str(dtype), str(), list(), list() | str(), [bool(), bool()]]:
            return kind in _TENSORS and dtype.startswith("torch.")
    return False


def _tensor(value: list[Any]) -> str:
    kind, dtype, device, sizes, strides, (has_gradient, is_inference) = value
    shape = ", ".join("*" if size is None else str(size) for size in sizes)
    about = {
        kind: kind != "Tensor",
        f"on {device}": device != "cpu",
        f"strides {strides}": strides != "contiguous",
        "with gradient": has_gradient,
        "of inference mode": is_inference,
    }
    told = [text for text, is_told in about.items() if is_told]
    return " ".join([str(dtype).removeprefix("torch."), f"[{shape}]", *told])


def _text(text: str) -> _Words:
    """`int 2` is `2`; code counts by the beginning of its hash."""
    kind, _, rest = text.partition(" ")
    if kind == "float" and rest:
        return _Words(rest if rest == "nan" else repr(float.fromhex(rest)))
    if kind in ("int", "str", "bool", "NoneType", "bytes", "complex", "device", "dtype"):
        return _Words(rest)
    return _Words(_DIGEST.sub(r" (code \1)", text))
