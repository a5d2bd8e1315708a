"""Speed by network distance between target and draft worker: `python benchmarks/pools/pools_delay.py`.

A target that verifies in 15 ms, and a draft worker in its own process that drafts in 2 ms per token with alpha 0.8. A
proxy between them delays every message by half of the added round trip. *Co-located*: no proxy. *In one process*:
drafting between two verifications, as `draft_model` does.
"""

import argparse
import asyncio
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from urllib.parse import urlsplit

from pools_fakes import TOKENIZER, VOCAB, Run, TimedCore, decode, until_up, worker_process

from paceline.drafting.connection import DraftAddress
from paceline.drafting.proposer import PoolProposer
from paceline.drafting.scheduler import DraftLimits
from paceline.drafting.state import DraftBranch
from paceline.speculation.drafts.drafts import DraftBatch
from paceline.speculation.proposer import ProposerTraits, SequenceProgress
from paceline.speculation.proposers.model.model_drafter import SequenceParams


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seconds: float) -> None:
    """Forward bytes in order after `seconds`: a delay without a limit on throughput."""
    loop = asyncio.get_running_loop()
    while data := await reader.read(65536):
        if seconds:
            loop.call_later(seconds, writer.write, data)
        else:
            writer.write(data)
    writer.close()


def _proxy(connection: Connection, address: str, seconds: float) -> None:
    where = urlsplit(address)

    async def serve() -> None:
        async def join(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            there = await asyncio.open_connection(where.hostname, where.port)
            await asyncio.gather(_pump(reader, there[1], seconds), _pump(there[0], writer, seconds))

        server = await asyncio.start_server(join, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        connection.send(f"tcp://127.0.0.1:{port}")
        await server.serve_forever()

    asyncio.run(serve())


@contextmanager
def delayed(address: str, round_trip: float) -> Iterator[str]:
    """The address of a proxy for `address` that adds `round_trip` seconds."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_proxy, args=(there, address, round_trip / 2), daemon=True)
    process.start()
    try:
        yield here.recv()
    finally:
        process.terminate()
        process.join(10)


class DraftInProcess:
    """The fake draft in the target's process; the target waits for it."""

    traits = ProposerTraits()

    def __init__(self, alpha: float, seconds: float) -> None:
        self._core, self._progress = TimedCore(alpha, seconds), dict[int, SequenceProgress]()

    def observe(self, batch: Sequence[SequenceProgress]) -> None:
        self._progress.update((p.sequence_id, p) for p in batch)

    def collect(self, sequence_ids: Sequence[int], deadline: float) -> DraftBatch:
        branches = {
            i: DraftBranch(
                i, SequenceParams(p.sampling, p.seed, 0, p.num_prompt, "coupled", ""), list(p.ids), len(p.ids)
            )
            for i in sequence_ids
            if (p := self._progress.get(i))
        }
        depth = max(p.depth for p in self._progress.values())
        for _ in range(depth):
            for branch, drawn in zip(branches.values(), self._core.step(list(branches.values())), strict=True):
                assert drawn is not None
                branch.ids.append(drawn.token)
        return DraftBatch.chains((i, branch.ids[branch.num_committed :]) for i, branch in branches.items())

    def close(self, sequence_ids: Sequence[int]) -> None:
        for i in sequence_ids:
            self._progress.pop(i, None)


def pooled(args: argparse.Namespace, round_trip: float | None, nodes: int) -> tuple[Run, float, float]:
    """(run, share of steps that waited over a millisecond, share of rounds with a ready draft)."""
    limits = DraftLimits(max_branch_tokens=nodes, max_batch=1024)
    with worker_process(args.alpha, args.draft, limits, per_branch=args.branch) as (address, _):
        if round_trip is None:
            return _pooled(args, address)
        with delayed(address, round_trip) as far:
            return _pooled(args, far)


def _pooled(args: argparse.Namespace, address: str) -> tuple[Run, float, float]:
    proposer = PoolProposer([DraftAddress("draft-0", address)], TOKENIZER, VOCAB)
    until_up(proposer)
    run = decode(proposer, args.batch, args.steps, args.depth, args.verify, warm=20)
    counts = proposer.connections[0].counters
    proposer.shut_down()
    waited = sum(seconds > 0.001 * args.scale for seconds in run.overheads) / len(run.overheads)
    return run, waited, counts.ready / counts.rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--alpha", type=float, default=0.8)
    parser.add_argument("--draft", type=float, default=0.002, help="seconds a token")
    parser.add_argument("--branch", type=float, default=0.0, help="seconds that each further branch adds to a pass")
    parser.add_argument("--trips", type=float, nargs="*", default=[0.0, 0.0005, 0.002, 0.010], help="added seconds")
    parser.add_argument("--verify", type=float, default=0.015)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--depth", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--nodes", type=int, default=64, help="tokens drafted ahead per sequence and round")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on all times, so that load disturbs less")
    args = parser.parse_args()
    args.draft, args.verify, args.branch = (args.scale * seconds for seconds in (args.draft, args.verify, args.branch))
    print(
        f"batch {args.batch}, depth {args.depth}, alpha {args.alpha}, draft {args.draft * 1e3:g} ms per token, ", end=""
    )
    print(f"verify {args.verify * 1e3:g} ms, {args.nodes} nodes ahead, {args.steps} steps, times x {args.scale:g}\n")
    plain = decode(None, args.batch, args.steps, 0, args.verify)
    in_process = decode(DraftInProcess(args.alpha, args.draft), args.batch, args.steps, args.depth, args.verify)
    here = pooled(args, None, args.nodes)
    print("| added round trip | drafting ahead | steps that waited | ready | tokens/s | of co-located | of plain |")
    print("|---|---|---:|---:|---:|---:|---:|")
    print(f"| plain decoding | | | | {plain.rate:.0f} | {plain.rate / here[0].rate:.0%} | 100% |")
    rate = in_process.rate
    print(f"| in one process | no | 100% | | {rate:.0f} | {rate / here[0].rate:.0%} | {rate / plain.rate:.0%} |")
    rows = [("co-located", "yes", here), ("co-located", "no", pooled(args, None, 0))]
    for trip in args.trips:
        rows += [
            (f"{trip * 1e3:g} ms", name, pooled(args, trip * args.scale, n))
            for name, n in (("yes", args.nodes), ("no", 0))
        ]
    for trip_name, name, (run, waited, ready) in rows:
        ratios = f"{run.rate / here[0].rate:.0%} | {run.rate / plain.rate:.0%}"
        print(f"| {trip_name} | {name} | {waited:.0%} | {ready:.0%} | {run.rate:.0f} | {ratios} |", flush=True)


if __name__ == "__main__":
    started = time.perf_counter()
    main()
    print(f"\n{time.perf_counter() - started:.0f} s")
