"""Hand-offs between engines with GPU caches: layer by layer, on separate streams, beside other sequences."""

from dataclasses import replace

import pytest
import torch

from paceline.core.request import Request
from paceline.engine.engine import Engine
from paceline.models.runners import make_runner
from paceline.speculation.proposers.eagle.eagle import EagleProposer
from tests.engine.harness import letters, outputs_of, request, tokens_of
from tests.engine.test_handoff import hand_off
from tests.exactness.contract import check_contract, differences
from tests.exactness.suite import plain_text
from tests.fakes import tiny_engine, tiny_model
from tests.heads import eagle
from tests.processes.target_harness import StreamReader
from tests.worker.handoff.test_handoffs import LONG, PrefillWorker, Target, split_cluster

DEVICE = "cuda"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def engine(proposer: EagleProposer | None = None) -> Engine:
    model = tiny_model(device=DEVICE)
    built = tiny_engine(model, proposer, 6, runner_kind=make_runner)  # type: ignore[arg-type]
    built.tokenizer = built.validator._tokenizer = letters()
    return built


def requests() -> list[Request]:
    return [request(f"r{i}", LONG[i:], temperature=float(i % 2), max_tokens=24, ignore_eos=True) for i in range(6)]


def check(submitted: list[Request], tokens: dict[tuple[str, int], list[int]]) -> None:
    model = tiny_model(device=DEVICE)
    check_contract(differences(model, submitted, plain_text(model, submitted), tokens), is_bitwise=False)


@pytest.mark.parametrize("has_head", [False, True])
def test_hand_off_between_two_engines(has_head: bool) -> None:
    source, target = engine(), engine(eagle(tiny_model(device=DEVICE)) if has_head else None)
    submitted = requests()
    tokens = {}
    for one in submitted:
        hand_off(source, target, one, states=has_head)
        outputs = outputs_of(target, one)
        assert outputs[0].num_cached == (len(one.prompt_ids) - 1) // 16 * 16
        tokens[one.id, 0] = tokens_of(outputs, one.id)
    check(submitted, tokens)


def test_hand_off_between_workers_while_other_sequences_decode() -> None:
    target, prefill_worker = Target("t", engine()), PrefillWorker("p", engine())
    with split_cluster(target, prefill_worker) as pool:
        busy = [replace(one, id=f"busy{i}", prompt_ids=LONG[i : i + 9]) for i, one in enumerate(requests())]
        submitted = [*busy, *requests()]
        outputs = StreamReader(pool, *submitted).read_all()
        assert target.handoffs.counts().done > 0
        assert target.handoffs.counts().failed == 0
    check(submitted, {(one.id, 0): tokens_of(outputs, one.id) for one in submitted})
