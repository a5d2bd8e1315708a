"""The proposers of an engine: a draft folder selects its method, and the text stays the target's."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.core.config import SpeculationConfig
from paceline.core.errors import InvalidConfig
from paceline.core.request import DRAFT_METHODS
from paceline.core.request import METHODS as KNOWN
from paceline.engine.start.proposers import default_methods, pick_method, prefill_tokens
from paceline.engine.step.step import Schedule
from paceline.speculation.drafts.drafts import Draft, depths
from paceline.speculation.proposers.block import BlockProposer
from paceline.speculation.proposers.eagle.eagle import EagleProposer
from paceline.speculation.proposers.medusa import MedusaProposer
from paceline.speculation.proposers.model.draft_model import DraftModelProposer
from paceline.speculation.proposers.suffix import NgramProposer
from tests.engine.start.test_build import engine, save_checkpoint, texts
from tests.fakes import tiny_model
from tests.heads import draft_config, draft_tensors, save_draft
from tests.public_heads import MASK, PUBLIC_HEADS

METHODS = {
    "eagle": ("eagle", EagleProposer),
    "medusa": ("medusa", MedusaProposer),
    "distilled": ("draft_model", DraftModelProposer),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_checkpoint(tmp_path_factory.mktemp("models") / "target")


@pytest.mark.parametrize("kind", METHODS)
def test_a_draft_folder_selects_its_method(target: str, tmp_path: Path, kind: str) -> None:
    method, proposer = METHODS[kind]
    config = draft_config(tiny_model(), kind)
    draft = save_draft(tmp_path / kind, config, draft_tensors(config, reduced=24))
    expected = texts(engine(target, speculation={"enabled": False}), temperature=0.7)
    drafted = engine(target, draft=draft, speculation={"depth": "fixed", "max_depth": 12})
    assert isinstance(drafted.speculator.proposers[method], proposer)
    assert {*drafted.speculator.proposers, "pool"} == set(KNOWN) - (set(DRAFT_METHODS) - {method})
    assert drafted.status.snapshot().flags.method == method
    assert texts(drafted, temperature=0.7) == expected
    (traffic,) = drafted.status.snapshot().traffic
    assert traffic.method == method
    assert len(traffic.alphas) > 0


@pytest.mark.parametrize(
    ("name", "states", "method", "proposer"),
    [
        ("speculators fc_norm", {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}, "eagle", EagleProposer),
        ("dflash", {"dflash_config": {"mask_token_id": MASK, "target_layer_ids": [-1, 0, 1]}}, "dflash", BlockProposer),
        ("dspark", {"target_layer_ids": [-1, 1]}, "dflash", BlockProposer),
        ("medusa", {}, "medusa", MedusaProposer),
    ],
)
def test_a_published_head_selects_its_method(
    target: str, tmp_path: Path, name: str, states: dict[str, Any], method: str, proposer: type
) -> None:
    head = PUBLIC_HEADS[name]()
    draft = str(replace(head, config={**head.config, **states}).save(tmp_path / "head"))
    expected = texts(engine(target, speculation={"enabled": False}), temperature=0.7)
    drafted = engine(target, draft=draft, speculation={"depth": "fixed", "max_depth": 5})
    assert isinstance(drafted.speculator.proposers[method], proposer)
    assert texts(drafted, temperature=0.7) == expected
    (traffic,) = drafted.status.snapshot().traffic
    assert traffic.method == method
    assert len(traffic.alphas) > 0


@pytest.mark.parametrize("kind", ["eagle", "medusa"])
def test_the_end_of_a_text_bounds_the_levels_of_a_tree_and_not_its_size(target: str, tmp_path: Path, kind: str) -> None:
    config = draft_config(tiny_model(), kind)
    draft = save_draft(tmp_path / kind, config, draft_tensors(config))
    drafted = engine(target, draft=draft, speculation={"depth": "fixed", "max_depth": 12})
    seen: list[tuple[int, int]] = []
    propose = drafted.speculator.propose

    def watched(plan: Schedule) -> dict[int, Draft]:
        drafts = propose(plan)
        for item in plan.items:
            if found := drafts.get(item.sequence.id):
                room = drafted.validator.remaining(item.sequence) - 1
                assert max(depths(found.parents)) <= room
                seen.append((room, len(found)))
        return drafts

    drafted.speculator.propose = watched  # type: ignore[method-assign]
    few = texts(drafted, max_tokens=4)
    assert few == texts(engine(target, speculation={"enabled": False}), max_tokens=4)
    # Two levels under at most 8 children of the root: more nodes than tokens left
    assert max(nodes for room, nodes in seen if room == 2) == 12


def test_layer_skip_needs_no_draft(target: str) -> None:
    expected = texts(engine(target, speculation={"enabled": False}))
    drafted = engine(target, speculation={"method": "layer_skip", "depth": "fixed", "max_depth": 3})
    assert texts(drafted) == expected
    (traffic,) = drafted.status.snapshot().traffic
    assert traffic.method == "layer_skip"
    assert traffic.alphas[0] > 0
    late = engine(target, speculation={"method": "layer_skip", "exit_layer": drafted.runner.model.config.num_layers})
    assert texts(late) == expected
    assert late.status.snapshot().traffic[0].alphas[0] == 1.0  # all layers: the target itself
    with pytest.raises(InvalidConfig, match=r"speculation\.exit_layer"):
        engine(target, speculation={"method": "layer_skip", "exit_layer": 99})


def test_a_missing_head_is_reported(target: str) -> None:
    with pytest.raises(InvalidConfig, match="needs an EAGLE head: set `draft`"):
        engine(target, speculation={"method": "eagle"})


def test_a_draft_prefill_takes_about_as_long_as_a_target_pass() -> None:
    assert prefill_tokens(512, 16_000, 270) == 14 * 512
    assert prefill_tokens(8192, 16_000, 270) == 8192  # one pass takes as long
    assert prefill_tokens(32, 16_000, 270) == 14 * 32
    assert prefill_tokens(512, 1000, 270) == 512  # hardly smaller
    assert prefill_tokens(512, 270, 16_000) == 512


def test_methods() -> None:
    ngram: Any = {"ngram": NgramProposer()}
    assert pick_method(SpeculationConfig(), ngram) == "ngram"
    assert pick_method(SpeculationConfig(), {**ngram, "draft_model": NgramProposer()}) == "draft_model"
    with pytest.raises(InvalidConfig, match="needs a draft model: set `draft`"):
        pick_method(SpeculationConfig(method="draft_model"), ngram)
    with pytest.raises(InvalidConfig, match="choose from: ngram"):
        pick_method(SpeculationConfig(method="medusa"), ngram)


def test_an_engine_chooses_between_a_pool_and_its_draft_unless_a_method_is_configured() -> None:
    proposers: Any = dict.fromkeys(("ngram", "pool", "medusa", "eagle"), NgramProposer())
    assert default_methods(SpeculationConfig(), proposers) == ("pool", "eagle")
    assert default_methods(SpeculationConfig(method="pool"), proposers) == ()
    del proposers["pool"]
    assert default_methods(SpeculationConfig(), proposers) == ()
    assert default_methods(SpeculationConfig(), {"ngram": NgramProposer(), "pool": NgramProposer()}) == ()
