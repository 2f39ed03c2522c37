"""Every error this package raises on purpose.

PiecewiseError
 +- ConfigError      an option, environment variable or registration is wrong
 +- SplitError       the graph cannot be cut into pieces
 +- ContractError    a call (or a re-trace) breaks what the runtime was built for
 +- CaptureError     a piece could not be captured into a graph
 +- PassError        a rewriting pass failed or broke the graph

Each message says what happened, the value, and what to do. `assert` is kept for our own bugs.
"""

from piecewise_backend._torch import UnwrappedByDynamo


class PiecewiseError(UnwrappedByDynamo):
    """Base of all errors of this package; reaches the caller as itself, also through Dynamo."""


class ConfigError(PiecewiseError):
    """An option, environment variable or registered name is wrong."""


class SplitError(PiecewiseError):
    """The traced graph cannot be cut into pieces."""


class ContractError(PiecewiseError):
    """A call breaks an assumption that the compiled code was built on."""


class CaptureError(PiecewiseError):
    """A piece could not be captured; no half-captured state is left."""


class PassError(PiecewiseError):
    """A rewriting pass failed or returned a broken graph."""
