"""The same requests on real workers and in the simulator.

    python benchmarks/planner/planner_fidelity.py all FOLDER                # about nine minutes on two quiet cores
    python benchmarks/planner/planner_fidelity.py all FOLDER --drafts       # a worker that drafts
    python benchmarks/planner/planner_fidelity.py all FOLDER --workers 2    # two workers
    python benchmarks/planner/planner_fidelity.py gpu FOLDER --model MODEL --draft DRAFT --prompts PROMPTS.jsonl
    python benchmarks/planner/planner_fidelity.py report FOLDER             # the table, from the files in the folder

`all` measures a profile on core 0 (worker.json), then starts a cluster of target workers with one thread each, on cores of
their own; with one worker the gateway and this client have core 1. Every request arrives at its time (open loop). With
`--drafts` every round drafts to the same depth. `gpu` measures a profile, then starts `paceline serve`, and every stream sends
its next request when a text ends (closed loop); the depth policy is `goodput`. Both run the traffic of the fit (fit.jsonl) and
every load (runs.jsonl) `--repeats` times in turns, and print each run as it ends; `all` also reports. A second call with the
same folder keeps the profile and adds runs.

The report simulates the same requests with the profile as measured, and with the profile fitted to the runs of fit.jsonl, which
has another load and other prompts: a factor on all times by the mean TPOT, and the difference in mean TTFT for the gateway. The
acceptance of drafts by position, and its spread over texts, is that of the fit as well; setting.json has the depths.
"""

import argparse
import subprocess
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from planner_fidelity_runs import Run, Setting, append, print_report, read
from planner_fidelity_servers import (
    LIMITS,
    PACELINE,
    DraftDepths,
    closed_loop,
    cluster,
    cycled,
    random_arrivals,
    replay,
    server,
    text_requests,
)

from paceline.planning.profiles.profile_file import load_profile

RATES, FIT_RATE = (2.5, 3.5, 4.5), 3.0
WARM_UP_RATE = 3.3
STREAMS, FIT_STREAMS = "8:128,32:256,64:256", "16:96"
GPU_OPTIONS = ("--max-model-len", "2048", "--prefix-caching", "false", "--kv-tokens", "160000")
SERVER_OPTIONS = ("--audit-fraction", "0", "--max-waiting", "1024")


def measure_cluster(options: argparse.Namespace) -> None:
    draft = options.draft if options.drafts else None
    limits = [word for name, value in LIMITS.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    measure_profile(options, draft, limits, ("taskset", "-c", "0"))
    with cluster(options.model, draft, options.depth, options.workers) as url:
        replay(url, random_arrivals(WARM_UP_RATE, 12))
        for _ in range(options.repeats):
            before = DraftDepths.read(url)
            run = Run.of(replay(url, random_arrivals(options.fit_rate, options.requests)), options.fit_rate)
            append(run, path(options, "fit.jsonl"))
            save_setting(options, url, before, Setting(options.workers, options.depth))
            for rate in options.rate or RATES:
                run = Run.of(replay(url, random_arrivals(rate, options.requests)), rate)
                append(run, path(options, "runs.jsonl"))
    report(options)


def measure_gpu(options: argparse.Namespace) -> None:
    began = time.monotonic()
    measure_profile(options, options.draft, options.engine.split(), ())
    print(f"{time.monotonic() - began:.0f} s: profile", flush=True)
    compared, other = text_requests(options.model, options.prompts, options.tokens)
    with server(options.model, options.draft, [*options.engine.split(), *SERVER_OPTIONS]) as url:
        print(f"{time.monotonic() - began:.0f} s: ready", flush=True)
        for streams, _ in options.closed:  # captures the graphs of this load
            closed_loop(url, cycled(other, 2 * streams), streams)
        time.sleep(options.idle)  # captures the others
        print(f"{time.monotonic() - began:.0f} s: warm", flush=True)
        for _ in range(options.repeats):
            before = DraftDepths.read(url)
            for streams, count in options.fit:
                run = Run.of(closed_loop(url, cycled(other, count), streams), streams=streams)
                append(run, path(options, "fit.jsonl"))
            save_setting(options, url, before, Setting(1, options.max_depth, "policy"))
            for streams, count in options.closed:
                run = Run.of(closed_loop(url, cycled(compared, count), streams), streams=streams)
                append(run, path(options, "runs.jsonl"))
        print(f"{time.monotonic() - began:.0f} s: measured; `report {options.folder}` needs no GPU", flush=True)


def measure_profile(
    options: argparse.Namespace, draft: str | None, settings: Sequence[str], prefix: Sequence[str]
) -> None:
    """Measure worker.json, unless it exists."""
    options.folder.mkdir(parents=True, exist_ok=True)
    file = path(options, "worker.json")
    if not file.exists():
        drafts = ("--draft", draft) if draft else ()
        subprocess.run(
            [*prefix, *PACELINE, "profile", str(file), "--model", options.model, *drafts, *settings], check=True
        )


def save_setting(options: argparse.Namespace, url: str, before: DraftDepths, setting: Setting) -> None:
    depths = DraftDepths.read(url).since(before)
    print(f"fit: {depths.rounds.total()} rounds with drafts, mean depth {depths.mean:.2f}", flush=True)
    replace(setting, drafted=depths.shares).save(path(options, "setting.json"))


def report(options: argparse.Namespace) -> None:
    profile, setting = load_profile(str(path(options, "worker.json"))), Setting.load(path(options, "setting.json"))
    fit, runs = (read(path(options, name)) for name in ("fit.jsonl", "runs.jsonl"))
    print_report(setting, profile, fit, runs, options.alike)


def path(options: argparse.Namespace, name: str) -> Path:
    return Path(options.folder) / name


def loads(text: str) -> list[tuple[int, int]]:
    """'8:128,32:256' -> [(8, 128), (32, 256)]."""
    return [(int(streams), int(count)) for streams, _, count in (part.partition(":") for part in text.split(","))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("all", help="measure a cluster on this CPU, then report")
    one.add_argument("--rate", type=float, action="append", help="requests per second; may be repeated")
    one.add_argument(
        "--fit-rate", type=float, default=FIT_RATE, help="requests per second of the run that is fitted to"
    )
    one.add_argument("--requests", type=int, default=110, help="requests of a run")
    one.add_argument("--workers", type=int, default=1, help="target workers")
    one.add_argument("--drafts", action="store_true", help="let the workers draft")
    one.add_argument("--draft", default="smollm2-eagle")
    one.add_argument("--depth", type=int, default=3, help="draft tokens of every round")
    one.add_argument("--model", default="smollm2")
    one.set_defaults(command=measure_cluster, alike=False)
    gpu = commands.add_parser("gpu", help="measure a server with one GPU; the report needs none")
    gpu.add_argument("--model", required=True)
    gpu.add_argument("--draft", required=True)
    gpu.add_argument("--prompts", type=Path, required=True, help="JSON lines with a list `turns`")
    gpu.add_argument("--tokens", type=int, default=128, help="tokens of an answer")
    gpu.add_argument("--closed", type=loads, default=loads(STREAMS), metavar="STREAMS:REQUESTS,...")
    gpu.add_argument("--fit", type=loads, default=loads(FIT_STREAMS), metavar="STREAMS:REQUESTS")
    gpu.add_argument("--idle", type=float, default=15.0, help="seconds for captures between warm-up and fit")
    gpu.add_argument("--engine", default=" ".join(GPU_OPTIONS), help="options of the engine, in one argument")
    gpu.add_argument("--max-depth", type=int, default=8, help="largest depth of the policy")
    gpu.set_defaults(command=measure_gpu)
    other = commands.add_parser("report", help="report what was measured")
    other.add_argument("--alike", action="store_true", help="simulate texts that do not differ in acceptance")
    other.set_defaults(command=report)
    for command in (one, gpu, other):
        command.add_argument("folder", type=Path)
    for command in (one, gpu):
        command.add_argument("--repeats", type=int, default=3, help="runs of each load")
    options = parser.parse_args()
    options.command(options)


if __name__ == "__main__":
    main()
