"""A learner on a real server with a tiny model: samples, training, both gates."""

import json
import signal
import urllib.request
from pathlib import Path

import pytest

from paceline.core.clock import WallClock
from paceline.tools.learn.learner import Learner, LearnerLimits
from paceline.tools.learn.memory import MemoryLimits, SampleMemory
from paceline.tools.learn.server import LearningServer
from paceline.tools.learn.versions import VersionFolder
from paceline.tools.progress.progress import PlainProgress, StopRequest
from tests.gateway.process import server_process
from tests.tools.learn.tiny import make_training, save_tiny_draft
from tests.tools.train.tiny import save_tiny

KEY = "admin-key-of-the-test"


def complete(url: str, prompt: str) -> str:
    body = {"prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return str(json.load(answer)["choices"][0]["text"])


@pytest.mark.slow
def test_a_version_is_trained_and_tried_on_a_real_server(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "model")
    base = save_tiny_draft(tmp_path / "base", model, "eagle")
    options = {"model": str(model), "draft": str(base), "admin_key": KEY, "learning.enabled": True}
    options |= {"max_model_len": 128, "kv_tokens": 1024, "dtype": "float32"}
    with server_process(**options) as process:
        prompts = [f"{'abcd'[number % 4]} {number}" for number in range(40)]
        before = [complete(process.url, prompt) for prompt in prompts]
        folder = VersionFolder(tmp_path / "out")
        folder.create(base, process.url)
        clock = WallClock()
        client = LearningServer(process.url, KEY, trial_seconds=1.0)
        learner = Learner(
            folder, client, client, make_training(model), SampleMemory(MemoryLimits(10_000, held_out=0.3)),
            LearnerLimits(200, min_held_out=4), PlainProgress(clock), lambda seconds: None, StopRequest(),
        )  # fmt: skip
        learner.tick()
        (one,) = folder.lineages()
        assert one.samples + one.held_out == 40
        assert one.offline is not None
        assert one.offline.is_passed, one.offline.reason
        assert one.online is not None  # a trial of one second proves nothing, so that the draft before it stays
        assert (one.online.is_passed, one.status) == (False, "refused")
        assert client.in_use() == str(base)
        assert [complete(process.url, prompt) for prompt in prompts] == before
        assert process.stop(signal.SIGTERM) == 0
