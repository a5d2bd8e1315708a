"""Prompts handed over between engines whose caches are on a GPU: layer by layer, on streams of their own, beside others."""

from dataclasses import replace

import pytest
import torch

from paceline.core.request import Request
from paceline.engine.engine import Engine
from paceline.models.runners import make_runner
from paceline.speculation.proposers.eagle import EagleProposer
from tests.engine.harness import letters, outputs_of, request, tokens_of
from tests.engine.test_handoff import hand_over
from tests.exactness.contract import check_contract, differences
from tests.exactness.suite import plain_text
from tests.fakes import tiny_engine, tiny_model
from tests.heads import eagle
from tests.runtime.handoff.test_handoffs import LONG, Prefiller, Target, apart
from tests.runtime.target_harness import StreamReader

DEVICE = "cuda"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def engine(proposer: EagleProposer | None = None) -> Engine:
    model = tiny_model(device=DEVICE)
    made = tiny_engine(model, proposer, 6, runner_kind=make_runner)  # type: ignore[arg-type]
    made.tokenizer = made.validator._tokenizer = letters()
    return made


def requests() -> list[Request]:
    return [request(f"r{i}", LONG[i:], temperature=float(i % 2), max_tokens=24, ignore_eos=True) for i in range(6)]


def check(asked: list[Request], tokens: dict[tuple[str, int], list[int]]) -> None:
    model = tiny_model(device=DEVICE)
    check_contract(differences(model, asked, plain_text(model, asked), tokens), is_bitwise=False)


@pytest.mark.parametrize("has_head", [False, True])
def test_from_one_engine_to_another(has_head: bool) -> None:
    source, target = engine(), engine(eagle(tiny_model(device=DEVICE)) if has_head else None)
    asked = requests()
    said = {}
    for one in asked:
        hand_over(source, target, one, states=has_head)
        outputs = outputs_of(target, one)
        assert outputs[0].num_cached == (len(one.prompt_ids) - 1) // 16 * 16
        said[one.id, 0] = tokens_of(outputs, one.id)
    check(asked, said)


def test_between_workers_while_others_decode() -> None:
    target, prefiller = Target("t", engine()), Prefiller("p", engine())
    with apart(target, prefiller) as pool:
        busy = [replace(one, id=f"busy{i}", prompt_ids=LONG[i : i + 9]) for i, one in enumerate(requests())]
        asked = [*busy, *requests()]
        outputs = StreamReader(pool, *asked).read_all()
        assert target.handoffs.record().done > 0
        assert target.handoffs.record().failed == 0
    check(asked, {(one.id, 0): tokens_of(outputs, one.id) for one in asked})
