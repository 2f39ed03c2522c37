"""Walk over the steps of a graph at one size so that its pieces can be tuned.

In:  a request to capture the size, options.
Out: the choices of the graph's `Versions`. Nothing is captured.
Knows nothing of dispatch.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable

from piecewise_backend.candidates import prepare
from piecewise_backend.capture import capture_size
from piecewise_backend.capture_request import CaptureRequest
from piecewise_backend.config import Config
from piecewise_backend.errors import CaptureError
from piecewise_backend.graphs import GraphPool
from piecewise_backend.pools import TrialPool, empty_cache
from piecewise_backend.tuning import Tuner

log = logging.getLogger(__name__)


def tune_pieces(
    request: CaptureRequest,
    config: Config,
    make_pool: Callable[[], GraphPool],
    *,
    is_first: bool,
) -> None:
    """Tune each distinct piece on the inputs that it has at this size.

    A piece that cannot be run like this is not tuned; its capture will say so.

    Args:
        is_first: no other size was tuned before: versions for all are compiled ahead.
    """
    if is_first and config.tuning == "warmup":
        prepare(request.graph, config, request.sizes)
    tuner = Tuner(request.graph, config, request.sizes, make_pool)
    pool = TrialPool(request.graph.device, request.pool)
    # Padding is tried when the size is captured, with the versions that were chosen.
    trial = dataclasses.replace(request, pool=pool, fewest=request.sizes, tune=tuner.tune)
    try:
        capture_size(trial)
    except CaptureError as error:
        log.warning("pieces are not tuned for sizes %s: %s", request.sizes, error)
    empty_cache(request.graph.device)  # or the capture would count what is kept of this
