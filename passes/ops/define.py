"""Give an op its schema and its implementations.

In:  a signature, one function that calls a *runner*, and three runners: CPU, CUDA, fake.
Out: ``torch.ops.piecewise.<name>``.
Knows nothing of what the ops compute.

Note [Dispatch]
The ops are defined by schema, without the wrappers of ``torch.library.custom_op``: those check for
aliases and gradients in Python on every call and cost about three times as much as the whole rest
of the dispatch (20 us against 6 us with two small outputs on a CPU). Such an op is as opaque to
Inductor as a custom op, and has no gradient.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

Runner = Callable[..., Any]


def define(
    signature: str, form: Callable[..., object], *, cpu: Runner, cuda: Runner, fake: Runner
) -> None:
    """Define ``piecewise::<signature>``. See Note [Dispatch].

    ``form(runner, *arguments)`` arranges the arguments of the op for a runner, and what the runner
    gives for the schema.
    """
    name, _, rest = signature.partition("(")
    qualified = f"piecewise::{name}"
    torch.library.define(qualified, f"({rest}", tags=torch.Tag.pt2_compliant_tag)
    torch.library.impl(qualified, "cpu", functools.partial(form, cpu))
    torch.library.impl(qualified, "cuda", functools.partial(form, cuda))
    torch.library.register_fake(qualified, functools.partial(form, fake))


def needs_triton(error: ImportError) -> ImportError:
    """What to raise where the kernels cannot be imported."""
    return ImportError(
        f"the piecewise ops are Triton kernels on CUDA, and triton cannot be imported ({error}); "
        "install it with 'pip install triton', or call the op on CPU tensors"
    )
