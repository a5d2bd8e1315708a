"""Tiny models, and proposers that are deliberately right, wrong, late or random."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from paceline.core.clock import Clock
from paceline.core.request import Request, SamplingParams, SpeculationParams, ValidatedRequest
from paceline.core.sequence import BLOCK_SIZE
from paceline.core.traffic import TrafficClass
from paceline.engine.engine import Engine
from paceline.engine.hook import StepHook
from paceline.engine.scheduler import Scheduler
from paceline.engine.speculator import Speculator
from paceline.engine.start.build import engine_of_parts
from paceline.engine.tiers import Tiers
from paceline.kernels.formats.weights import Dense
from paceline.kv.block_tables import BlockTables
from paceline.model_files.tokenizer.tokenizer import Tokenizer
from paceline.models.decoder.forward import DecoderModel
from paceline.models.families.flat import flat_spec
from paceline.models.families.spec import DecoderSpec
from paceline.models.runner.runner import ModelRunner
from paceline.policy.depth.breaker import Breaker, BreakerRule
from paceline.policy.depth.observation import DepthCandidate, DepthPolicy, StepObservation
from paceline.policy.depth.rules import FixedDepth
from paceline.requests.validator import Limits, RequestValidator
from paceline.speculation.distribution.distribution import log_distribution
from paceline.speculation.drafts.drafts import DraftBatch, DraftProbs
from paceline.speculation.proposer import Proposer, ProposerTraits, SequenceProgress
from paceline.speculation.proposers.model.draft_model import DraftModelProposer
from paceline.speculation.rows.noise import Purpose, gumbel
from paceline.speculation.rows.rows import RowContext

TINY = flat_spec(
    architecture="llama",
    vocab_size=40,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    ffn_size=64,
    rms_eps=1e-5,
    rope_theta=10_000.0,
    max_position=512,
    tie_embeddings=True,
)


class RandomWeights:
    """Random weights of any name from a seed; `perturb` mixes in others, for a draft that is sometimes right."""

    def __init__(self, config: DecoderSpec, seed: int, perturb: float = 0.0, scale: float = 1.0) -> None:
        self._config, self._seed, self._perturb, self._scale = config, seed, perturb, scale

    def matrix(self, name: str) -> Dense:
        shape = self._config.weight_shape(name)
        return Dense(self._draw(name, shape) * (1.5 * self._scale / shape[1] ** 0.5))

    def vector(self, name: str) -> Tensor:
        shape = self._config.weight_shape(name)
        return self._draw(name, shape) if name.endswith(("bias", "sinks")) else torch.ones(shape)

    def names(self) -> frozenset[str]:
        return frozenset()

    def _draw(self, name: str, shape: tuple[int, ...]) -> Tensor:
        values = torch.randn(shape, generator=_generator(name, self._seed))
        if self._perturb:
            values = values + self._perturb * torch.randn(shape, generator=_generator(name, self._seed + 1))
        return values


def _generator(name: str, seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(sum(ord(c) * 31**i for i, c in enumerate(name)) % 2**31 + seed)


def tiny_model(
    seed: int = 0, perturb: float = 0.0, config: DecoderSpec = TINY, scale: float = 1.0, device: str = "cpu"
) -> DecoderModel:
    weights = RandomWeights(config, seed, perturb, scale)
    return DecoderModel(config, weights, torch.device(device), torch.float32)


class StepClock:
    """Every reading is a millisecond later, so that timings are the same in every run."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        self._now += 0.001
        return self._now

    def pass_time(self, seconds: float) -> None:
        self._now += seconds


class MixedDepth:
    """A different depth for each sequence and step, 0 included."""

    advantage: float | None = None

    def __init__(self, max_depth: int, seed: int = 0) -> None:
        self._max_depth, self._random = max_depth, random.Random(seed)

    def observe(self, step: StepObservation) -> None:
        pass

    def restart(self, traffic: TrafficClass, alpha: float) -> None:
        pass

    def expect_prompts(self, rows: int) -> None:
        pass

    def skip_step(self, batch: int) -> bool:
        return False

    def decide(self, batch: Sequence[DepthCandidate]) -> list[int]:
        return [min(candidate.max_depth, self._random.randint(0, self._max_depth)) for candidate in batch]


class IdleTasks(StepHook):
    """Calls one function in each idle moment."""

    def __init__(self, tasks: Sequence[Callable[[], object]]) -> None:
        self._tasks = list(tasks)

    @property
    def has_idle_work(self) -> bool:
        return bool(self._tasks)

    def use_idle_time(self) -> None:
        self._tasks.pop()()


@dataclass
class FakeProposer:
    """Drafts whatever `guess(progress)` returns: (tokens, parents)."""

    guess: Callable[[SequenceProgress], tuple[list[int], list[int]]]
    traits: ProposerTraits = field(default_factory=ProposerTraits)
    progress: dict[int, SequenceProgress] = field(default_factory=dict)
    closed: list[int] = field(default_factory=list)

    def observe(self, batch: Sequence[SequenceProgress]) -> None:
        self.progress.update((p.sequence_id, p) for p in batch)

    def collect(self, sequence_ids: Sequence[int], deadline: float) -> DraftBatch:
        drafts = [(i, *self.guess(self.progress[i])) for i in sequence_ids if i in self.progress]
        drafts = [draft for draft in drafts if draft[1]]
        return DraftBatch(
            tuple(i for i, _, _ in drafts),
            tuple(len(tokens) for _, tokens, _ in drafts),
            torch.tensor([t for _, tokens, _ in drafts for t in tokens], dtype=torch.int64),
            torch.tensor([p for _, _, parents in drafts for p in parents], dtype=torch.int64),
        )

    def close(self, sequence_ids: Sequence[int]) -> None:
        for i in sequence_ids:
            self.progress.pop(i, None)
            self.closed.append(i)


def random_chain(vocab_size: int, seed: int = 0) -> FakeProposer:
    """Nearly always wrong."""
    rng = random.Random(seed)
    return FakeProposer(lambda p: ([rng.randrange(vocab_size) for _ in range(p.depth)], list(range(-1, p.depth - 1))))


def random_tree(vocab_size: int, seed: int = 0) -> FakeProposer:
    """A random tree of distinct siblings; with a small vocabulary often partly right."""
    rng = random.Random(seed)

    def guess(progress: SequenceProgress) -> tuple[list[int], list[int]]:
        tokens: list[int] = []
        parents: list[int] = []
        seen: set[tuple[int, int]] = set()
        for node in range(progress.depth):
            edge = (rng.randrange(-1, node), rng.randrange(vocab_size))
            if edge not in seen:
                seen.add(edge)
            else:
                continue
            # renumber: skipped nodes leave no holes
            parents.append(min(edge[0], len(tokens) - 1))
            tokens.append(edge[1])
        return _distinct(tokens, parents)

    return FakeProposer(guess)


def _distinct(tokens: list[int], parents: list[int]) -> tuple[list[int], list[int]]:
    kept_tokens: list[int] = []
    kept_parents: list[int] = []
    new_index = {-1: -1}
    seen: dict[tuple[int, int], int] = {}
    for i, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        edge = (new_index[parent], token)
        if edge in seen:
            new_index[i] = seen[edge]
            continue
        seen[edge] = new_index[i] = len(kept_tokens)
        kept_tokens.append(token)
        kept_parents.append(edge[0])
    return kept_tokens, kept_parents


class Unreliable:
    """Wraps a proposer: some drafts are missing, some truncated, some invalid."""

    def __init__(self, inner: Proposer, seed: int = 0) -> None:
        self._inner, self._random = inner, random.Random(seed)
        self.traits = inner.traits

    def observe(self, batch: Sequence[SequenceProgress]) -> None:
        self._inner.observe(batch)

    def collect(self, sequence_ids: Sequence[int], deadline: float) -> DraftBatch:
        asked = [i for i in sequence_ids if self._random.random() < 0.7]
        batch = self._inner.collect(asked, deadline)
        if len(batch.tokens) and self._random.random() < 0.2:
            garbage = batch.tokens.clone()
            garbage[self._random.randrange(len(garbage))] = 10**6
            return DraftBatch(batch.sequence_ids, batch.counts, garbage, batch.parents, batch.probs)
        return batch

    def close(self, sequence_ids: Sequence[int]) -> None:
        self._inner.close(sequence_ids)


def draft_model(
    model: DecoderModel,
    num_blocks: int = 64,
    max_rows: int = 64,
    runner: type[ModelRunner] = ModelRunner,
    max_gap: int | None = None,
    branches: int = 1,
) -> DraftModelProposer:
    """`branches`: children of a node of its trees; 1: chains."""
    size = model.config.vocab_size
    return DraftModelProposer(runner(model, num_blocks), max_rows, size, size, max_gap=max_gap, branches=branches)


def tiny_engine(
    model: DecoderModel,
    proposer: Proposer | Callable[[ModelRunner, BlockTables], Proposer] | None = None,
    depth: DepthPolicy | int = 4,
    *,
    kv_tokens: int = 1024,
    max_num_seqs: int = 8,
    max_batched_tokens: int = 64,
    prefix_caching: bool = True,
    max_model_len: int = 256,
    breaker: Breaker | None = None,
    clock: Clock | None = None,
    runner_kind: Callable[[DecoderModel, int], ModelRunner] = ModelRunner,
    tokenizer: Tokenizer | None = None,
    graph_depth: int | None = None,
    graph_methods: frozenset[str] = frozenset(),
    drafts_on_host: bool = False,
    tiers: Callable[[ModelRunner, BlockTables, Clock], Tiers] | None = None,
    audit_fraction: float = 0.0,
    hooks: Sequence[StepHook] = (),
    more_proposers: Mapping[str, Proposer] | None = None,
    default_methods: Sequence[str] = (),
) -> Engine:
    """An engine around a tiny model. Without a proposer it decodes plainly. The breaker stays closed unless given. A proposer
    that works in the target's own cache is made by a function of its runner and tables. `graph_depth`: steps run as graphs,
    with drafts of up to so many tokens. `drafts_on_host`: the proposer cannot draft in graphs."""
    clock = clock or StepClock()
    tables = BlockTables(kv_tokens // BLOCK_SIZE, prefix_caching)
    runner = runner_kind(model, tables.pool.num_blocks)
    if callable(proposer):
        proposer = proposer(runner, tables)
    proposers: Mapping[str, Proposer] = {
        "fake": proposer or FakeProposer(lambda progress: ([], [])),
        **(more_proposers or {}),
    }
    limits = Limits(model.config.vocab_size, max_model_len, max_depth=32)
    validator = RequestValidator(limits, "coupled", "fake", proposers, tokenizer)
    speculator = Speculator(
        proposers,
        FixedDepth(depth) if isinstance(depth, int) else depth,
        breaker or Breaker(BreakerRule(threshold=0.0)),
        validator,
        clock,
        model.config.vocab_size,
        enabled=proposer is not None,
        graph_methods=graph_methods,
    )
    scheduler = Scheduler(tables, max_num_seqs, max_batched_tokens, tiers and tiers(runner, tables, clock))
    graph = None
    if graph_depth is not None:
        from paceline.engine.graph.executor import GraphExecutor

        told: Any = runner, None if drafts_on_host else proposer
        graph = GraphExecutor(*told, scheduler, speculator, validator, graph_depth, clock)
    return engine_of_parts(
        runner,
        scheduler,
        speculator,
        validator,
        tokenizer=tokenizer,
        clock=clock,
        graph=graph,
        hooks=hooks,
        audit_fraction=audit_fraction,
        default_methods=default_methods,
    )


@dataclass
class Result:
    """Output tokens by (request, choice), and the final state of the engine."""

    tokens: dict[tuple[str, int], list[int]]
    drafted: int
    accepted: int


def run(engine: Engine, requests: Sequence[Request], max_steps: int = 10_000, arrivals: int | None = None) -> Result:
    """Run all requests to the end; `arrivals` adds a few per step instead of all at once."""
    tokens: dict[tuple[str, int], list[int]] = {(r.id, c): [] for r in requests for c in range(r.sampling.n)}
    drafted = accepted = 0
    pending = list(requests)
    for _ in range(max_steps):
        for request in pending[: arrivals or len(pending)]:
            engine.add(engine.validate(request))
        del pending[: arrivals or len(pending)]
        for output in engine.step():
            tokens[output.request_id, output.choice].extend(output.tokens)
            drafted += output.drafted
            accepted += output.accepted
        if not engine.has_work and not pending:
            break
    else:
        raise AssertionError(f"not finished after {max_steps} steps")
    engine.scheduler.tables.pool.check()
    assert engine.scheduler.tables.pool.num_free == engine.scheduler.tables.pool.num_blocks, "blocks leaked"
    return Result(tokens, drafted, accepted)


def request(
    name: str, prompt: Sequence[int], speculation: Mapping[str, Any] | None = None, **sampling: Any
) -> ValidatedRequest:
    """A request that the engine accepts: the caller vouches for its values."""
    sampling.setdefault("max_tokens", 24)
    asked = Request(name, tuple(prompt), SamplingParams(**sampling), SpeculationParams(**(speculation or {})))
    return ValidatedRequest.of(asked)


class Sampled:
    """Draws chains or trees with its own noise and returns their distributions, for rejection sampling.

    `law(tokens) -> [V]` gives the draft's logits after the output tokens so far. With `siblings` > 1 every node gets that
    many children while the budget lasts, drawn without replacement. `one_hot` keeps `q` to itself and drafts arg-maxes.
    """

    def __init__(self, law: Callable[[tuple[int, ...]], Tensor], siblings: int = 1, kind: str = "dense") -> None:
        self._law, self._siblings, self._kind = law, siblings, kind
        self._progress: dict[int, SequenceProgress] = {}
        self._laws: dict[tuple[int, ...], Tensor] = {}
        self.traits = ProposerTraits()

    def observe(self, batch: Sequence[SequenceProgress]) -> None:
        self._progress.update((p.sequence_id, p) for p in batch)

    def close(self, sequence_ids: Sequence[int]) -> None:
        for i in sequence_ids:
            self._progress.pop(i, None)

    def collect(self, sequence_ids: Sequence[int], deadline: float) -> DraftBatch:
        """Level by level for all sequences at once: (token, parent, q) per node."""
        nodes: dict[int, list[tuple[int, int, Tensor]]] = {i: [] for i in sequence_ids}
        frontier: list[tuple[int, int, tuple[int, ...]]] = [(i, -1, ()) for i in sequence_ids]
        while frontier:
            contexts = [self._context(self._progress[i], path) for i, _, path in frontier]
            distributions = [self._q(context) for context in contexts]
            q = torch.stack(distributions)
            count = min(self._siblings, q.shape[1])
            best = self.draw(q, contexts).topk(count, dim=1).indices.tolist()
            support = (q > 0).tolist()
            level, frontier = frontier, []
            for row, (i, parent, path) in enumerate(level):
                for token in best[row]:
                    if len(nodes[i]) >= self._progress[i].depth or not self.offers(
                        distributions[row], token, support[row][token]
                    ):
                        break
                    frontier.append((i, len(nodes[i]), (*path, token)))
                    nodes[i].append((token, parent, distributions[row]))
        drafts = {i: drawn for i, drawn in nodes.items() if drawn}
        if not drafts:
            return DraftBatch.empty()
        flat = [node for drawn in drafts.values() for node in drawn]
        return DraftBatch(
            tuple(drafts),
            tuple(len(drawn) for drawn in drafts.values()),
            torch.tensor([token for token, _, _ in flat]),
            torch.tensor([parent for _, parent, _ in flat]),
            self._probs([q for _, _, q in flat]),
        )

    def draw(self, q: Tensor, contexts: Sequence[RowContext]) -> Tensor:
        """Scores whose largest are the draw: perturbed log-probabilities (Gumbel top-k), or just `q`."""
        if self._kind == "one-hot":
            return q
        return q.log() + gumbel([context.key for context in contexts], Purpose.DRAFT, q.shape[1], q.device)

    def offers(self, q: Tensor, token: int, possible: bool) -> bool:
        """Whether a drawn token is offered. A choice that depends on the token, beyond its probability being 0, is a bias."""
        return possible

    def distribution(self, logits: Tensor, context: RowContext) -> Tensor:
        """q: the draft's distribution under the request's own sampling parameters."""
        return log_distribution(logits.unsqueeze(0), [context])[0].exp()

    def report(self, q: Tensor) -> Tensor:
        """The distribution that the draft reports."""
        return q

    def _q(self, context: RowContext) -> Tensor:
        output = (*context.ids[context.num_prompt :], *context.path)
        if output not in self._laws:
            self._laws[output] = self.distribution(self._law(output), context)
        return self._laws[output]

    def _probs(self, rows: list[Tensor]) -> DraftProbs | None:
        if self._kind == "one-hot":
            return None
        dense = torch.stack([self.report(q) for q in rows])
        if self._kind == "dense":
            return DraftProbs(dense)
        best = dense.topk(int((dense > 0).sum(1).max()), dim=1)
        return DraftProbs(best.values, best.indices)

    @staticmethod
    def _context(progress: SequenceProgress, path: tuple[int, ...]) -> RowContext:
        position = len(progress.ids) + len(path)
        return RowContext(
            progress.sampling, progress.seed, progress.choice, position, progress.ids, progress.num_prompt, path
        )
