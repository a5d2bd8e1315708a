from paceline.core.clock import WallClock
from paceline.models.runner.runner import ModelRunner, Span
from paceline.speculation.proposers.combined import CombinedProposer
from paceline.speculation.proposers.model.layer_skip import LayerSkipProposer
from paceline.speculation.proposers.suffix import NgramProposer
from paceline.tools.footprint.memory_reads import draft_parts, footprint, kv_bytes_per_token, pass_bytes, weight_reads
from tests.engine.harness import MODEL
from tests.fakes import draft_model, tiny_engine, tiny_model

DRAFT = tiny_model(seed=3)


def test_pass_reads_every_matrix_and_context_once() -> None:
    runner = ModelRunner(MODEL, 4)
    per_token = MODEL.config.kv_bytes_per_token(4)
    assert kv_bytes_per_token(runner) == per_token
    assert weight_reads(MODEL) == MODEL.weight_bytes  # tied: the embedding is the head
    spans = [Span([0], 5, [1, 2], 1), Span([1], 0, [3], 1)]
    assert pass_bytes(runner, spans) == MODEL.weight_bytes + 8 * per_token


def test_draft_model_has_weights_and_a_cache() -> None:
    engine = tiny_engine(MODEL, draft_model(DRAFT))
    taken = footprint(engine, "fake")
    assert taken.weight_bytes == DRAFT.weight_bytes
    assert taken.kv_bytes_per_token == DRAFT.config.kv_bytes_per_token(4)


def test_lookup_has_no_footprint() -> None:
    assert footprint(tiny_engine(MODEL, NgramProposer()), "fake").bytes(100) == 0


def test_layer_skip_has_no_footprint_and_reads_less() -> None:
    engine = tiny_engine(MODEL)
    engine.speculator.proposers = {"fake": LayerSkipProposer(engine.runner, engine.scheduler.tables, 1)}
    assert footprint(engine, "fake").bytes(100) == 0
    (runner,) = draft_parts(engine).runners
    assert 0 < weight_reads(runner.model) < weight_reads(MODEL)


def test_combined_methods_count_each_part_once() -> None:
    engine = tiny_engine(MODEL)
    draft = draft_model(DRAFT)
    combined = CombinedProposer({"ngram": NgramProposer()}, {"draft_model": draft}, WallClock())
    engine.speculator.proposers = {"draft_model": draft, "combined": combined}
    assert footprint(engine, "combined") == footprint(engine, "draft_model")
    assert len(draft_parts(engine).runners) == 1
