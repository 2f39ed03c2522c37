"""What a trace assumed and guards would check, kept for calls without guards.

In:  what Dynamo rewrote.
Out: an error for sizes that a condition of the trace excludes, or for code that cannot run
     without guards at all.
Knows nothing of how calls are served.
"""

from __future__ import annotations

from piecewise_backend import _torch
from piecewise_backend.decompiled import decompiled, lines_around
from piecewise_backend.errors import ContractError
from piecewise_backend.sizes import SizeFunction, Sizes, TokenDim


class Assumptions:
    """Conditions on the sizes of a graph, each with the user's line that asked."""

    def __init__(self, token_dim: TokenDim, rewritten: _torch.Rewritten | None = None) -> None:
        self._token_dim = token_dim
        symbols = set(token_dim.symbols)
        self._conditions = [
            (SizeFunction(token_dim.symbols, [condition]), f"{condition}, asked for by: {where}")
            for condition, where in (rewritten.shape_guards if rewritten else ())
            if condition.free_symbols and condition.free_symbols <= symbols
        ]

    def require(self, sizes: Sizes) -> None:
        """Called once for each new batch of sizes.

        Raises:
            ContractError: a condition does not hold.
        """
        for holds, text in self._conditions:
            if not holds(sizes)[0]:
                raise ContractError(
                    f"{self._token_dim.description} = {sizes} violates what the trace assumed: "
                    f"{text}; compile another instance for such sizes"
                )


def refuse_assignments(rewritten: _torch.Rewritten) -> None:
    """A value that the trace computed would be assigned again in every call.

    Raises:
        ContractError: the code assigns attributes of modules.
    """
    if rewritten.assigned:
        name = rewritten.assigned[0].rpartition(".")[2]
        source = decompiled(rewritten.code) if rewritten.code is not None else ""
        raise ContractError(
            f"the model assigns {', '.join(rewritten.assigned)} while it runs, which code without "
            "guards cannot follow; write in place (`.copy_()`), or return the value. Dynamo made "
            f"of it:\n{lines_around(source, name)}"
        )
