"""Where a draft pays: in the engine of a large target, on the cores of its host, or as another process on its GPU.

    python benchmarks/pools_gpu.py --shape llama-70b --base MODEL.gguf --prompts spec_bench_dev.jsonl --out FOLDER
    python benchmarks/pools_gpu.py --shape llama-8b --quantization none --streams 1 16 64 4 --base MODEL.gguf ...

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

import torch
from gpu_runs import largest_gap
from pools_gpu_draft import (
    LIVE,
    SPINS,
    STARTED,
    DraftProcess,
    DraftSettings,
    HostThreads,
    PassTimes,
    log,
    processes,
)
from pools_gpu_report import Report, Row
from pools_gpu_timeline import RoundRecorder, timeline

from paceline.bench.presets import DEFAULT_PROMPTS
from paceline.bench.prompts import load_prompts, select
from paceline.core.config import EngineConfig, SpeculationConfig
from paceline.core.machine import cpu_name, freeze_loaded_objects
from paceline.core.request import Request
from paceline.core.sampling import SamplingParams
from paceline.core.speculation import SpeculationParams
from paceline.engine.build import build_engine, pick_device
from paceline.engine.engine import Engine
from paceline.engine.hooks.hook import StepHook
from paceline.engine.schedule import Schedule
from paceline.kernels.layout import BLOCK_SIZE
from paceline.models.drafts.compatibility import fingerprint
from paceline.models.loading.load import open_checkpoint
from paceline.models.tokenizer.chat_template import ChatTemplate
from paceline.runtime.draft_pool.connection import DraftAddress
from paceline.runtime.draft_pool.proposer import PoolProposer
from paceline.speculation.default_method import DefaultMethod
from paceline.speculation.depth.simple_rules import FixedDepth

SKIPPED = 8
"""Untimed tokens at the start of a text: prefill, first draft, first graph step."""
WARM_TOKENS = 24
MAX_GROUPS = 8
"""Untimed batches of `chosen`, if the contenders before it did not measure both methods enough."""
TARGET_CORES = 2
"""Cores for the target's process, if there are twice as many at least."""


@dataclass(frozen=True, slots=True)
class Contender:
    name: str
    method: str | None = None
    depth: int | None = None
    """None: as `goodput` decides."""
    process: DraftProcess | None = None
    is_chosen: bool = False
    """The engine chooses the method; `method` is that of the draft worker."""


class PacedPasses(StepHook):
    """Makes passes of the target take a time in which this process computes nothing, as with a GPU."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._began = seconds, 0.0

    def before_pass(self, schedule: Schedule) -> None:
        self._began = time.perf_counter()

    def after_pass(self, schedule: Schedule, drafts: object, output: object) -> None:
        time.sleep(max(0.0, self._began + self._seconds - time.perf_counter()))


class Bench:
    """The target with its drafts."""

    def __init__(self, options: argparse.Namespace, report: Report) -> None:
        self.options, self.report = options, report
        self._recorder = RoundRecorder(time.perf_counter)
        draft = open_checkpoint(options.base)
        tokenizer, size = fingerprint(draft.read_tokenizer()), draft.config.vocab_size
        self.pools = {
            "pool": PoolProposer((), tokenizer, size, "target-0"),
            "pool_trees": PoolProposer((), tokenizer, size, "target-0", verifies_trees=True),
        }
        hooks = [self._recorder, *([PacedPasses(1e-3 * options.pace)] if options.pace else [])]
        self.engine = build_engine(_config(options), hooks=hooks, extra_proposers=self.pools)
        self.engine.warm_up()
        self.engine.hooks.finish_idle_work()  # otherwise graphs are captured while goodput is measured
        self._goodput, self._fixed = self.engine.speculator.depth, FixedDepth(options.max_depth)
        assert self.engine.assignment is not None
        self._learned = self.engine.assignment.default
        """What `chosen` knows of both methods: steps of contenders with the same rule for the depth."""
        self._warmed: set[tuple[str, int]] = set()
        self.prompts = _prompts(self.engine, options)
        freeze_loaded_objects()

    def measure(self, contender: Contender, streams: int, repeat: int) -> None:
        """Add one repeat to the row of the contender."""
        row = self.report.row(contender.name, streams) or Row(contender.name, streams, contender.depth)
        assert self.engine.assignment is not None
        if contender.depth is None:
            self.engine.speculator.depth, self.engine.assignment.default = self._goodput, self._learned
        else:
            self.engine.speculator.depth = self._fixed
            self.engine.assignment.default = DefaultMethod(self._learned.methods)
        if (process := contender.process) is None:
            began = self._run(contender, None, streams, row)
        else:
            assert contender.method is not None
            pool = self.pools[contender.method]
            with _joined(pool, process):
                began = self._run(contender, pool, streams, row)
            passes = [one for one in process.figures().passes if one.began > began]
            row.pass_ms = 1e3 * median(one.ended - one.began for one in passes) if passes else None
        row.gpu_bytes = self._gpu_bytes(contender)
        if contender.is_chosen:
            rates = [(one, self._learned.goodput(one, streams) or 0.0) for one in self._learned.methods]
            shown = ", ".join(f"{one} {rate:.1f}" for one, rate in rates)
            self.report.notes.append(
                f"{contender.name}, {streams} streams: {self._learned.method}; tokens/s of a sequence: {shown}"
            )
        if repeat == 0:
            self.report.rows.append(row)
            self._compare(row)
            if streams == 1:
                beside = process.figures().passes if process else []
                self.report.timelines[contender.name] = timeline(self._recorder.rounds, beside)
        log(self.report.line(row))

    def _run(self, contender: Contender, pool: PoolProposer | None, streams: int, row: Row) -> float:
        """Warm up, then decode the prompts in groups of `streams`; returns when the timed part began."""
        options, count = self.options, max(streams, self.options.count)
        chosen = [self.prompts[i % len(self.prompts)] for i in range(count // streams * streams)]
        groups = [chosen[i : i + streams] for i in range(0, len(chosen), streams)]
        is_first = (contender.name, streams) not in self._warmed
        self._warmed.add((contender.name, streams))
        self._decode(groups[0], WARM_TOKENS if is_first else SKIPPED, contender, Row("warm", streams))
        if contender.is_chosen:
            self._measure_methods(groups[0], contender, streams)
        self._recorder.clear()
        before = pool and (pool.status(), replace(pool.connections[0].counters))
        tokens, seconds, began = row.tokens, row.seconds, time.perf_counter()
        texts: list[list[int]] = []
        for group in groups:
            texts += self._decode(group, options.tokens, contender, row)
        row.texts = row.texts or texts
        row.rates.append((row.tokens - tokens) / max(1e-9, row.seconds - seconds))
        row.verify_ms += [1e3 * seconds for seconds in self._recorder.verify_seconds]
        if pool is not None and before is not None:
            (then, counters), after, now = before, pool.status(), pool.connections[0].counters
            row.wait_seconds = (row.wait_seconds or 0.0) + after.wait_seconds - then.wait_seconds
            row.pool_steps += after.steps - then.steps
            row.ready += now.ready - counters.ready
            row.requested += now.rounds - counters.rounds
            row.undrafted += after.undrafted - then.undrafted
            if now.losses or now.faults:
                self.report.notes.append(f"{row.name}, {streams} streams: {now}")
        return began

    def _decode(self, prompts: list[list[int]], tokens: int, contender: Contender, row: Row) -> list[list[int]]:
        """The texts of one batch. It is timed from when all sequences decode until the first one ends."""
        engine, texts = self.engine, {f"r{i}": list[int]() for i in range(len(prompts))}
        sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        method = None if contender.is_chosen else contender.method
        speculation = SpeculationParams(contender.method is not None, method, contender.depth)
        try:
            for name, prompt in zip(texts, prompts, strict=True):
                engine.add(Request(name, tuple(prompt), sampling, speculation))
            started, is_over = 0.0, False
            while engine.has_work and not is_over:
                outputs = engine.step()
                now = time.perf_counter()
                for output in outputs:
                    texts[output.request_id].extend(output.tokens)
                    is_over |= output.finish_reason is not None
                if started and outputs:
                    row.seconds += now - started
                    row.tokens += sum(len(output.tokens) for output in outputs)
                    row.steps, row.rounds = row.steps + 1, row.rounds + len(outputs)
                    row.drafted += sum(output.drafted for output in outputs)
                    row.accepted += sum(output.accepted for output in outputs)
                if outputs and min(map(len, texts.values())) >= SKIPPED:
                    started = now
        finally:
            for name in texts:
                engine.cancel(name)
            engine.step()  # ends a graph step in flight
        return list(texts.values())

    def _measure_methods(self, group: list[list[int]], contender: Contender, streams: int) -> None:
        """Decode untimed until the engine has measured both methods at this load, as a server that has run for a while."""
        for _ in range(MAX_GROUPS):
            if all(self._learned.goodput(method, streams) is not None for method in self._learned.methods):
                break
            self._decode(group, self.options.tokens, contender, Row("warm", streams))

    def _compare(self, row: Row) -> None:
        """Count the texts that equal those of plain decoding, as far as both go."""
        plain = self.report.plain(row.streams)
        for i, (ours, theirs) in enumerate(zip(row.texts, plain.texts if plain else row.texts, strict=True)):
            length = min(len(ours), len(theirs))
            row.same += ours[:length] == theirs[:length]
            if ours[:length] != theirs[:length]:
                prompt = self.prompts[i % len(self.prompts)]
                row.gap = max(row.gap, *(largest_gap(self.engine, prompt, text) for text in (ours, theirs)))

    def _gpu_bytes(self, contender: Contender) -> int | None:
        """GPU memory that the draft takes: weights and cache in the engine, all tensors of another process."""
        if contender.process is not None and not contender.is_chosen:
            return contender.process.figures().gpu_bytes
        if not (contender.is_chosen or contender.method == "draft_model") or self.engine.runner.device.type != "cuda":
            return 0 if contender.method is None else None
        (runner,) = self.engine.speculator.proposers["draft_model"].traits.runners
        cache = sum(values.nbytes for layer in runner.cache for values in layer)  # type: ignore[attr-defined]
        return runner.model.weight_bytes + cache  # type: ignore[attr-defined,no-any-return]


@contextmanager
def _joined(pool: PoolProposer, process: DraftProcess) -> Iterator[None]:
    pool.set_workers([DraftAddress(process.settings.name, process.address)])
    try:
        until = time.perf_counter() + 10.0
        while not pool.connections[0].is_ready:
            if time.perf_counter() > until:
                raise TimeoutError(f"the draft worker {process.settings.name} does not respond")
            pool.maintain()
            time.sleep(0.002)
        yield
    finally:
        pool.set_workers(())


def _config(options: argparse.Namespace) -> EngineConfig:
    inflated = f"inflate:{options.shape}?base={options.base}&noise={options.noise}"
    return EngineConfig(
        model=options.base if options.shape == "none" else inflated,
        draft=options.base,
        device=options.device,
        quantization=options.quantization,
        max_num_seqs=max(options.streams),
        max_batched_tokens=1024,
        max_model_len=2048,
        kv_tokens=_num_tokens(options),
        prefix_caching=False,
        audit_fraction=0.0,
        speculation=SpeculationConfig(depth="goodput", max_depth=options.max_depth),
    )


def _num_tokens(options: argparse.Namespace) -> int:
    """Tokens of a cache for all streams at once."""
    return max(4096, max(options.streams) * (options.longest + options.tokens + 64))


def _prompts(engine: Engine, options: argparse.Namespace) -> list[list[int]]:
    known = load_prompts(options.prompts) if options.prompts else list(DEFAULT_PROMPTS)
    assert engine.tokenizer is not None
    tokenizer, template = engine.tokenizer, ChatTemplate.of(engine.tokenizer)
    ids = [
        list(tokenizer.encode(template.render([{"role": "user", "content": prompt.turns[0]}])))
        for prompt in select(known, limit=4 * max(options.count, *options.streams))
    ]
    prompts = [prompt for prompt in ids if len(prompt) <= options.longest]
    if not prompts:
        raise SystemExit(f"no prompt has {options.longest} tokens or fewer: raise --longest")
    return prompts


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


def _settings(options: argparse.Namespace, device: str, cores: Sequence[int]) -> list[DraftSettings]:
    """The draft workers: ahead and on demand on the host, and on demand on the GPU."""
    blocks = 2 * _num_tokens(options) // BLOCK_SIZE
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
        started = [one for one in started if parts.run(one.settings.name, lambda one=one: one.until_ready(60.0), 70.0)]
        if len(cores) >= 2 * TARGET_CORES:
            os.sched_setaffinity(0, cores[:TARGET_CORES])  # this thread; the draft workers use the other cores
        most = len(cores) - TARGET_CORES if len(cores) >= 2 * TARGET_CORES else len(cores)
        threads = HostThreads(options.threads or most, SPINS[0])
        host = next((one for one in started if one.settings.device == "cpu"), None)
        if host is not None and not options.threads:
            counts = sorted({count for count in (1, 4, 8, most, 16) if count <= len(cores)})
            kinds = [HostThreads(count, spin) for count in counts for spin in SPINS[: 1 + (count > 1)]]
            if parts.run("passes on the host", lambda: report.pass_times.update(host.pass_times(kinds)), 60.0):
                threads = _pick_threads(report.pass_times, most)
                print("\n".join(report.pass_table()), flush=True)
        report.about["threads"] = str(threads)
        log(f"draft workers on the host: {threads}")
        ready = {
            one.settings.name: one
            for one in started
            if parts.run(f"{one.settings.name}: start", lambda one=one: one.start(threads))
        }
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


def main() -> int:
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
    faulthandler.dump_traceback_later(options.budget + 180.0, exit=True)  # for a hang that blocks all threads
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    return run(options)


if __name__ == "__main__":
    sys.exit(main())
