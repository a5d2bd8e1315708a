"""Families with layers of their own run in the graph executor, with the text of plain decoding."""

import pytest

from paceline.models.runner.gpu.runner import GpuRunner
from tests.exactness.contract import check_contract, differences
from tests.exactness.suite import plain_text
from tests.exactness.test_families import FAMILIES
from tests.fakes import draft_model, request, run, tiny_engine, tiny_model
from tests.kernels.gpu.cases import DEVICE

SPECIAL = [
    name
    for name, config in FAMILIES.items()
    if config.experts is not None or config.norms != "pre" or config.heads.query_scale or config.residual_scale != 1
]


@pytest.mark.interpreted
@pytest.mark.parametrize("family", SPECIAL)
def test_the_text_of_graph_steps_is_plain_text(family: str) -> None:
    config = FAMILIES[family]
    target, other = (tiny_model(perturb=perturb, config=config, device=DEVICE.type) for perturb in (0.0, 0.3))
    draft = draft_model(other, runner=GpuRunner)
    engine = tiny_engine(target, draft, 3, runner_kind=GpuRunner, graph_depth=3, max_num_seqs=2)
    requests = [request(f"r{i}", [3 + i, 5, 7, 11 + i], max_tokens=9, temperature=0.0) for i in range(2)]
    result = run(engine, requests)
    assert engine.graph is not None
    assert engine.graph.num_steps > 0
    assert result.drafted > 0
    check_contract(differences(target, requests, plain_text(target, requests), result.tokens), is_bitwise=False)
