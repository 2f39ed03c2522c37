"""What the caller states about the batch of a call: `with pw.batch(...)`.

In:  facts that cannot be read off the arguments.
Out: `BatchFacts`, current in this thread or task.
Knows nothing of models.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from contextvars import ContextVar
from typing import Any

from piecewise_backend.batch import BatchDescriptor, CUDAGraphMode
from piecewise_backend.errors import ConfigError, ContractError


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class BatchKind:
    """Those facts that choose the graphs. Compared by identity, which makes a fast key; equal
    kinds are one object as a rule."""

    uniform: bool
    num_active_loras: int
    pad_to: int
    mode: CUDAGraphMode | None


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class BatchFacts:
    """Compared by identity, too."""

    num_tokens: int | None
    num_reqs: int | None
    kind: BatchKind

    def __enter__(self) -> None:
        _stack.set((self, _stack.get()))

    def __exit__(self, *_: object) -> None:
        stack = _stack.get()
        if stack is not None and stack[0] is self:
            _stack.set(stack[1])
        else:  # generators close in any order, and in any task
            _stack.set(_without(stack, self))

    def require(self, num_tokens: int, decode_query_len: int, max_loras: int) -> None:
        """The facts agree with the inputs of the call.

        Raises:
            ContractError: they do not.
        """
        if self.num_tokens is not None and self.num_tokens != num_tokens:
            raise ContractError(
                f"pw.batch says num_tokens={self.num_tokens}, the inputs have {num_tokens} tokens"
            )
        num_loras = self.kind.num_active_loras
        if num_loras > max_loras:
            raise ContractError(
                f"pw.batch says num_active_loras={num_loras}, but max_loras={max_loras}"
            )
        if self.num_reqs is not None and self.num_reqs > num_tokens:
            raise ContractError(
                f"pw.batch says num_reqs={self.num_reqs}, but there are {num_tokens} tokens; "
                "every sequence has one at least"
            )
        if not self.kind.uniform:
            return
        per_request = f"{decode_query_len} per sequence (option decode_query_len)"
        if num_tokens % decode_query_len:
            raise ContractError(
                f"pw.batch says uniform, but {num_tokens} tokens cannot be {per_request}"
            )
        if self.num_reqs is not None and self.num_reqs * decode_query_len != num_tokens:
            raise ContractError(
                f"pw.batch says uniform and num_reqs={self.num_reqs}, but {num_tokens} tokens are "
                f"not {per_request}; leave uniform out for prefills"
            )


_SINGLE_MODES = (CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL)

_stack: ContextVar[Any] = ContextVar("piecewise_batch", default=None)
"""What is stated, and what was before, in the same form: one object may be entered several times,
in several threads and tasks at once."""

stack_now = _stack.get
"""For the hot path: None, or a tuple that begins with the facts."""


def _without(stack: Any, facts: BatchFacts) -> Any:
    """A stack that lacks the innermost entry of some facts, if it has one."""
    if stack is None:
        return None
    return stack[1] if stack[0] is facts else (stack[0], _without(stack[1], facts))


def facts_now() -> BatchFacts | None:
    """What is stated of calls here, in this thread or task."""
    stack = _stack.get()
    return None if stack is None else stack[0]


def batch(
    *,
    num_tokens: int | None = None,
    num_reqs: int | None = None,
    uniform: bool = False,
    num_active_loras: int = 0,
    pad_to: int = 0,
    mode: CUDAGraphMode | None = None,
) -> BatchFacts:
    """State facts about the calls inside: `with pw.batch(num_reqs=8, uniform=True): ...`.

    Without it the token count is read off the inputs, and the batch is taken for a mixed one.

    Args:
        num_tokens: of the batch; only checked against the inputs.
        num_reqs: sequences in the batch.
        uniform: it is a decode batch, in which every sequence has `decode_query_len` tokens (see
            `Config`): what a graph of the whole step may be captured for. Never guessed.
        num_active_loras: adapters that the batch uses.
        pad_to: pad as for so many tokens at least, because another rank has as many.
        mode: nothing better than this (NONE, PIECEWISE or FULL), because another rank has none;
            see `pw.agree` for both.

    Returns:
        A context manager, which may be kept and entered again.

    Raises:
        ConfigError: a value of the wrong kind.
    """
    try:
        return _facts(num_tokens, num_reqs, uniform, num_active_loras, pad_to, mode)
    except TypeError:  # what cannot be hashed is no count either
        _require(num_tokens, num_reqs, uniform, num_active_loras, pad_to, mode)
        raise


def stated(descriptor: BatchDescriptor) -> contextlib.AbstractContextManager[None]:
    """State what a descriptor says; nothing, if it says no more than the token count."""
    if not (descriptor.uniform or descriptor.has_lora):
        return contextlib.nullcontext()
    return batch(
        num_reqs=descriptor.num_reqs,
        uniform=descriptor.uniform,
        num_active_loras=descriptor.num_active_loras,
    )


_kind = functools.lru_cache(maxsize=4096)(BatchKind)


@functools.lru_cache(maxsize=4096, typed=True)
def _facts(
    num_tokens: int | None,
    num_reqs: int | None,
    uniform: bool,
    num_active_loras: int,
    pad_to: int,
    mode: CUDAGraphMode | None,
) -> BatchFacts:
    """Valid facts; what was seen before is neither checked nor made again."""
    _require(num_tokens, num_reqs, uniform, num_active_loras, pad_to, mode)
    return BatchFacts(num_tokens, num_reqs, _kind(uniform, num_active_loras, pad_to, mode))


def _require(
    num_tokens: object,
    num_reqs: object,
    uniform: object,
    num_active_loras: object,
    pad_to: object,
    mode: object,
) -> None:
    if type(uniform) is not bool:
        raise ConfigError(f"uniform={uniform!r}; give True or False")
    _require_count("num_tokens", num_tokens, least=0)
    _require_count("num_reqs", num_reqs, least=1)
    _require_count("num_active_loras", num_active_loras, least=0)
    _require_count("pad_to", pad_to, least=0)
    if mode is not None and mode not in _SINGLE_MODES:
        raise ConfigError(f"mode={mode!r}; give one of {[m.name for m in _SINGLE_MODES]}")


def _require_count(name: str, value: object, least: int) -> None:
    if value is None and name in ("num_tokens", "num_reqs"):
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name}={value!r}; give an integer of at least {least}")
