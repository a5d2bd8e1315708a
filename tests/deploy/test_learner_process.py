"""The learner process of a server."""

import json
import sys
import threading
from pathlib import Path

import pytest

from paceline.core.config import EngineConfig
from paceline.core.errors import InvalidConfig
from paceline.deploy.serving import LearnerProcess, _learner_plan, learner_plan, open_learner
from paceline.gateway.config.config import LearningConfig, ServerConfig

ECHO = """
import sys
open(sys.argv[1], "a").write(sys.stdin.readline())
sys.stdin.read() if len(sys.argv) < 3 else None
"""


def config(**options: object) -> ServerConfig:
    engine = EngineConfig(model="smollm2", draft="smollm2-eagle")
    return ServerConfig(engine=engine, learning=LearningConfig(folder="out"), **options)  # type: ignore[arg-type]


def test_the_plan_names_the_draft_of_the_server() -> None:
    plan = learner_plan(config(), "http://server", "key")
    assert (plan["draft"], plan["out"], plan["model"], plan["key"]) == ("smollm2-eagle", "out", "smollm2", "key")


def test_without_a_draft_there_is_nothing_to_train() -> None:
    none = ServerConfig(engine=EngineConfig(model="m", draft=None), learning=LearningConfig(folder="out"))
    with pytest.raises(InvalidConfig, match="needs a draft to train"):
        learner_plan(none, "http://server", "key")


def test_a_certificate_needs_a_learner_with_the_name_of_the_server() -> None:
    with pytest.raises(InvalidConfig, match="which its certificate does not name"):
        _learner_plan(config(tls_cert="server.pem"), "key")
    assert _learner_plan(ServerConfig(), "key") is None


def wait_for(path: Path, lines: int) -> list[str]:
    """Lines that the children have written, once there are enough."""
    pause = threading.Event()
    for _ in range(2000):
        if path.exists() and len(path.read_text().splitlines()) >= lines:
            break
        pause.wait(0.02)
    return path.read_text().splitlines()


def test_the_child_reads_its_plan_and_ends_with_the_server(tmp_path: Path) -> None:
    file = tmp_path / "plan"
    process = LearnerProcess({"draft": "d"}, [sys.executable, "-c", ECHO, str(file)], poll=0.01)
    process.start()
    assert [json.loads(line) for line in wait_for(file, 1)] == [{"draft": "d"}]
    process.close()
    assert process.num_starts == 1


def test_a_child_that_fails_is_started_again(tmp_path: Path) -> None:
    file = tmp_path / "plan"
    process = LearnerProcess({}, [sys.executable, "-c", ECHO, str(file), "end"], poll=0.01)
    process.start()
    assert len(wait_for(file, 2)) >= 2
    process.close()
    assert process.num_starts >= 2


def test_no_plan_no_learner() -> None:
    with open_learner(None) as learner:
        assert learner is None
