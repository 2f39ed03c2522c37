"""How much memory graphs may take, and how much they will.

In:  the option `max_graph_memory`; what the captures of the two largest sizes took.
Out: a limit in bytes, an `Estimate`, and the sizes that fit.
Knows nothing of models or captures.

Note [Estimate]
Sizes are captured largest first, and share one pool. So the largest pays for the pool, and for what
the driver loads once; the second adds what it adds. Each further size needs no more from the
allocator, as it fits into what larger ones have; but the driver keeps as much for its graphs as for
those of the second, because a size has as many graphs and kernels as any other. The device gives
its memory out in chunks of 2 MiB, so a size shows up to one chunk too much or too little: if the
two largest agree but for one chunk, their mean is taken.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection
from decimal import Decimal

from piecewise_backend.batch import CUDAGraphMode
from piecewise_backend.costs import MIB, MemoryUse, mib
from piecewise_backend.errors import ConfigError
from piecewise_backend.grid import within_budget

CHUNK = 2 * MIB
"""In which a device gives its memory out."""
_UNITS = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def memory_limit(name: str, value: object) -> int | float | None:
    """The value of `max_graph_memory`: bytes, a fraction of the device's memory, or no limit.

    Args:
        name: of the option, for the error.
        value: an integer of at least 1, a number between 0 and 1, text such as `"2GiB"`, or None.

    Raises:
        ConfigError: something else.
    """
    found = amount(value) if isinstance(value, str) else value
    if found is None and value is None:
        return None
    is_bytes = type(found) is int and found >= 1
    is_fraction = type(found) is float and 0 < found < 1
    if not (is_bytes or is_fraction):
        raise ConfigError(
            f"{name}={value!r}; give bytes, a fraction of the device's memory such as 0.05, or "
            "text such as '2GiB' or '512MiB'"
        )
    return found  # type: ignore[return-value]


def amount(text: str) -> int | float | None:
    """The number that a text such as `"2GiB"`, `"1000"` or `"0.05"` stands for, if it is one."""
    match = re.fullmatch(r"(\d{1,30}|\d{0,30}\.\d{1,30}) ?(|KiB|MiB|GiB)", text.strip())
    if match is None:
        return None
    digits, unit = match.groups()
    if unit:
        return int(Decimal(digits) * _UNITS[unit])
    return float(digits) if "." in digits else int(digits)


@dataclasses.dataclass(frozen=True, slots=True)
class Estimate:
    """What the graphs of one mode will take, judged by the two largest sizes."""

    mode: CUDAGraphMode
    """FULL or PIECEWISE."""
    first_bytes: int
    """What the largest size took, the pool included."""
    second_bytes: int
    """What the second took."""
    bytes_per_size: int
    """What each further size is expected to take."""
    num_sizes: int
    """How many sizes there are, the two largest included."""

    @classmethod
    def of(
        cls, mode: CUDAGraphMode, first: MemoryUse, second: MemoryUse, num_sizes: int
    ) -> Estimate:
        """See Note [Estimate].

        Args:
            first: by how much memory grew with the largest size.
            second: the same of the second.
            num_sizes: at least 2.
        """
        of_first, of_second = first.driver_bytes, second.driver_bytes
        each = of_second
        if abs(of_first - of_second) <= CHUNK:
            each = (of_first + of_second) // 2
        return cls(mode, first.num_bytes, second.num_bytes, max(each, 0), num_sizes)

    @property
    def num_bytes(self) -> int:
        """Of all sizes together."""
        further = self.num_sizes - 2
        return self.first_bytes + self.second_bytes + further * self.bytes_per_size

    def __str__(self) -> str:
        return (
            f"about {mib(self.num_bytes)} MiB for {self.num_sizes} sizes: {mib(self.first_bytes)}, "
            f"{mib(self.second_bytes)}, then {mib(self.bytes_per_size)} MiB each"
        )


def sizes_that_fit(
    sizes: Collection[int], room_bytes: int | None, bytes_per_size: int
) -> tuple[int, ...]:
    """Those of some sizes, not captured yet, that there is room for.

    The smallest is kept longest, and the rest chosen for the least expected padding.

    Args:
        sizes: in any order.
        room_bytes: that they may take; None if there is no limit.
        bytes_per_size: what each of them takes.
    """
    ascending = tuple(sorted(sizes))
    if room_bytes is None or bytes_per_size <= 0:
        return ascending
    num_kept = max(room_bytes, 0) // bytes_per_size
    if num_kept >= len(ascending):
        return ascending
    return within_budget(ascending, num_kept) if num_kept > 1 else ascending[:num_kept]
