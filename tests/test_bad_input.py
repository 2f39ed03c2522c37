"""Every mistake gets the error made for it, as itself, and the next valid call works."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piecewise_backend as pw
from tests.helpers import Decoder, compile, mark_dynamic, out_attn, rows, same
from tests.runtime_helpers import quiet, toy


def works(compiled: Any, function: Any = toy) -> None:
    """A valid call, traced and replayed."""
    with torch.no_grad():
        for call in range(4):
            x = mark_dynamic([rows(8, seed=call)])[0]
            same(compiled(x), function(x), f"call {call}")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cudagraph_capture_size": [1]}, "did you mean 'cudagraph_capture_sizes'"),
        ({"cudagraphmode": "none"}, "did you mean 'cudagraph_mode'"),
        ({"nonsense": 1}, "unknown option 'nonsense'; known: .*splitting_ops"),
        ({"compiler": "gcc"}, r"compiler='gcc'; use one of \['inductor', 'eager'\]"),
        ({"graph_impl": "hip"}, "graph_impl='hip'"),
        ({"outputs": "mine"}, "outputs='mine'"),
        ({"on_fallback": "ignore"}, "on_fallback='ignore'"),
        ({"cudagraph_mode": "fulll"}, "cudagraph_mode='fulll'; use one of"),
        ({"cudagraph_mode": 3}, "cudagraph_mode=3"),
        ({"cudagraph_num_of_warmups": -1}, "cudagraph_num_of_warmups=-1"),
        ({"capture_after": "2"}, "capture_after='2'"),
        ({"max_padding_factor": 0.5}, "max_padding_factor=0.5; give a number of at least 1"),
        ({"max_cudagraph_capture_size": 0}, "max_cudagraph_capture_size=0"),
        ({"max_cudagraph_capture_size": 2}, r"leaves none of the sizes \[4, 8, 16\]"),
        ({"dump_dir": 7}, "dump_dir=7; give a path"),
        ({"inductor_compile_config": [1]}, r"inductor_compile_config=\[1\]"),
        ({"splitting_ops": 5}, "splitting_ops=5; give a list of names"),
        ({"splitting_ops": ["attn"]}, "'attn' names no namespace; write 'namespace::attn'"),
        ({"splitting_ops": ["pwtest::atn"]}, "does not exist; did you mean 'pwtest::attn'"),
        ({"splitting_ops": ["nowhere::nothing_like_it"]}, "'nowhere::nothing_like_it' does not"),
    ]
    + [
        ({"cudagraph_capture_sizes": sizes}, "cudagraph_capture_sizes=.*give positive integers")
        for sizes in ([0], [-1], [1.5], ["8"], [], [True], "8")
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    compiled = compile(toy, **options)
    with torch.no_grad(), pytest.raises(pw.ConfigError, match=message) as caught:
        compiled(rows(8))
    assert type(caught.value) is pw.ConfigError, "as itself, through Dynamo"
    works(compile(toy))


def test_wrong_mode() -> None:
    compiled = torch.compile(toy, backend="piecewise", mode="fastest")
    with torch.no_grad(), pytest.raises(pw.ConfigError, match="mode='fastest' is not known"):
        compiled(rows(8))
    works(compile(toy))


def test_wrong_options_are_named_by_warm_up_too() -> None:
    with pytest.raises(pw.ConfigError, match="did you mean 'compiler'"):
        pw.warmup(compile(toy, compilr="eager"), lambda d: (rows(d.num_tokens),))


def test_wrong_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = compile(toy)
    monkeypatch.setenv("PIECEWISE_CAPTURE_SIZES", "1,2")
    with torch.no_grad(), pytest.raises(pw.ConfigError, match="PIECEWISE_CAPTURE_SIZES sets no"):
        compiled(rows(8))
    monkeypatch.delenv("PIECEWISE_CAPTURE_SIZES")
    works(compiled)


def test_gradients_required() -> None:
    model = Decoder()
    model.requires_grad_()
    compiled = compile(model)
    with pytest.raises(pw.ContractError, match=r"weight.* requires gradients.*torch\.no_grad"):
        compiled(rows(8))
    works(compiled, model)


def test_gradients_required_of_an_input() -> None:
    compiled = compile(toy)
    with pytest.raises(pw.ContractError, match=r"L\['x'\] requires gradients"):
        compiled(rows(8).requires_grad_())
    works(compiled)


def test_grad_mode_without_gradients_is_fine() -> None:
    compiled = compile(toy)
    for call in range(4):
        x = mark_dynamic([rows(8, seed=call)])[0]
        same(compiled(x), toy(x), f"call {call}")


def test_two_devices() -> None:
    def model(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return out_attn(x, x, x) * 2, y + 1

    compiled = compile(model)
    with (
        torch.no_grad(),
        pytest.raises(pw.SplitError, match=r"tensors on \['cpu', 'meta'\].*one device"),
    ):
        compiled(rows(8), rows(8).to("meta"))
    with torch.no_grad():
        same(compiled(rows(8), rows(8)), model(rows(8), rows(8)), "one device")


def test_data_dependent_size() -> None:
    def model(x: Tensor) -> Tensor:
        kept = x[x[:, 0] > 3]
        return out_attn(kept, kept, kept) * 2

    compiled = compile(model)
    with (
        torch.no_grad(),
        torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True),
        pytest.raises(pw.SplitError, match="depends on data"),
    ):
        compiled(rows(8))
    works(compile(toy))


def test_registered_op_that_the_options_leave_out() -> None:
    pw.register_splitting_op("pwtest::attn")
    compiled = compile(toy, splitting_ops=["pwtest::fresh"])
    with torch.no_grad(), pytest.raises(pw.SplitError, match=r"'pwtest::attn' is a registered"):
        compiled(rows(8))
    works(compile(toy))


def test_op_whose_fake_promises_another_shape() -> None:
    """Found when the result reaches the static buffer: no broadcast hides it."""

    @torch.library.custom_op("pwtest::liar", mutates_args=[])
    def liar(x: Tensor) -> Tensor:
        return x[:1].clone()

    @liar.register_fake
    def _(x: Tensor) -> Tensor:
        return torch.empty_like(x)

    def model(x: Tensor) -> Tensor:
        return torch.ops.pwtest.liar(x * 2) + 1

    compiled = compile(model, splitting_ops=["pwtest::liar"], compiler="eager")
    with torch.no_grad():
        for _ in range(2):
            compiled(mark_dynamic([rows(8)])[0])
        with pytest.raises(pw.ContractError, match=r"pwtest::liar .*register_fake"):
            compiled(rows(8))


def test_graph_break() -> None:
    """With `fullgraph=True` Dynamo says where; without, each part is a graph of its own."""

    def model(x: Tensor) -> Tensor:
        x = out_attn(x, x, x) * 2
        torch._dynamo.graph_break()
        return out_attn(x, x, x) + 1

    with torch.no_grad(), pytest.raises(torch._dynamo.exc.Unsupported, match="graph_break"):
        compile(model)(rows(8))
    torch._dynamo.reset()
    options = {
        "compiler": "eager",
        "graph_impl": "emulated",
        "splitting_ops": ["pwtest::attn"],
        "cudagraph_capture_sizes": [4, 8],
    }
    compiled = torch.compile(model, backend="piecewise", options=options)
    with torch.no_grad():
        for call in range(4):
            for n in (8, 3):
                x = mark_dynamic([rows(n, seed=call)])[0]
                with quiet():
                    same(compiled(x), model(x), f"call {call} of {n}")
    assert len(pw.report(compiled).graphs) >= 2
    assert sum(graph.num_replays for graph in pw.report(compiled).graphs) > 0


def test_wrong_call_of_the_model() -> None:
    compiled = compile(toy)
    works(compiled)
    with torch.no_grad(), pytest.raises(TypeError):
        compiled()
    with torch.no_grad(), pytest.raises((RuntimeError, TypeError)):
        compiled("text")
    works(compiled)


def test_model_on_training_mode_without_gradients() -> None:
    """Dropout in a piece draws anew in every call, captured or not."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dropout = nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            return out_attn(self.dropout(x), x, x) * 1

    compiled = compile(Model())
    with torch.no_grad(), quiet():
        seen = {compiled(mark_dynamic([rows(8)])[0]).sum().item() for _ in range(8)}
    assert len(seen) > 4
