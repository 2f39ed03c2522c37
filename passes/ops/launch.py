"""How a kernel is launched, as a function of its shape: nothing is tuned at run time.

In:  columns, rows, bytes of an element.
Out: `Launch`: the tile of one program, and its warps.
Knows nothing of Triton.

Note [Two regimes]
*Few* rows: all of them fit on the device in one wave, 2**20 elements at 8 a thread. A call is one
latency, so a row gets as many threads as it has vectors of 16 bytes, and a program gets one row.
*Many* rows: the memory is the bound, and what counts is instructions for each byte. A thread gets
64 bytes of a row, so that what a warp spends on addresses, the reduction and the barrier is spent
on 1024 (16-bit) elements, and still 20 to 30 warps fit on a multiprocessor, each with 2 KiB under
way. Short rows share a program, so that there are not many more programs than needed to fill the
device, and a weight is loaded once for all of them. With a residual there are two rows to load: if
they are short, a program has one pair and a thread 16 bytes of each (2 % faster at 1024 columns).
A kernel that reduces nothing has little to wait for: where there are few rows a thread has 8 bytes
(4 % faster; benchmarks/fusion_tiles.py, H200).
The regime changes with the number of rows at one place only: each kernel has two versions, and
Triton compiles each when it is first met.
"""

import dataclasses
import functools

WARP = 32
MAX_WARPS = 32
_FEW_ELEMENTS = 2**20
_MIN_MANY_TILE = 4096
_MIN_FEW_TILE = 256
_SHORT_ROW = 1024


@dataclasses.dataclass(frozen=True, slots=True)
class Launch:
    """The tile of a program, both sides powers of two, and how many warps work on it."""

    rows: int
    columns: int
    num_warps: int


def reduced_rows(
    num_columns: int,
    num_rows: int,
    element_size: int,
    group_size: int = 0,
    *,
    has_residual: bool = False,
) -> Launch:
    """Whole rows in one program: what is reduced over a row. See Note [Two regimes]."""
    columns = power_of_two(num_columns)
    is_few = num_rows * columns <= _FEW_ELEMENTS
    return _tile(columns, is_few, has_residual and columns <= _SHORT_ROW, element_size)


def split_rows(num_columns: int, num_rows: int, element_size: int, group_size: int) -> Launch:
    """Parts of rows in one program: what is reduced over groups of columns, or not at all.

    A thread has one vector of 16 bytes of each operand, or two where there are many rows.
    """
    is_few = num_rows * num_columns <= _FEW_ELEMENTS
    columns = min(power_of_two(num_columns), 512 if is_few else 2048)
    few_bytes = 16 if group_size else 8
    return _split_tile(max(columns, group_size), is_few, few_bytes, element_size)


def one_row(num_columns: int, *, is_gated: bool, has_norm: bool) -> Launch:
    """Rows of a weight that one program multiplies by the only row of values.

    A program that norms the row first has four rows of the weight to share that, one that computes
    gate and up has one of each, and any other has so many that 256 threads have 32 bytes each to
    wait for. (benchmarks/one_row.py, H200: no other tile was faster by more than 4 %.)
    """
    columns = power_of_two(num_columns)
    if is_gated:
        return Launch(1, columns, min(max(columns // 1024, 4), 16))
    rows = min(max(16384 // columns, 1), 4) if has_norm else min(max(4096 // columns, 1), 8)
    return Launch(rows, columns, 8 if columns <= 16384 else 16)


def halves_of_heads(half: int, num_rows: int, element_size: int) -> Launch:
    """Rows that are heads, in two halves of ``half`` columns; both are in one program."""
    columns = power_of_two(half)
    return _split_tile(columns, num_rows * half <= _FEW_ELEMENTS, 16, element_size)


@functools.cache
def _tile(columns: int, is_few: bool, are_short_pairs: bool, element_size: int) -> Launch:
    if is_few or are_short_pairs:
        rows = max(1, (_MIN_FEW_TILE if is_few else _SHORT_ROW) // columns)
        return Launch(rows, columns, _warps(rows * columns, 16 // element_size))
    rows = max(1, _MIN_MANY_TILE // columns)
    return Launch(rows, columns, _warps(rows * columns, 64 // element_size))


@functools.cache
def _split_tile(columns: int, is_few: bool, few_bytes: int, element_size: int) -> Launch:
    rows = max(1, (512 if is_few else 2048) // columns)
    per_thread = (few_bytes if is_few else 32) // element_size
    return Launch(rows, columns, _warps(rows * columns, per_thread))


def _warps(num_elements: int, per_thread: int) -> int:
    return min(max(num_elements // (WARP * per_thread), 1), MAX_WARPS)


def power_of_two(number: int) -> int:
    """The smallest power of two that is at least ``number``."""
    return 1 << (number - 1).bit_length()
