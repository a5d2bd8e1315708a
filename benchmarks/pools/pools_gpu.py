"""Where a draft pays: in the engine of a large target, on the cores of its host, or as another process on its GPU.

    python benchmarks/pools/pools_gpu.py --shape llama-70b --base MODEL.gguf --prompts spec_bench_dev.jsonl --out FOLDER
    python benchmarks/pools/pools_gpu.py --shape llama-8b --quantization none --streams 1 16 64 4 --base MODEL.gguf ...

The target is inflated (docs/large_models.md): shape and cost of a large model, the text of SmolLM2 with noise. Contenders run
one after the other in every repeat: plain; draft in the engine; a draft worker on cores of the host, ahead and on demand; a
draft worker on the GPU; trees of a draft worker; and depths chosen by `goodput`. For the last one, `chosen`, the engine also
chooses between its own draft and the host cores (docs/depth.md), by what the two contenders with `goodput` before it measured.
Rows are printed and saved as they are measured. A part that fails is noted, a part that hangs ends the run. The kernels of the
host need a C compiler.
"""

import argparse
import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from pools_gpu_bench import Bench, Contender, cache_tokens
from pools_gpu_draft import LIVE, SPINS, STARTED, DraftProcess, DraftSettings, HostThreads, PassTimes, log, processes
from pools_gpu_report import Report

from paceline.core.machine import cpu_name
from paceline.engine.build import pick_device
from paceline.kernels.layout import BLOCK_SIZE


class Parts:
    """Runs parts one after the other, each with a time limit."""

    def __init__(self, report: Report, options: argparse.Namespace) -> None:
        self._report, self._options = report, options
        self.num_failed = 0

    def run(self, name: str, work: Callable[[], object], limit: float | None = None) -> bool:
        """Run a part; False if it failed or there was no time. A part that hangs ends the process."""
        options, report = self._options, self._report
        if time.perf_counter() - STARTED > options.budget:
            report.notes.append(f"{name}: skipped, {options.budget:.0f} s were over")
            return False
        timer = threading.Timer(limit or options.limit, self._give_up, (name, limit or options.limit))
        timer.daemon = True
        timer.start()
        try:
            work()
        except Exception as error:
            self.num_failed += 1
            report.notes.append(f"{name}: {error!r}")
            log(f"{name} failed: {error!r}")
            return False
        finally:
            timer.cancel()
            report.save(options.out)
        return True

    def _give_up(self, name: str, seconds: float) -> None:
        faulthandler.dump_traceback(all_threads=True)
        self._report.notes.append(f"{name}: timed out after {seconds:.0f} s; the run ended")
        self._report.save(self._options.out)
        print(self._report.table(), flush=True)
        for one in LIVE:
            one.kill()
        os._exit(3)


TARGET_CORES = 2
"""Cores for the target's process, if there are twice as many at least."""


def _settings(options: argparse.Namespace, device: str, cores: Sequence[int]) -> list[DraftSettings]:
    """The draft workers: ahead and on demand on the host, and on demand on the GPU."""
    blocks = 2 * cache_tokens(options) // BLOCK_SIZE
    own = tuple(cores[TARGET_CORES:]) if len(cores) >= 2 * TARGET_CORES else ()
    workers = [DraftSettings("host cores, on demand", options.base, "cpu", 0, blocks, own)]
    workers += [DraftSettings(f"host cores, {n} ahead", options.base, "cpu", n, blocks, own) for n in options.nodes]
    if device == "cuda":
        widest = max(options.streams)
        workers.append(DraftSettings("GPU process, on demand", options.base, "cuda", 0, blocks, widest=widest))
    return workers


def _contenders(options: argparse.Namespace, ready: dict[str, DraftProcess]) -> list[Contender]:
    """The most important ones first."""
    depth = options.depth
    found = [Contender("plain"), Contender("in the engine", "draft_model", depth)]
    found += [Contender(name, "pool", depth, process) for name, process in ready.items()]
    found.append(Contender("in the engine, goodput", "draft_model"))
    ahead = next(((name, one) for name, one in ready.items() if one.settings.nodes), None)
    if ahead is not None:
        found.append(Contender(f"{ahead[0]}, trees", "pool_trees", options.tree, ahead[1]))
        found.append(Contender(f"{ahead[0]}, goodput", "pool", None, ahead[1]))
        found.append(Contender("chosen", "pool", None, ahead[1], is_chosen=True))
    return [one for one in found if not any(part in one.name for part in options.skip)]


def _pick_threads(times: PassTimes, most: int) -> HostThreads:
    """The threads whose passes of four sequences are the fastest."""
    return min((one for one, batch in times if batch == 4 and one.count <= most), key=lambda one: times[one, 4])


def run(options: argparse.Namespace) -> int:
    device = pick_device(options.device)
    cores = sorted(os.sched_getaffinity(0))
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    about = {"device": name, "cpu": cpu_name(), "cores": str(len(cores)), "torch": torch.__version__}
    report = Report({**about, **{key: str(value) for key, value in vars(options).items()}})
    parts = Parts(report, options)
    # The draft workers load while the target is built
    with processes(_settings(options, device.type, cores)) as started:
        benches: list[Bench] = []
        if not parts.run("the target", lambda: benches.append(Bench(options, report)), options.build_limit):
            return 1
        bench = benches[0]
        log(f"{options.shape} is ready; prompts of {', '.join(str(len(one)) for one in bench.prompts[:8])} … tokens")
        ready = _start_drafts(started, parts, report, options, cores)
        contenders = _contenders(options, ready)
        for repeat in range(options.repeats):
            for streams in options.streams:
                for one in contenders:
                    what = f"{one.name}, {streams} streams, repeat {repeat + 1}"
                    parts.run(what, partial(bench.measure, one, streams, repeat))
        print(f"\n{report.table()}", flush=True)
        for pool in bench.pools.values():
            pool.shut_down()
    report.save(options.out)
    return 1 if parts.num_failed else 0


def _start_drafts(
    started: Sequence[DraftProcess], parts: Parts, report: Report, options: argparse.Namespace, cores: Sequence[int]
) -> dict[str, DraftProcess]:
    """The draft workers that have loaded and serve, by name. Those of the host run with the fastest number of threads."""
    loaded = [one for one in started if parts.run(one.settings.name, lambda one=one: one.until_ready(60.0), 70.0)]
    if len(cores) >= 2 * TARGET_CORES:
        os.sched_setaffinity(0, cores[:TARGET_CORES])  # this thread; the draft workers use the other cores
    threads = _host_threads(loaded, parts, report, options, len(cores))
    report.about["threads"] = str(threads)
    log(f"draft workers on the host: {threads}")
    return {
        one.settings.name: one
        for one in loaded
        if parts.run(f"{one.settings.name}: start", lambda one=one: one.start(threads))
    }


def _host_threads(
    loaded: Sequence[DraftProcess], parts: Parts, report: Report, options: argparse.Namespace, num_cores: int
) -> HostThreads:
    """The threads of a draft worker on the host: given, or those with the fastest passes."""
    most = num_cores - TARGET_CORES if num_cores >= 2 * TARGET_CORES else num_cores
    host = next((one for one in loaded if one.settings.device == "cpu"), None)
    if host is not None and not options.threads:
        counts = sorted({count for count in (1, 4, 8, most, 16) if count <= num_cores})
        kinds = [HostThreads(count, spin) for count in counts for spin in SPINS[: 1 + (count > 1)]]
        if parts.run("passes on the host", lambda: report.pass_times.update(host.pass_times(kinds)), 60.0):
            print("\n".join(report.pass_table()), flush=True)
            return _pick_threads(report.pass_times, most)
    return HostThreads(options.threads or most, SPINS[0])


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="smollm2", help="the draft, and the base of the target")
    parser.add_argument("--shape", default="llama-70b", help="none: the base itself")
    parser.add_argument("--noise", type=float, default=0.05)
    parser.add_argument("--quantization", default="fp8", help="of the target")
    parser.add_argument("--device", default="auto", help="of the target")
    parser.add_argument("--prompts", type=Path, help="lines of JSON; default: built-in prompts")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 16], help="in the order of measurement")
    parser.add_argument("--count", type=int, default=4, help="prompts of one stream")
    parser.add_argument("--longest", type=int, default=300, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--depth", type=int, default=7, help="of the contenders with a fixed depth")
    parser.add_argument("--tree", type=int, default=15, help="nodes of a tree: a chain and alternatives to its tokens")
    parser.add_argument("--max-depth", type=int, default=12, help="of goodput")
    parser.add_argument("--nodes", type=int, nargs="+", default=[64], help="drafted ahead per sequence and round")
    parser.add_argument("--threads", type=int, default=0, help="of draft workers on the host; 0: the fastest number")
    parser.add_argument("--skip", nargs="+", default=[], help="leave out contenders with these words in their names")
    parser.add_argument("--pace", type=float, default=0.0, help="least milliseconds of a pass, to try it without a GPU")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--limit", type=float, default=45.0, help="seconds of a part")
    parser.add_argument("--build-limit", type=float, default=150.0, help="seconds to build the target")
    parser.add_argument("--budget", type=float, default=150.0, help="seconds after which no part starts")
    parser.add_argument("--out", type=Path, default=Path("pools_gpu"))
    options = parser.parse_args()
    options.max_depth = max(options.depth, options.tree, options.max_depth)
    return options


def main() -> int:
    options = _parse()
    faulthandler.dump_traceback_later(options.budget + 180.0, exit=True)  # for a hang that blocks all threads
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    return run(options)


if __name__ == "__main__":
    sys.exit(main())
