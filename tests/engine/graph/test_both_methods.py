"""An engine with a draft inside its graphs and a second method on the host: sequences of both, one after the other or mixed."""

import pytest

from paceline.engine.hooks.method_assignment import DefaultMethodTrial
from paceline.engine.step.step import GRAPH, HostReason
from paceline.models.runner.gpu.runner import GpuRunner
from paceline.speculation.proposer import ProposerTraits
from paceline.speculation.proposers.suffix import NgramProposer
from tests.engine.graph.test_executor import DEVICE, SAMPLINGS, SMALL, check, graph_engine
from tests.fakes import draft_model, request, tiny_model

PROMPTS = ([1, 2, 3, 1, 2, 3, 1, 2], [4, 5, 4, 5, 4, 5], [6, 7, 8, 6, 7], [9, 1, 9, 1, 9])


class HostDrafts(NgramProposer):
    """Stands for a pool: it drafts beside the device."""

    traits = ProposerTraits(can_miss_steps=True)


@pytest.mark.parametrize("arrivals", [1, 4])
def test_the_text_does_not_depend_on_the_choice(arrivals: int) -> None:
    draft = draft_model(tiny_model(config=SMALL, perturb=0.1, device=DEVICE), runner=GpuRunner)
    engine = graph_engine(
        draft,
        3,
        graph_methods=frozenset(["fake"]),
        more_proposers={"pool": HostDrafts()},
        default_methods=("pool", "fake"),
    )
    methods: list[str] = []

    def assign(count: int, load: int, available: object) -> str:
        methods.append(("fake", "pool")[len(methods) % 2])
        return methods[-1]

    engine.hooks.get(DefaultMethodTrial).default.assign = assign  # type: ignore[method-assign]
    for batch in range(2):
        asked = [
            request(f"{batch}-{i}", ids, max_tokens=10, **SAMPLINGS[i % len(SAMPLINGS)])
            for i, ids in enumerate(PROMPTS)
        ]
        check(engine, asked, arrivals=arrivals)
    assert set(methods) == {"pool", "fake"}
    assert engine.executors.counts[GRAPH] > 0
    assert engine.executors.counts[HostReason.PROPOSER] > 0
