"""Continuous batching in one page: requests join and leave a batch that runs token by token.

In:  requests, each with a prompt, a number of tokens to generate, and the step it arrives at.
Out: greedy completions, and how long the model took in every step.
Knows nothing of how the model was compiled: it calls whatever ``forward`` it was given.

A step flattens what every running request has not cached yet, so a request that just arrived
contributes its whole prompt and the others one token each, all in one call.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

import piecewise_backend as pw
from examples.llama import Llama
from examples.paged_attention import SCRATCH_SEQUENCE, PagedCache

ModelInputs = tuple[Tensor, Tensor, Tensor, Tensor]
"""``(input_ids, positions, seq_ids, context_lens)``, each with one row per token."""


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """What a user asks for."""

    prompt: tuple[int, ...]
    max_new_tokens: int
    arrival_step: int = 0


@dataclasses.dataclass(slots=True)
class Completion:
    """What a request has got so far."""

    request: Request
    tokens: list[int] = dataclasses.field(default_factory=list)
    margins: list[float] = dataclasses.field(default_factory=list)
    """How far each token led the runner-up, relative to its own logit: near 0 is a tie."""

    @property
    def is_finished(self) -> bool:
        """Whether every token that was asked for exists."""
        return len(self.tokens) >= self.request.max_new_tokens


@dataclasses.dataclass(slots=True)
class _Running:
    """A request in the batch; ``pending`` are its tokens that are not in the cache yet."""

    completion: Completion
    seq_id: int
    pending: Sequence[int]
    num_cached: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """One call of the model."""

    num_reqs: int
    num_tokens: int
    seconds: float

    @property
    def is_decode(self) -> bool:
        """Whether every request contributed exactly one token."""
        return self.num_reqs == self.num_tokens


class Engine:
    """Runs requests to their end; one use, one thread."""

    def __init__(
        self, model: Llama, cache: PagedCache, forward: Callable[..., Tensor] | None = None
    ) -> None:
        self.steps: list[Step] = []
        self._model = model
        self._cache = cache
        self._forward = model if forward is None else forward
        self._running: list[_Running] = []

    def run(self, requests: Sequence[Request]) -> list[Completion]:
        """Serve all requests; completions come in the order of the requests."""
        completions = [Completion(request) for request in requests]
        waiting = sorted(completions, key=lambda c: c.request.arrival_step)
        now = 0
        while waiting or self._running:
            while waiting and waiting[0].request.arrival_step <= now:
                self._admit(waiting.pop(0))
            if self._running:
                self._step()
            now += 1
        return completions

    def _admit(self, completion: Completion) -> None:
        prompt = completion.request.prompt
        seq_id = self._cache.add_sequence(len(prompt))
        self._running.append(_Running(completion, seq_id, prompt))

    def _step(self) -> None:
        """One token for every running request, then drop the finished ones."""
        inputs = self._flatten()
        hidden = self._timed_forward(inputs)
        ends = torch.tensor([len(r.pending) for r in self._running]).cumsum(0) - 1
        logits = self._model.compute_logits(hidden[ends.to(hidden.device)])
        best = logits.float().topk(2)
        for running, token, (first, second) in zip(
            self._running, best.indices[:, 0].tolist(), best.values.tolist(), strict=True
        ):
            running.completion.tokens.append(token)
            running.completion.margins.append((first - second) / abs(first))
            running.num_cached += len(running.pending)
            running.pending = (token,)
        self._retire()

    def _retire(self) -> None:
        """Free what finished; reserve the next token's slot for the rest."""
        for running in self._running:
            if running.completion.is_finished:
                self._cache.free(running.seq_id)
            else:
                self._cache.extend(running.seq_id)
        self._running = [r for r in self._running if not r.completion.is_finished]

    def _rows(self) -> Iterator[tuple[int, int, int, int]]:
        """Id, position, sequence and cached length of every pending token, in order."""
        for r in self._running:
            for offset, token in enumerate(r.pending):
                yield token, r.num_cached + offset, r.seq_id, r.num_cached

    def _flatten(self) -> ModelInputs:
        ids, positions, seq_ids, contexts = zip(*self._rows(), strict=True)
        return as_inputs(ids, positions, seq_ids, contexts, self._cache.block_tables.device)

    def _timed_forward(self, inputs: ModelInputs) -> Tensor:
        """Call the model, and record the time until its result exists."""
        device = inputs[0].device
        num_reqs, num_tokens = len(self._running), inputs[0].shape[0]
        _synchronize(device)
        start = time.perf_counter()
        # Only the scheduler knows that this is a decode step; nothing else may guess it.
        with pw.batch(num_reqs=num_reqs, uniform=num_reqs == num_tokens):
            hidden = self._forward(*inputs)
        _synchronize(device)
        seconds = time.perf_counter() - start
        self.steps.append(Step(num_reqs, num_tokens, seconds))
        return hidden


def as_inputs(
    ids: Sequence[int],
    positions: Sequence[int],
    seq_ids: Sequence[int],
    contexts: Sequence[int],
    device: torch.device,
) -> ModelInputs:
    """The model's four inputs, with the token dimension marked dynamic."""
    inputs = (
        torch.tensor(ids, dtype=torch.int64, device=device),
        torch.tensor(positions, dtype=torch.int64, device=device),
        torch.tensor(seq_ids, dtype=torch.int32, device=device),
        torch.tensor(contexts, dtype=torch.int32, device=device),
    )
    # Dynamo always specialises a dimension of size 1, so a mark on it would be a contradiction.
    if len(ids) > 1:
        for rows in inputs:
            torch._dynamo.mark_dynamic(rows, 0)
    return inputs


def scratch_inputs(num_tokens: int, cache: PagedCache, vocab_size: int) -> ModelInputs:
    """Valid inputs for warm-up that cannot touch a real sequence.

    Rows come in runs of one block, each a new prompt in the scratch sequence. A new prompt reads
    nothing from the cache, so the result does not depend on what earlier runs wrote there.
    """
    positions = [row % cache.block_size for row in range(num_tokens)]
    ids = [row % vocab_size for row in range(num_tokens)]
    zeros = [0] * num_tokens
    scratch = [SCRATCH_SEQUENCE] * num_tokens
    return as_inputs(ids, positions, scratch, zeros, cache.block_tables.device)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
