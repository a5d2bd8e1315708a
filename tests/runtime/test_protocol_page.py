"""What docs/protocol.md says in Python computes what the workers compute."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.models.drafts.compatibility import fingerprint
from paceline.models.loading.load import open_checkpoint
from paceline.speculation.verification.noise import NoiseKey, Purpose, gumbel
from tests.engine.test_build import save_checkpoint

PAGE = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text("utf-8")


def said() -> dict[str, Any]:
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(block, names)
    return names


@pytest.mark.parametrize("key", [NoiseKey(0, 0, 0), NoiseKey(2**63 - 1, 3, 70_000), NoiseKey(42, 1, 511)])
@pytest.mark.parametrize("purpose", [Purpose.SHARED, Purpose.DRAFT])
def test_noise(key: NoiseKey, purpose: Purpose) -> None:
    ours = gumbel([key], purpose, 2000, torch.device("cpu"))[0].tolist()
    noise = said()["gumbel"]
    theirs = [noise(purpose, *key, token) for token in range(2000)]
    assert theirs == pytest.approx(ours, abs=2e-6, rel=1e-5)


def test_the_checksum_of_a_vocabulary(tmp_path: Path) -> None:
    tokenizer = open_checkpoint(save_checkpoint(tmp_path / "model")).read_tokenizer()
    assert said()["vocabulary"](tokenizer.vocab) == fingerprint(tokenizer).vocabulary
