import pytest
import torch

from paceline.speculation.rows.noise import NoiseKey, Purpose, gumbel_at
from paceline.tools.orchestrate.servers import gumbel

TOKENS = (0, 1, 2, 77, 4096, 49151, 128255, 2**31 - 1)


@pytest.mark.parametrize("seed", [0, 1, 12345, 2**63 - 1])
@pytest.mark.parametrize("position", [0, 1, 500, 131071])
def test_values_are_those_of_the_engine(seed: int, position: int) -> None:
    expected = gumbel_at([NoiseKey(seed, 0, position)], Purpose.SHARED, torch.tensor([TOKENS]))[0].tolist()
    assert [gumbel(seed, position, token) for token in TOKENS] == pytest.approx(expected, rel=1e-5, abs=1e-6)
