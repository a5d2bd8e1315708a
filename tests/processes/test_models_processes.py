"""Two models in one cluster, as processes: requests reach their model, and a draft pool serves the model that it fits."""

from dataclasses import replace
from pathlib import Path

from paceline.core.cluster_config import cluster_config
from paceline.core.request import SpeculationParams
from paceline.deploy.deployment import observe_cluster, running_processes
from paceline.deploy.processes.state import StateFolder
from paceline.targets.client import TargetClient
from paceline.wire.worker_spec import ModelDirectory
from tests.engine.start.test_build import LETTERS, save_checkpoint
from tests.processes.target_harness import StreamReader, until
from tests.processes.test_processes import LIMITS, PATIENT, plain, requests, tokens


def test_two_models_and_a_draft_pool_that_fits_one_of_them(tmp_path: Path) -> None:
    one = save_checkpoint(tmp_path / "one", num_hidden_layers=8)
    two = save_checkpoint(tmp_path / "two", letters=LETTERS[::-1], seed=5)
    draft = save_checkpoint(tmp_path / "draft", num_hidden_layers=8, perturb=0.05)
    common = {"devices": ["cpu"], "limits": LIMITS, "speculation": {"depth": "fixed", "max_depth": 4}}
    config = cluster_config(
        {
            "state_dir": str(tmp_path / "state"),
            "health": {"canary": 0.0, **PATIENT},
            "pools": [
                {"name": "one", "role": "target", "model": one, "served_model_name": "first", **common},
                {"name": "two", "role": "target", "model": two, "served_model_name": "second", **common},
                {"name": "draft", "role": "draft", "model": draft, "devices": ["cpu"], "limits": LIMITS},
            ],
        }
    )
    submitted = requests(12, max_tokens=48)
    with running_processes(config, StateFolder.of(config)) as directory:
        clients = {
            name: TargetClient(
                config.for_model(name),
                ModelDirectory(directory, name),
                engine=config.engines()[worker],
                start_seconds=60,
                is_shared=True,
            )
            for name, worker in (("first", "one-0"), ("second", "two-0"))
        }
        try:
            first, second = clients.values()
            until(
                lambda: (
                    {w.name: w.state for w in first.cluster_status().workers} == {"one-0": "ready", "draft-0": "ready"}
                )
            )
            until(lambda: {w.name: w.state for w in second.pool.workers()} == {"two-0": "ready", "draft-0": "refused"})
            assert [w.name for w in second.cluster_status().workers] == ["two-0"]
            readers = [StreamReader(client.pool, *submitted) for client in clients.values()]
            assert tokens(readers[0]) == plain(one, submitted)
            assert tokens(readers[1]) == plain(two, submitted)
            pooled = [one for one in requests(64)[12:] if one.sampling.n == 1]
            reader = StreamReader(first.pool)
            while not any(output.accepted for output in reader.outputs):  # the machine's speed decides
                reader.submit(replace(pooled.pop(), speculation=SpeculationParams(method="pool")))
                reader.read_all()
            with observe_cluster(config) as observer:  # what `paceline status` shows
                ready = {"one-0": "ready", "two-0": "ready", "draft-0": "ready"}
                until(lambda: {w.name: w.state for w in observer.workers()} == ready)
        finally:
            for client in clients.values():
                client.close()
