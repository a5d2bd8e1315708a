from pathlib import Path

from paceline.core.clock import WallClock
from paceline.core.config import EngineConfig, SpeculationConfig
from paceline.planning.profile import load_profile, save_profile
from paceline.planning.simulator.settings.config import SimulationConfig, Speculation
from paceline.planning.simulator.simulation import simulate
from paceline.planning.traces.trace_files import TrafficPattern, synthesize
from paceline.tools.inflate.calibration import calibration_config
from paceline.tools.profile.measurement import MeasurementProgress
from paceline.tools.profile.passes import BLOCK, CHUNK, DEPTH, _spans, draft_prefill_seconds, row_counts
from paceline.tools.profile.worker_profile import Prices, _merge, _rising, measure_profile
from tests.engine.start.test_build import save_checkpoint

SETTINGS = {"device": "cpu", "max_num_seqs": 4, "max_model_len": 256, "kv_tokens": 1024}


def test_a_measured_profile_is_a_file_that_the_simulator_reads(tmp_path: Path) -> None:
    from dataclasses import asdict

    from paceline.engine.start.llm import LLM

    target, draft = (save_checkpoint(tmp_path / name, seed=seed) for name, seed in (("target", 0), ("draft", 1)))
    config = calibration_config(EngineConfig(target, draft=draft, **SETTINGS), DEPTH)  # type: ignore[arg-type]
    seen: list[MeasurementProgress] = []
    with LLM(**asdict(config)) as llm:
        profile = measure_profile(llm, "tiny", 1.5, Prices(2.0, 0.5), WallClock(), seen.append)
        short = measure_profile(
            llm, "tiny", 1.5, Prices(), WallClock(), seen.append, 0.0, "paceline profile short.json"
        )
    assert [batch for batch, _ in short.draft_seconds.points] == [1, 4]
    assert short.about.endswith("Made by: paceline profile short.json")
    parts = [one.part for one in seen]
    assert "2 sequences: left out, the time is over" in parts
    assert {"contexts", "1 sequence", "4 sequences, with drafts", "prompts"} <= set(parts)
    first = seen[: parts.index("prompts") + 1]
    assert first[0].done == 0.0
    assert [one.done for one in first] == sorted(one.done for one in first)
    assert 0.0 < first[-1].done < 1.0
    assert all(one.seconds_left > 0.0 for one in first)
    counts = [rows for rows, _ in profile.pass_seconds.points]
    assert {1, 2, 4, DEPTH + 1, 4 * (DEPTH + 1)} <= set(counts)
    assert [batch for batch, _ in profile.draft_seconds.points] == [1, 2, 4]
    assert profile.prompt_seconds is not None
    assert all(seconds <= profile.pass_seconds.at(rows) for rows, seconds in profile.prompt_seconds.points)
    assert profile.max_num_seqs.value == 4
    assert profile.kv_tokens.value >= 1024
    assert profile.start_seconds.value == 1.5
    assert "pass_seconds" not in profile.assumed()
    assert {"price_per_hour", "links.nvlink"} <= set(profile.assumed())
    file = tmp_path / "tiny.json"
    save_profile(profile, file)
    read = load_profile(str(file))
    assert read == profile
    trace = synthesize(TrafficPattern(5.0, 40, 20), 2.0)
    assert simulate(SimulationConfig(read, speculation=Speculation((0.8,))), trace).jobs[0].finished > 0.0


def test_passes_of_prompts_are_measured_up_to_the_limit_of_the_engine() -> None:
    assert row_counts(8) == [1, 2, 4, 8]
    assert row_counts(1200) == [1, 2, 4, 8, 16, 32, 64, 128, 256, 384, 512, 768, 1024]


def test_a_prompt_has_at_most_a_chunk_of_rows_and_blocks_of_its_own() -> None:
    spans = _spans(num_blocks=40, rows=640)
    assert [len(span.tokens) for span in spans] == [CHUNK, CHUNK, 128]
    blocks = [block for span in spans for block in span.blocks]
    assert len(blocks) == len(set(blocks)) == 40
    assert all(len(span.blocks) * BLOCK >= len(span.tokens) for span in spans)


def test_the_draft_prefill_is_that_of_the_method_that_drafts(tmp_path: Path) -> None:
    from dataclasses import asdict

    from paceline.engine.start.llm import LLM

    target, draft = (save_checkpoint(tmp_path / name, seed=seed) for name, seed in (("target", 0), ("draft", 1)))
    for method, drafts in (("draft_model", True), ("ngram", False)):
        speculation = SpeculationConfig(method=method)
        config = EngineConfig(target, draft=draft, speculation=speculation, **SETTINGS)  # type: ignore[arg-type]
        with LLM(**asdict(config)) as llm:
            assert (draft_prefill_seconds(llm, WallClock()) > 0.0) is drafts


def test_a_slow_measurement_does_not_raise_the_later_ones() -> None:
    assert _rising({1: 1.0, 10: 4.0, 16: 2.0, 4: 1.5}) == {1: 1.0, 4: 1.5, 10: 2.0, 16: 2.0}


def test_more_rows_than_were_run_cost_what_a_prompt_costs() -> None:
    """A step of 8 rows took longer than a prompt of 8 rows, or less long: then the prompt's time counts."""
    assert _merge({1: 1.0, 8: 2.0}, {8: 1.5, 16: 3.0}) == {1: 1.0, 8: 2.0, 16: 3.5}
    assert _merge({1: 1.0, 8: 2.0}, {8: 2.5, 16: 3.0}) == {1: 1.0, 8: 2.0, 16: 3.0}
