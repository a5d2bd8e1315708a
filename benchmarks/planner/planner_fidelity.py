"""The same requests on a real server and in the simulator.

    python benchmarks/planner/planner_fidelity.py gpu FOLDER --model MODEL --draft DRAFT --prompts PROMPTS.jsonl
    python benchmarks/planner/planner_fidelity.py report FOLDER             # the table, from the files in the folder

`gpu` measures a profile (worker.json), then starts `paceline serve`, and every stream sends its next request when a text ends
(closed loop); the depth policy is `goodput`. It runs the traffic of the fit (fit.jsonl) and every load (runs.jsonl)
`--repeats` times in turns, and prints each run as it ends. A second call with the same folder keeps the profile and adds runs.

The report simulates the same requests with the profile as measured, and with the profile fitted to the runs of fit.jsonl, which
has another load and other prompts: a factor on all times by the mean TPOT, and the difference in mean TTFT for the gateway. The
acceptance of drafts by position, and its spread over texts, is that of the fit as well; setting.json has the depths.
"""

import argparse
import subprocess
import time
from dataclasses import replace
from pathlib import Path

from planner_fidelity_runs import Run, Setting, append, print_report, read
from planner_fidelity_servers import PACELINE, DraftDepths, closed_loop, cycled, server, text_requests

from paceline.planning.profiles.profile_file import load_profile

STREAMS, FIT_STREAMS = "8:128,32:256,64:256", "16:96"
GPU_OPTIONS = ("--max-model-len", "2048", "--prefix-caching", "false", "--kv-tokens", "160000")
SERVER_OPTIONS = ("--audit-fraction", "0", "--max-waiting", "1024")


def measure_gpu(options: argparse.Namespace) -> None:
    began = time.monotonic()
    measure_profile(options)
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


def measure_profile(options: argparse.Namespace) -> None:
    """Measure worker.json, unless it exists."""
    options.folder.mkdir(parents=True, exist_ok=True)
    file = path(options, "worker.json")
    if not file.exists():
        models = "--model", options.model, "--draft", options.draft
        subprocess.run([*PACELINE, "profile", str(file), *models, *options.engine.split()], check=True)


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
    gpu.add_argument("--repeats", type=int, default=3, help="runs of each load")
    for command in (gpu, other):
        command.add_argument("folder", type=Path)
    options = parser.parse_args()
    options.command(options)


if __name__ == "__main__":
    main()
