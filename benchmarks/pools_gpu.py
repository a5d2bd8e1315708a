"""A draft worker on the GPU of a large target: drafting ahead and on demand, and the cost of sharing the GPU.

    python benchmarks/pools_gpu.py --base MODEL.gguf --prompts spec_bench_dev.jsonl --out FOLDER

The target is inflated (docs/large_models.md): shape and cost of a 70B in FP8, the text of SmolLM2 with noise. It runs
plain, with a draft in its engine (`draft_model`), and with a draft worker, ahead and on demand. The worker is a
process (with MPS if it works, otherwise with time slices) or a thread with its own stream. An error ends a part, a
part that hangs ends the run; results until then are in FOLDER.
"""

import argparse
import faulthandler
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
from gpu_runs import largest_gap
from pools_gpu_draft import LIVE, PIPE, STARTED, Draft, Feeder, Host, log, mps_daemon
from pools_gpu_report import Contention, Report, Row

from paceline.bench.presets import DEFAULT_PROMPTS
from paceline.bench.prompts import load_prompts, select
from paceline.core.config import EngineConfig, SpeculationConfig
from paceline.core.request import Request
from paceline.core.sampling import SamplingParams
from paceline.core.speculation import SpeculationParams
from paceline.engine.build import build_engine, pick_device
from paceline.engine.engine import Engine
from paceline.engine.executors.executor import StepResult
from paceline.engine.hooks.hook import StepHook
from paceline.kernels.layout import BLOCK_SIZE
from paceline.models.drafts.compatibility import fingerprint
from paceline.models.loading.load import LoadedModel
from paceline.models.runner import Span
from paceline.models.tokenizer.chat_template import ChatTemplate
from paceline.runtime.draft_pool.connection import DraftAddress
from paceline.runtime.draft_pool.proposer import PoolProposer

SKIPPED = 8
"""Untimed tokens at the start of a text: prefill, first draft, first graph step."""
WARM_TOKENS = 24
WAITED = 0.001
"""Seconds of waiting below which a draft counts as ready."""


class VerifyTimes(StepHook):
    """Seconds of every verification; steps with prefill do not count."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def committed(self, result: StepResult) -> None:
        if all(one.verdict is not None and one.num_tokens == 1 for one in result.sequences):
            self.seconds.append(result.verify_seconds)


class Bench:
    """The target with its drafts."""

    def __init__(self, options: argparse.Namespace, report: Report) -> None:
        self.options, self.report = options, report
        self._verified = VerifyTimes()
        self._waits: list[float] = []
        """Record the seconds that each step waits for the pool."""
        pools: list[PoolProposer] = []

        def pool(target: LoadedModel) -> PoolProposer:
            self._tokenizer = fingerprint(target.tokenizer)
            pools.append(PoolProposer((), self._tokenizer, target.config.vocab_size, "target-0"))
            return pools[0]

        self.engine = build_engine(_config(options), pool, hooks=[self._verified])
        self.pool = pools[0]
        known = load_prompts(options.prompts) if options.prompts else list(DEFAULT_PROMPTS)
        tokenizer, template = self.engine.tokenizer, ChatTemplate.of(self.engine.tokenizer)
        ids = [
            list(tokenizer.encode(template.render([{"role": "user", "content": prompt.turns[0]}])))
            for prompt in select(known, limit=64)
        ]
        self.prompts = [prompt for prompt in ids if len(prompt) <= options.longest][: options.count]

    def warm(self) -> None:
        """Run every shape once before the device is shared."""
        for rows in (1, 2, 4, 8, 16):
            if rows < 2 * (1 + max(self.options.depths)):
                verify(self.engine, rows)
        for method, depth in [(None, 0), *(("draft_model", depth) for depth in self.options.depths)]:
            self._decode([self.prompts[0]], WARM_TOKENS, method, depth, Row("warm"))

    def measure(self, name: str, method: str | None = None, depth: int = 0, together: bool = False) -> Row:
        """Run the prompts one after the other, or in one batch."""
        row = Row(name, depth)
        for group in [self.prompts] if together else [[prompt] for prompt in self.prompts]:
            self._decode(group, self.options.tokens, method, depth, row)
        plain = self.report.rows[0].texts if self.report.rows else row.texts
        for prompt, ours, theirs in zip(self.prompts, row.texts, plain, strict=True):
            row.same += ours == theirs
            if ours != theirs:
                gaps = (largest_gap(self.engine, prompt, text) for text in (ours, theirs))
                row.gap = max(row.gap, *gaps)
        self.report.rows.append(row)
        return row

    def pooled(self, one: Host, depth: int) -> None:
        """Run with a worker that drafts ahead, then with one that drafts on demand."""
        for nodes, how in ((self.options.nodes, "ahead"), (0, "on demand")):
            with one.worker(nodes) as address, self._joined(address):
                self._decode([self.prompts[0]], WARM_TOKENS, "pool", depth, Row("warm"))
                self._waits.clear()
                before = self.pool.status()
                counters = replace(self.pool.connections[0].counters)  # a copy: the counters continue
                row = self.measure(f"{one.name}, {how}", "pool", depth)
                after = self.pool.status()
                steps, now = max(1, after.steps - before.steps), self.pool.connections[0].counters
                row.waited = sum(seconds > WAITED for seconds in self._waits) / max(1, len(self._waits))
                row.wait_ms = 1e3 * (after.wait_seconds - before.wait_seconds) / steps
                row.ready = (now.ready - counters.ready) / max(1, now.rounds - counters.rounds)
                row.undrafted = after.undrafted - before.undrafted
                if now.losses or now.faults:
                    self.report.notes.append(f"{row.name}, depth {depth}: {now}")
            assert one.last is not None
            row.pass_ms = 1e3 * one.last.pass_seconds
            log(" | ".join(cell for cell in row.cells(self.report.rows[0].rate) if cell))

    def contend(self, one: Host) -> None:
        """Time verifications alone, drafting alone, and both at once."""
        options, rows = self.options, 1 + self.options.depths[0]
        alone = [verify(self.engine, rows) for _ in range(options.passes)]
        shared: list[float] = []
        with one.worker(0) as address, Feeder(address, self._tokenizer, self.prompts[0], options.feed) as feeder:
            until = time.perf_counter() + options.limit / 4
            while len(feeder.each) < 5 and time.perf_counter() < until:
                time.sleep(0.01)
            quiet, until = len(feeder.each), until + options.limit / 4
            while (len(feeder.each) < quiet + 5 or len(shared) < options.passes) and time.perf_counter() < until:
                shared.append(verify(self.engine, rows))
            each = list(feeder.each)
        # The first chain of either kind includes a prefill or a change of load.
        figures = [alone, shared, each[1:quiet], each[quiet + 1 :]]
        if not all(figures):
            raise TimeoutError(f"{len(each)} chains and {len(shared)} verifications are too few")
        self.report.contention.append(Contention(one.name, *(1e3 * median(values) for values in figures)))

    def _decode(self, prompts: list[list[int]], tokens: int, method: str | None, depth: int, row: Row) -> None:
        engine, texts = self.engine, {f"r{i}": list[int]() for i in range(len(prompts))}
        sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        speculation = SpeculationParams(method is not None, method, depth if method else None)
        try:
            for name, prompt in zip(texts, prompts, strict=True):
                engine.add(Request(name, tuple(prompt), sampling, speculation))
            started = 0.0
            while engine.has_work:
                waited = self.pool.status().wait_seconds
                outputs = engine.step()
                now = time.perf_counter()
                self._waits.append(self.pool.status().wait_seconds - waited)
                for output in outputs:
                    texts[output.request_id].extend(output.tokens)
                if started and outputs:
                    row.seconds += now - started
                    row.tokens += sum(len(output.tokens) for output in outputs)
                    row.steps += 1
                    row.drafted += sum(output.drafted for output in outputs)
                    row.accepted += sum(output.accepted for output in outputs)
                    row.verify_ms += [1e3 * seconds for seconds in self._verified.seconds]
                if outputs and min(map(len, texts.values())) >= SKIPPED:
                    started = now
                self._verified.seconds.clear()
        finally:
            for name in texts:
                engine.cancel(name)
        row.texts += texts.values()

    @contextmanager
    def _joined(self, address: str) -> Iterator[None]:
        self.pool.set_workers([DraftAddress("draft-0", address)])
        try:
            until = time.perf_counter() + 10.0
            while not self.pool.connections[0].is_ready:
                if time.perf_counter() > until:
                    raise TimeoutError("the draft worker does not respond")
                self.pool.maintain()
                time.sleep(0.002)
            yield
        finally:
            self.pool.set_workers(())


def _config(options: argparse.Namespace) -> EngineConfig:
    inflated = f"inflate:{options.shape}?base={options.base}&noise={options.noise}"
    return EngineConfig(
        model=options.base if options.shape == "none" else inflated,
        draft=options.base,
        device=options.device,
        quantization=options.quantization,
        max_num_seqs=8,
        max_batched_tokens=1024,
        max_model_len=2048,
        kv_tokens=16_384,
        prefix_caching=False,
        speculation=SpeculationConfig(depth="fixed", max_depth=max(options.depths)),
    )


def verify(engine: Engine, rows: int) -> float:
    """Seconds of a pass over `rows` after 256 tokens. The engine must be idle: the pass overwrites its cache."""
    started = time.perf_counter()
    logits = engine.runner.forward([Span(range(-(-(256 + rows) // BLOCK_SIZE)), 256, [1000] * rows, rows)]).logits
    logits.argmax(1).tolist()
    return time.perf_counter() - started


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
        log(f"-- {name}")
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


def run(options: argparse.Namespace) -> int:
    mps: str | None = options.mps
    if mps is not None:
        os.environ[PIPE] = mps  # before the first CUDA call of this process
    device = pick_device(options.device)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    machine = {"device": name, "torch": torch.__version__, "mps": "yes" if mps else "no"}
    report = Report({**machine, **{key: str(value) for key, value in vars(options).items()}})
    parts = Parts(report, options)
    draft = Draft(options.base, device.type, max(1, options.nodes // min(options.depths)), 512)
    with ExitStack() as stack:

        def start(title: str, is_process: bool, pipe: str | None = None) -> Host:
            one = Host(title, draft, is_process, pipe)
            stack.callback(one.close)
            return one

        # The worker processes load while the target is built.
        hosts = [start("processes, MPS", True, mps)] if mps else []
        hosts.append(start("processes", True))
        benches: list[Bench] = []
        if not parts.run("the target", lambda: benches.append(Bench(options, report)), 150.0):
            return 1
        bench = benches[0]
        if not bench.prompts:
            raise SystemExit(f"no prompt has {options.longest} tokens or fewer: raise --longest")
        log(f"{len(bench.prompts)} prompts of {', '.join(str(len(prompt)) for prompt in bench.prompts)} tokens")
        hosts = [one for one in hosts if parts.run(f"{one.name}: ready", lambda one=one: one.until_ready(60.0), 70.0)]
        parts.run("warm up", bench.warm, 90.0)
        if not parts.run("plain", lambda: bench.measure("plain")):
            return 1
        parts.run("plain, batched", lambda: bench.measure("plain, all prompts in one batch", together=True))
        for depth in options.depths:
            parts.run(f"draft_model, {depth}", lambda depth=depth: bench.measure("in the engine", "draft_model", depth))
        print(report.table(), flush=True)
        streams = start("two streams", False)
        if parts.run("two streams: ready", lambda: streams.until_ready(60.0), 70.0):
            hosts.append(streams)
        for one in hosts:
            parts.run(f"{one.name}: contention", lambda one=one: bench.contend(one))
        for depth in options.depths:
            for one in [one for one in hosts if not one.is_lost]:
                parts.run(f"{one.name}, depth {depth}", lambda one=one, depth=depth: bench.pooled(one, depth))
        parts.run("plain, again", lambda: bench.measure("plain, again"))
        print(f"\n{report.table()}", flush=True)
        bench.pool.shut_down()
    return 1 if parts.num_failed else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="smollm2", help="the draft, and the base of the target")
    parser.add_argument("--shape", default="llama-70b", help="none: the base itself")
    parser.add_argument("--noise", type=float, default=0.05)
    parser.add_argument("--quantization", default="fp8")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--prompts", type=Path, help="lines of JSON; default: built-in prompts")
    parser.add_argument("--count", type=int, default=6, help="prompts")
    parser.add_argument("--longest", type=int, default=300, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=80)
    parser.add_argument("--depth", dest="depths", type=int, action="append")
    parser.add_argument("--nodes", type=int, default=32, help="nodes drafted ahead per round")
    parser.add_argument("--passes", type=int, default=30, help="verifications to time, alone and shared")
    parser.add_argument("--feed", type=int, default=64, help="tokens per chain while contention is measured")
    parser.add_argument("--no-mps", action="store_true")
    parser.add_argument("--mps", help="pipe folder of a running MPS daemon; default: start one")
    parser.add_argument("--limit", type=float, default=45.0, help="seconds of a part")
    parser.add_argument("--budget", type=float, default=195.0, help="seconds after which no part starts")
    parser.add_argument("--out", type=Path, default=Path("pools_gpu"))
    options = parser.parse_args()
    options.depths = options.depths or [5, 7]
    faulthandler.dump_traceback_later(options.budget + 150.0, exit=True)  # for a hang that blocks all threads
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if options.mps or options.no_mps or options.device == "cpu":
        return run(options)
    with mps_daemon() as mps:
        if mps is None:
            return run(options)
        # A separate process, which ends before the daemon.
        child = subprocess.Popen([sys.executable, __file__, *sys.argv[1:], "--mps", mps])
        try:
            return child.wait()
        finally:
            if child.poll() is None:
                child.terminate()
                with suppress(subprocess.TimeoutExpired):
                    child.wait(15)
                child.kill()


if __name__ == "__main__":
    sys.exit(main())
