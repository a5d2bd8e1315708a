"""A draft worker for vLLM: `python -m paceline.vllm.draft_worker --draft DRAFT --model TARGET`."""

import argparse
import signal
import sys
from collections.abc import Sequence

from paceline.core.cluster_config import ClusterConfig, WeightsConfig
from paceline.core.errors import InvalidConfig, PacelineError
from paceline.core.pool_config import PoolConfig, PoolLimits
from paceline.telemetry import log_as
from paceline.wire.worker_spec import WorkerSpec, worker_specs
from paceline.worker import make_worker


def parse(arguments: Sequence[str] | None = None) -> WorkerSpec:
    """The worker that a command line describes."""
    parser = argparse.ArgumentParser(prog="python -m paceline.vllm.draft_worker", description=__doc__)
    parser.add_argument("--draft", required=True, help="a whole model, or a distilled draft of `paceline train`")
    parser.add_argument("--model", required=True, help="the target that vLLM serves")
    parser.add_argument(
        "--address", default="tcp://127.0.0.1:5555", help="tcp://HOST:PORT or ipc://PATH (default: %(default)s)"
    )
    parser.add_argument("--keys", help="folder of `paceline keys`; without it only this machine can connect")
    parser.add_argument("--device", default="cpu", help="cpu or cuda:N (default: %(default)s)")
    parser.add_argument("--threads", type=int, help="CPU threads; one per core by default")
    parser.add_argument(
        "--max-num-seqs", type=int, default=64, help="sequences drafted for at once (default: %(default)s)"
    )
    parser.add_argument("--max-model-len", type=int, default=2048, help="tokens of one sequence (default: %(default)s)")
    parser.add_argument("--kv-tokens", type=int, help="tokens of all sequences together; by memory by default")
    given = parser.parse_args(arguments)
    if not given.address.startswith(("tcp://", "ipc://")):
        raise InvalidConfig(f"--address must be tcp://HOST:PORT or ipc://PATH, got {given.address!r}")
    limits = PoolLimits(max_num_seqs=given.max_num_seqs, max_model_len=given.max_model_len, kv_tokens=given.kv_tokens)
    draft = PoolConfig("draft", "draft", given.draft, devices=(given.device,), limits=limits)
    cluster = ClusterConfig(
        (PoolConfig("target", "target", given.model), draft), keys=given.keys, weights=WeightsConfig(from_peers=False)
    )
    (spec,) = worker_specs(cluster, {draft.worker_names[0]: given.address}, given.threads)
    return spec


def main(arguments: Sequence[str] | None = None) -> None:
    try:
        spec = parse(arguments)
        log_as(spec.name, spec.log_level)
        worker = make_worker(spec)
    except PacelineError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, lambda *_: worker.stop())
    print(f"drafting at {worker.address}", flush=True)
    worker.run()


if __name__ == "__main__":
    main()
