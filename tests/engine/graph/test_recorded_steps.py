"""Where the time of graph steps goes."""

from paceline.models.runner.gpu.runner import GpuRunner
from paceline.tools.profile.recorder import Recorder
from tests.engine.graph.test_executor import DEVICE, SMALL, graph_engine, requests
from tests.fakes import StepClock, draft_model, run, tiny_model


def test_graph_steps_are_recorded_with_device_times():
    proposer = draft_model(tiny_model(perturb=0.3, config=SMALL, device=DEVICE), runner=GpuRunner)
    engine = graph_engine(proposer)
    recorder = Recorder(StepClock())
    with engine.hooks.listening(recorder):
        recorder.label = "drafted"
        run(engine, requests(2))
    drafted = [round_ for round_ in recorder.rounds if round_.is_decode and round_.times.draft > 0]
    assert engine.graph.num_steps > 0
    assert len(drafted) >= engine.graph.num_steps - 1  # the last may be collected after the sequences have ended
    weights = engine.runner.model.weight_bytes
    assert all(round_.times.verify > 0 and round_.times.bytes_read > weights for round_ in drafted)
    assert any(outcome.accepted for round_ in drafted for outcome in round_.outcomes)
