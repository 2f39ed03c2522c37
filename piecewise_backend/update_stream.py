"""A CUDA stream on which the inputs of a graph are refreshed while the graph runs already.

In:  functions that write device memory which a recorded graph reads.
Out: what runs them before a replay, and the wait that the graph has to contain.
Knows nothing of pieces, split ops or pools.

Note [Order of refreshes]
A refresh begins when everything is done that the stream of the call was given before, and so the
step before has read what it reads. A replay waits for the last record of the event before its own
launch; records of later refreshes, which wait for that replay in turn, do not concern it. From this
wait on the stream of the call is behind the refresh, so nothing that it is given afterwards can
overtake either. If a function fails there is no replay to wait, so the stream of the call does.

The event is external: recorded outside of the graph that waits for it. Where an event was never
recorded torch leaves out the wait without a word, so this one is recorded when it is made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


class UpdateStream:
    """One stream, and the event that says that it is done."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Streams of this priority are never those that graphs are recorded on.
        self._stream = torch.cuda.Stream(device, priority=-1)
        self._is_done = torch.cuda.Event(external=True)
        self._is_done.record(self._stream)

    def refresh(self, functions: Sequence[Callable[[], object]]) -> None:
        """Run functions on this stream, behind what the current one was given so far.

        Raises:
            Exception: whatever a function does. What it launched before is waited for.
        """
        outside = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(outside)
        try:
            with torch.cuda.stream(self._stream):
                for function in functions:
                    function()
        except BaseException:
            outside.wait_stream(self._stream)
            raise
        self._is_done.record(self._stream)

    def wait(self) -> None:
        """Have the current stream, or the graph that is recorded on it, wait for a refresh.

        A graph waits in each replay: for the last refresh before its launch.
        """
        self._is_done.wait(torch.cuda.current_stream(self._device))
