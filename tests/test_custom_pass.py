"""The example of a pass, as a newcomer runs it."""

from pathlib import Path

import pytest

from examples import custom_pass


@pytest.mark.usefixtures("inductor_cache")
def test_the_example_fuses_and_agrees_with_eager(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert custom_pass.main(["--dump-dir", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "piece 0: fuse_gate: 2 matches, " in printed
    assert "result equals eager's: yes" in printed
    dumped = tmp_path / "graph_0" / "passes" / "piece_0" / "02_fuse_gate.py"
    assert "#   +2 example.silu_and_mul.default" in dumped.read_text()
