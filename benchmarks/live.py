"""Live pools under load: no stream may be lost or different while workers join, drain, are replaced, and a gateway dies.

    python benchmarks/live.py --tokens 48 --pause 2 --plot docs/live.png
    python benchmarks/live.py --tokens 48 --pause 2 --plot docs/live_ray.png --ray

One target behind two gateways, as processes, or with `--ray` as actors on two virtual nodes of Ray. Clients stream over
HTTP, half greedy and half sampled; tokens are compared with plain decoding in one process. The script types the commands that
an operator types. The draft pool starts with a draft that does not match the target. Targets always draft three tokens: a
fixed depth, without circuit breaker. Exit status 1: a stream was lost or different, or a swap had another verdict than planted.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from live_load import Results, Streams, plain_tokens
from live_models import Models, write_models
from live_report import plot, report
from live_scenario import DEADLINE, Scenario, get, until

from paceline.core.cluster_config import cluster_config
from paceline.runtime.deploy.deployment import free_address

START_SECONDS, JOIN_SECONDS = 600.0, 240.0
NEVER = 1 << 30
"""Lossy windows that open a circuit breaker."""
LIMITS = {"max_num_seqs": 16, "max_batched_tokens": 256, "max_model_len": 512, "kv_tokens": 16384}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=48, help="of the target; a draft has two")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--pause", type=float, default=4.0, help="seconds between two events")
    parser.add_argument("--trial", type=float, default=300.0, help="longest seconds of the trial of a draft")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--ray", action="store_true", help="workers as actors of a local Ray cluster")
    options = parser.parse_args()
    results = Results()
    with tempfile.TemporaryDirectory(prefix="live-") as name, ExitStack() as stack:
        folder = Path(name)
        models = write_models(folder / "models", options.layers)
        expected = plain_tokens(models.target, 12, options.tokens, options.seed)
        ports = [int(free_address().rpartition(":")[2]) for _ in range(2)]
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        document = _document(models, folder)
        if options.ray:
            document["ray"] = stack.enter_context(_ray_cluster())
        (folder / "cluster.yaml").write_text(json.dumps(document))  # JSON is YAML
        scenario = Scenario(folder, cluster_config(document), urls)
        scenario.command("up", str(scenario.file))
        stack.callback(scenario.command, "down", str(scenario.file))
        gateways = [stack.enter_context(gateway(scenario.file, port)) for port in ports]
        streams = Streams(urls, expected, results, options.streams)
        streams.start()
        started = time.monotonic()
        for act in _acts(scenario, gateways, models, options.trial):
            time.sleep(options.pause)
            act()
        time.sleep(options.pause)
        unfinished = streams.join(JOIN_SECONDS)
        ended = time.monotonic()
    lost = [*results.lost, *(["a stream did not end"] * unfinished)]
    where = "Ray" if options.ray else "processes"
    report(f"{where}, {options.streams} streams of {options.tokens} tokens", scenario, results, lost, ended - started)
    if options.plot is not None:
        plot(results, scenario, started, options.plot)
    is_planted = [verdict.is_kept for verdict in scenario.verdicts] == [False, True, False]
    sys.exit(1 if lost or results.different or not is_planted else 0)


def _acts(
    scenario: Scenario, gateways: "list[subprocess.Popen[bytes]]", models: Models, trial: float
) -> Iterator[Callable[[], object]]:
    file = str(scenario.file)
    yield lambda: scenario.scale_up("target", 3)
    yield lambda: scenario.scale_up("draft", 2)
    yield lambda: scenario.command("rollout", "--config", file)
    yield lambda: scenario.swap("a draft of another vocabulary", models.other, trial)
    yield lambda: scenario.swap("a better draft", models.good, trial)
    yield lambda: scenario.swap("a worse draft", models.poor, trial)
    yield lambda: scenario.terminate("target-1")

    def kill() -> None:
        now = time.monotonic()
        gateways[0].kill()
        scenario.events.append(("kill -9 of a gateway", now, now))

    yield kill
    yield lambda: scenario.command("scale", "draft", "0", "--config", file)
    yield lambda: scenario.command("scale", "target", "1", "--config", file)


def _document(models: Models, folder: Path) -> dict[str, Any]:
    pool = {"devices": ["cpu"], "limits": LIMITS}
    speculation = {"depth": "fixed", "max_depth": 3, "breaker_rounds": NEVER}
    target = {"name": "target", "role": "target", "model": models.target, "speculation": speculation, **pool}
    draft = {"name": "draft", "role": "draft", "model": models.poor, "replicas": 0, **pool}
    gateway = {"max_waiting": 1000, "log_requests": "none", "log_level": "warning", "gateways": 2}
    return {
        "name": "live",
        "state_dir": str(folder / "state"),
        "drain_seconds": DEADLINE,
        "gateway": gateway,
        "pools": [target, draft],
    }


@contextmanager
def _ray_cluster() -> Iterator[str]:
    """The address of two virtual nodes, with room for all workers of the scenario."""
    # Read by Ray when it is imported. Its actors have niceness 15 by default; other programs would decide the figures.
    os.environ.update({"RAY_raylet_start_wait_time_s": "120", "RAY_worker_niceness": "0"})
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "include_dashboard": False})
    try:
        cluster.add_node(num_cpus=4)
        yield str(cluster.address)
    finally:
        ray.shutdown()
        cluster.shutdown()


@contextmanager
def gateway(file: Path, port: int) -> Iterator["subprocess.Popen[bytes]"]:
    command = [sys.executable, "-m", "paceline", "serve", "--config", str(file), "--port", str(port)]
    with (
        (file.parent / f"gateway-{port}.log").open("wb") as log,
        subprocess.Popen(command, stdout=log, stderr=log) as one,
    ):
        try:
            until(lambda: get(f"http://127.0.0.1:{port}/ready") is not None, START_SECONDS, "the gateway")
            yield one
        finally:
            one.terminate()


if __name__ == "__main__":
    main()
