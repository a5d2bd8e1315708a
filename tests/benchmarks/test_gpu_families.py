"""benchmarks/gpu/gpu_families.py refuses to run without a GPU, with a message."""

import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((), "this needs a GPU; tests/engine/"), (("--device", "cpu"), "unrecognized arguments: --device cpu")],
)
def test_without_a_gpu_it_is_refused(
    arguments: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "gpu"))
    import gpu_families

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu_families.py", *arguments])
    with pytest.raises(SystemExit) as end:
        gpu_families.parse()
    assert end.value.code == 2
    assert message in capsys.readouterr().err
