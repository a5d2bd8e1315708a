import json
from pathlib import Path

from paceline.core.config import EngineConfig
from paceline.deploy.serving import learner_plan
from paceline.gateway.config.config import LearningConfig, ServerConfig
from paceline.tools.learn.run import read_plan


def test_the_plan_of_a_server_is_a_plan_of_the_learner() -> None:
    engine = EngineConfig(model="smollm2", draft="smollm2-eagle")
    config = ServerConfig(engine=engine, learning=LearningConfig(folder="out", share=0.3))
    plan = read_plan(json.dumps(learner_plan(config, "http://server", "key")))
    plan.check()
    assert (plan.out, plan.draft, plan.share, plan.key) == (Path("out"), "smollm2-eagle", 0.3, "key")
