"""Fusions in whole compilations on a GPU, with and without CUDA graphs, against eager."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import piecewise_backend as pw
from piecewise_backend.passes.fusions import FUSIONS
from tests.fused_ops import (
    CASES,
    DTYPE_STEP,
    EPS,
    FP8,
    NAMES,
    Case,
    plain_norm,
    qk_arguments,
    steps_apart,
)
from tests.gpu.test_fused_ops import compare_scales
from tests.test_fusion_passes import layer
from tests.test_fusions import halves_rotated, values

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton"),
]

SHARE, MOST = 1e-3, 8
HALF_DTYPES = [torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="module", autouse=True)
def _one_kernel_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Inductor's kernels of this module only, shared by its tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        yield


def compiled_and_matches(model: Any, args: tuple[Any, ...], **options: Any) -> tuple[Any, Any]:
    """The results, and which fusions matched how often in all pieces."""
    given = {"splitting_ops": [], "cudagraph_mode": "none"}
    compiled = torch.compile(model, backend="piecewise", fullgraph=True, options=given | options)
    results = compiled(*args)
    matches: dict[str, int] = {}
    for records in pw.report(compiled).graphs[0].passes.values():
        for record in records:
            if record.name in FUSIONS and record.matches:
                matches[record.name] = matches.get(record.name, 0) + record.matches
    return results, matches


def compare(got: Any, expected: Any, dtype: torch.dtype) -> None:
    """As `test_fused_ops` compares: neighbours in 1 of 1000, scales to 1e-6 but for roundings."""
    for a, b in zip(pytree.tree_leaves(got), pytree.tree_leaves(expected), strict=True):
        assert (a.dtype, a.shape, a.device) == (b.dtype, b.shape, b.device)
        if a.dtype == FP8:
            apart = steps_apart(a, b)
            assert apart.max() <= 1
            assert apart.count_nonzero() <= MOST + SHARE * apart.numel()
        elif a.dtype == torch.float32 and dtype != torch.float32:
            compare_scales(a.cpu(), b.cpu(), dtype)
        else:
            torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("num_tokens", [1, 37, 2000])
@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_each_fusion(case: Case, dtype: torch.dtype, num_tokens: int) -> None:
    args = case.arguments((num_tokens, 1024), dtype, device="cuda")

    def model(*args: Any) -> Any:
        return case.plain(args)

    name = f"fuse_{case.name}"
    got, matches = compiled_and_matches(model, args, pass_config={name: True})
    assert matches == {name: 1}
    compare(got, model(*args), dtype)


@pytest.mark.parametrize("num_tokens", [1, 37, 2000])
@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
def test_qk_norm_rope(dtype: torch.dtype, num_tokens: int) -> None:
    args = qk_arguments((num_tokens,), 8, 2, 128, dtype, device="cuda")[:-1]

    def model(q: Tensor, k: Tensor, qw: Tensor, kw: Tensor, cos: Tensor, sin: Tensor) -> Any:
        return tuple(
            halves_rotated(plain_norm(x, weight, EPS), cos, sin) for x, weight in ((q, qw), (k, kw))
        )

    name = "fuse_qk_norm_rope"
    got, matches = compiled_and_matches(model, args, pass_config={name: True})
    assert matches == {name: 1}
    for a, b in zip(got, model(*args), strict=True):
        # One rounding, of a rotation whose products the kernel may contract.
        torch.testing.assert_close(a, b, rtol=2 * DTYPE_STEP[dtype], atol=8 * DTYPE_STEP[dtype])


def test_from_cuda_graphs_at_every_token_count() -> None:
    """Pieces between attention ops, captured; fused ops are inside of the graphs."""
    model = torch.compile(
        layer,
        backend="piecewise",
        fullgraph=True,
        options={
            "splitting_ops": ["pwtest::attn"],
            "cudagraph_capture_sizes": [4, 8, 16],
            "cudagraph_mode": "piecewise",
            "pass_config": dict.fromkeys(FUSIONS, True),
        },
    )
    weight, scale = values(128, seed=1).cuda(), torch.tensor([0.02], device="cuda")
    for num_tokens in range(1, 17):
        args = (
            values(num_tokens, 128, seed=num_tokens).cuda(),
            values(num_tokens, 128, seed=2).cuda(),
            weight,
            scale,
        )
        for position in (0, 1):
            torch._dynamo.maybe_mark_dynamic(args[position], 0)
        for _ in range(3):
            compare(model(*args), layer(*args), torch.bfloat16)
    pieces = pw.report(model).graphs[0].passes.values()
    assert sum(r.matches for piece in pieces for r in piece if r.name in FUSIONS) == 3
