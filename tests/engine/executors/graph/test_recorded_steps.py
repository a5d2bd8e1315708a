"""Where the time of rounds goes that the device does alone."""

from paceline.bench.profiling.recorder import Recorder
from paceline.models.gpu.runner import GpuRunner
from tests.engine.executors.graph.test_executor import DEVICE, SMALL, ahead_engine, requests
from tests.fakes import StepClock, draft_model, run, tiny_model


def test_rounds_ahead_are_recorded_with_the_devices_own_times():
    proposer = draft_model(tiny_model(perturb=0.3, config=SMALL, device=DEVICE), runner=GpuRunner)
    engine = ahead_engine(proposer)
    with Recorder(engine, StepClock()) as recorder:
        recorder.label = "drafted"
        run(engine, requests(2))
    flown = [round_ for round_ in recorder.rounds if round_.is_decode and round_.times.draft > 0]
    assert engine.graph.num_steps > 0
    assert len(flown) >= engine.graph.num_steps - 1  # the last may come home after the sequences have ended
    weights = engine.runner.model.weight_bytes
    assert all(round_.times.verify > 0 and round_.times.bytes_read > weights for round_ in flown)
    assert any(outcome.accepted for round_ in flown for outcome in round_.outcomes)
