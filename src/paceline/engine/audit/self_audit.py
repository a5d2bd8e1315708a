"""Self-audit: the engine computes some finished texts again without speculation, while it serves and while it is idle.

A coupled or greedy text must be what plain decoding picks; of a rejection text, the probability that every token had when it
was accepted or drawn must be what a plain pass gives it. The audit runs on the engine's thread, in blocks of the engine's
cache that no request needs. Between steps that serve requests it takes one small pass at a time, at most `BUSY_SHARE` of the
steps and of their time.
"""

import logging
import math
import secrets
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from paceline.core.sequence import FinishReason, Sequence
from paceline.core.status import AuditCounts, AuditFinding
from paceline.engine import Scheduler, StepHook
from paceline.engine.audit.rescoring import FinishedText, Rescored, Rescoring, computed_in, differences, rounding
from paceline.engine.step.step import StepResult
from paceline.kernels.formats.layout import uses_gpu_kernels
from paceline.kv import blocks_for
from paceline.models.runner import ModelRunner
from paceline.requests import Grammar
from paceline.speculation.distribution import log_distribution

logger = logging.getLogger(__name__)

ROWS = 16
"""Tokens of a pass on a CPU, which requests wait for."""
GPU_ROWS = 128
"""The same on a GPU, where a pass of so many rows takes little longer than one of a single row."""
BUSY_SHARE = 0.01
"""Share of the steps, and of their time, that passes of the audit may take while the engine has requests."""
SPARE_BLOCKS = 4
"""Free cache blocks for each running sequence, below which the audit gives its own back."""
MAX_PENDING = 8
"""Texts that wait to be checked; the oldest gives way."""
MAX_FINDINGS = 8
"""Wrong texts that the status names."""
MAX_TRIES = 20
"""How often a text is begun again after requests needed its blocks."""
GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0


class BusyShare:
    """Decides when the audit may take a pass between steps that serve requests. A pass is followed by 1 / `share` steps without
    one, and by steps of 1 / `share` times its duration."""

    def __init__(self, share: float = BUSY_SHARE) -> None:
        self._share = share
        self.num_steps = self.num_passes = 0
        self._num_since = 0
        self._debt = 0.0
        """Seconds of passes that the time of steps has not paid for yet."""

    def step(self, seconds: float) -> None:
        """A step that served requests took this time."""
        self.num_steps += 1
        self._num_since += 1
        self._debt = max(0.0, self._debt - self._share * seconds)

    @property
    def allows_pass(self) -> bool:
        return self._share * self._num_since >= 1.0 and self._debt == 0.0

    def spend(self, seconds: float) -> None:
        """A pass took this time."""
        self.num_passes += 1
        self._num_since = 0
        self._debt += seconds


class _Step(NamedTuple):
    """The step that committed output token `first` and those after it, up to the next step's."""

    first: int
    is_graph: bool
    num_sequences: int
    num_drafted: int
    num_accepted: int


@dataclass(slots=True, eq=False)
class _Watched:
    """A running sequence that will be audited."""

    grammar: Grammar | None
    is_coupled: bool
    first: int
    """Output tokens that another engine had committed: how it judged them is not known here."""
    probs: list[float] = field(default_factory=list)
    """Rejection: p(x) of every token as verification had it. NaN if a graph step picked the token."""
    steps: list[_Step] = field(default_factory=list)
    method: str = ""

    def where(self, index: int) -> str:
        """The step that committed this output token, in words."""
        place = bisect_right([step.first for step in self.steps], index) - 1
        if place < 0:
            return "a step of another engine"
        step = self.steps[place]
        drafts = (
            f"accepted {step.num_accepted} of {step.num_drafted} drafted tokens" if step.num_drafted else "no drafts"
        )
        kind = "graph" if step.is_graph else "host"
        return (
            f"token {index - step.first + 1} of a {kind} step of {step.num_sequences} sequences, {drafts}, "
            f"method {self.method}"
        )


@dataclass(slots=True, eq=False)
class _Work:
    request_id: str
    text: FinishedText
    watched: _Watched
    tries: int = 0
    rescoring: Rescoring | None = None
    table: int = 0
    wrong: list[tuple[int, str]] = field(default_factory=list)
    """Indices of output tokens, and what is wrong with them."""


class SelfAudit(StepHook):
    """Checks finished texts, between steps and in idle time."""

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        fraction: float,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`fraction` of the sequences, spread evenly."""
        self._runner, self._scheduler, self._tables, self._fraction = runner, scheduler, scheduler.tables, fraction
        self._rows = GPU_ROWS if uses_gpu_kernels(runner.device) else ROWS
        self._share, self._now, self._step_began = BusyShare(), now, 0.0
        self._watched: dict[int, _Watched] = {}
        self._pending: deque[_Work] = deque()
        self._current: _Work | None = None
        self._seen = self._begun = 0
        self._audited = self._drifted = self._dropped = self._texts = 0
        self._findings: deque[AuditFinding] = deque(maxlen=MAX_FINDINGS)

    @property
    def counts(self) -> AuditCounts:
        """Safe from any thread."""
        return AuditCounts(
            self._audited,
            self._drifted,
            self._dropped,
            self._texts,
            self._share.num_passes,
            self._share.num_steps,
            tuple(self._findings.copy()),
        )

    def sequence_added(self, sequence: Sequence, grammar: Grammar | None) -> None:
        """A sequence is about to run; whether it is audited is decided before anything of it is known."""
        self._seen += 1
        if (self._seen * GOLDEN) % 1.0 < self._fraction:
            is_coupled = sequence.verification == "coupled" or sequence.sampling.is_greedy
            self._watched[sequence.id] = _Watched(grammar, is_coupled, sequence.num_output)

    def verified(self, result: StepResult) -> None:
        """Audited sequences: keep what the step was, and in rejection rounds the probability of every committed token."""
        if not self._watched:
            return
        for sequence_result in result.sequences:
            sequence, verdict = sequence_result.sequence, sequence_result.verdict
            watched = self._watched.get(sequence.id)
            if watched is None or verdict is None:
                continue
            sizes = len(result.sequences), sequence_result.num_nodes, sequence_result.accepted
            watched.steps.append(_Step(sequence.num_output, result.is_graph, *sizes))
            if watched.is_coupled:
                continue
            if verdict.p is None:  # a graph step, which keeps no distribution
                watched.probs.extend([math.nan] * len(verdict.tokens))
                continue
            rows = [0, *(1 + node for node in verdict.path)]
            watched.probs.extend(verdict.p[rows, list(verdict.tokens)].tolist())

    def sequence_finished(self, sequence: Sequence) -> None:
        watched = self._watched.pop(sequence.id, None)
        if watched is None or sequence.finish_reason in (None, FinishReason.CANCELLED):
            return
        prompt, output = sequence.ids[: sequence.num_prompt], sequence.ids[sequence.num_prompt :]
        text = FinishedText(
            tuple(prompt), tuple(output), sequence.sampling, sequence.seed, sequence.choice, watched.grammar
        )
        watched.method = sequence.method
        if len(self._pending) == MAX_PENDING:
            self._pending.popleft()
            self._dropped += 1
        self._pending.append(_Work(sequence.request_id, text, watched))

    def weights_changed(self) -> None:
        """Drop the texts of the weights before."""
        if self._current is not None:
            self._stop()
            self._dropped += 1
        self._dropped += len(self._pending)
        self._pending.clear()

    @property
    def has_idle_work(self) -> bool:
        return self._current is not None or bool(self._pending)

    def use_idle_time(self) -> None:
        """One small pass, if there is something to check."""
        self._pass()

    def before_step(self) -> None:
        """Release all blocks if requests may need them. An interrupted audit starts again later."""
        self._step_began = self._now()
        if self._current is not None and self._is_crowded(0):
            self._interrupt(self._current)

    def after_step(self) -> None:
        """One small pass now and then, while requests run."""
        began = self._now()
        self._share.step(began - self._step_began)
        if self._share.allows_pass and self._pass():
            self._share.spend(self._now() - began)

    def _pass(self) -> bool:
        """One small pass. False if there is nothing to check, or no block for it."""
        if self._current is None and not self._start():
            return False
        work = self._current
        assert work is not None
        assert work.rescoring is not None
        try:
            self._judge(work, work.rescoring.advance(self._rows))
        except Exception:
            logger.exception("the audit of request %s failed; no further text is audited", work.request_id)
            self._fraction = 0.0
            self._stop()
            self._pending.clear()
            return True
        if work.rescoring.is_done:
            self._stop()
            self._count(work)
        return True

    def _is_crowded(self, needed: int) -> bool:
        """Whether requests may soon need blocks that the audit has, or `needed` ones that it wants."""
        scheduler = self._scheduler
        running, free = len(scheduler.running), self._tables.pool.num_free - needed
        if free < SPARE_BLOCKS * running:
            return True
        return bool(scheduler.waiting) and running < scheduler.max_num_seqs and not scheduler.may_admit

    def _interrupt(self, work: _Work) -> None:
        self._stop()
        work.tries += 1
        if work.tries < MAX_TRIES and len(self._pending) < MAX_PENDING:
            work.rescoring, work.wrong = None, []
            self._pending.appendleft(work)
        else:
            self._dropped += 1

    def _start(self) -> bool:
        while self._pending:
            ids = self._pending[0].text.ids
            if self._scheduler.has_work and self._is_crowded(blocks_for(len(ids))):
                return False
            work = self._pending.popleft()
            self._begun += 1
            table = -self._begun  # sequences count up from 0
            # A unique salt: no block of this text may come from the prefix cache.
            self._tables.open(table, ids, f"audit/{secrets.token_hex(16)}")
            if self._tables.grow(table, len(ids)):
                work.table = table
                work.rescoring = Rescoring(work.text, self._runner, self._tables.blocks(table))
                self._current = work
                return True
            self._tables.close(table)
            self._dropped += 1
        return False

    def _stop(self) -> None:
        assert self._current is not None
        self._tables.close(self._current.table)
        self._current = None

    def _judge(self, work: _Work, rescored: Rescored) -> None:
        if work.watched.is_coupled:
            work.wrong.extend(
                (
                    difference.index,
                    f"{difference.token} where plain decoding picks {difference.pick}, {difference.gap:.3g} above it",
                )
                for difference in differences(rescored, computed_in(self._runner))
                if not difference.is_rounding
            )
        else:
            work.wrong.extend(self._unlike(work.watched, rescored))

    def _unlike(self, watched: _Watched, rescored: Rescored) -> list[tuple[int, str]]:
        """|log p(x) as used - log p(x) of a plain pass| beyond what rounding of the logits explains."""
        if not rescored.tokens:
            return []
        plain = log_distribution(rescored.logits, rescored.rows)
        # Its logarithms are rounded, also where the logits are equal
        computed = computed_in(self._runner) or torch.float32
        found = []
        for i, token in enumerate(rescored.tokens):
            index = rescored.first + i - watched.first
            if not 0 <= index < len(watched.probs):
                continue
            used, own = watched.probs[index], math.exp(float(plain[i, token]))
            if math.isnan(used):
                continue
            row, tolerance = rescored.rows[i], rounding(rescored.logits[i], computed)
            if own == 0.0:  # on the edge of a truncation, perhaps
                raised = rescored.logits[i : i + 1].clone()
                raised[0, token] += tolerance
                own = math.exp(float(log_distribution(raised, [row])[0, token]))
            if own == 0.0 or used <= 0.0 or abs(math.log(used / own)) > 2.0 * tolerance / row.params.temperature:
                found.append((rescored.first + i, f"{token} was judged with p = {used:.6g} and has {own:.6g}"))
        return found

    def _count(self, work: _Work) -> None:
        self._audited += len(work.text.output_ids) - (0 if work.watched.is_coupled else work.watched.first)
        self._texts += 1
        self._drifted += len(work.wrong)
        if not work.wrong:
            return
        first, what = work.wrong[0]
        finding = AuditFinding(
            work.request_id,
            work.text.choice,
            len(work.text.output_ids),
            len(work.wrong),
            first,
            work.watched.where(first),
        )
        self._findings.append(finding)
        logger.error(
            "drift: the text of request %s, choice %d, is not plain decoding's: %d of %d tokens. The first is output token "
            "%d: %s. It was %s",
            finding.request_id,
            finding.choice,
            finding.num_wrong,
            finding.num_tokens,
            first,
            what,
            finding.where,
        )
