"""The main job, as a newcomer runs it."""

from pathlib import Path

import pytest

from examples import quickstart


@pytest.mark.filterwarnings("ignore:piecewise:RuntimeWarning")  # prefills lie above the grid
def test_the_quickstart_generates_the_tokens_that_eager_generates(
    tmp_path: Path, capsys, monkeypatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    status = quickstart.main(["--device", "cpu", "--dump-dir", str(tmp_path / "dumps")])
    printed = capsys.readouterr().out
    assert status == 0
    assert "piecewise tokens equal eager's: yes" in printed
    assert "num_inductor_compiles: 3\n" in printed
    assert "steps from graphs: 28\n" in printed
    assert list(tmp_path.glob("dumps/*/computation_graph.py"))
