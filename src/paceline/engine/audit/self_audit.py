"""Self-audit: while the engine is idle, it computes some finished texts again without speculation.

A coupled or greedy text must be what plain decoding picks; of a rejection text, the probability that every token had when it
was accepted or drawn must be what a plain pass gives it. Lives on the engine's thread and in the engine's cache, and gives
all of that back before the next step: a request never waits for more than one small pass.
"""

import logging
import math
import secrets
from collections import deque
from dataclasses import dataclass, field

from paceline.core.sequence import FinishReason, Sequence
from paceline.core.status import AuditCounts
from paceline.engine import StepHook
from paceline.engine.audit.rescoring import FinishedText, Rescored, Rescoring, computed_in, differences, rounding
from paceline.engine.step.step import StepResult
from paceline.kv import BlockTables
from paceline.models.runner import ModelRunner
from paceline.requests import Grammar
from paceline.speculation.distribution import log_distribution

logger = logging.getLogger(__name__)

ROWS = 16
"""Tokens a pass: what a request that comes in meanwhile waits for."""
MAX_PENDING = 8
"""Texts that wait for an idle moment; the oldest gives way."""
MAX_TRIES = 20
"""How often a text is begun again after requests came in between."""
GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0


@dataclass(slots=True, eq=False)
class _Watched:
    """A running sequence that will be audited."""

    grammar: Grammar | None
    is_coupled: bool
    first: int
    """Output tokens that another engine had committed: how it judged them is not known here."""
    probs: list[float] = field(default_factory=list)
    """Rejection: p(x) of every token as verification had it."""


@dataclass(slots=True, eq=False)
class _Work:
    request_id: str
    text: FinishedText
    watched: _Watched
    tries: int = 0
    rescoring: Rescoring | None = None
    table: int = 0
    wrong: list[str] = field(default_factory=list)


class SelfAudit(StepHook):
    """Checks finished texts in idle time."""

    def __init__(self, runner: ModelRunner, tables: BlockTables, fraction: float) -> None:
        """`fraction` of the sequences, spread evenly."""
        self._runner, self._tables, self._fraction = runner, tables, fraction
        self._watched: dict[int, _Watched] = {}
        self._pending: deque[_Work] = deque()
        self._current: _Work | None = None
        self._seen = self._begun = 0
        self._audited = self._drifted = self._dropped = 0

    @property
    def counts(self) -> AuditCounts:
        """Safe from any thread."""
        return AuditCounts(self._audited, self._drifted, self._dropped)

    def sequence_added(self, sequence: Sequence, grammar: Grammar | None) -> None:
        """A sequence is about to run; whether it is audited is decided before anything of it is known."""
        self._seen += 1
        if (self._seen * GOLDEN) % 1.0 < self._fraction:
            is_coupled = sequence.verification == "coupled" or sequence.sampling.is_greedy
            self._watched[sequence.id] = _Watched(grammar, is_coupled, sequence.num_output)

    def verified(self, result: StepResult) -> None:
        """Rejection rounds of audited sequences: keep the probability of every committed token."""
        if not self._watched:
            return
        for sequence_result in result.sequences:
            watched, verdict = self._watched.get(sequence_result.sequence.id), sequence_result.verdict
            if watched is None or watched.is_coupled or verdict is None or verdict.p is None:
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
        if len(self._pending) == MAX_PENDING:
            self._pending.popleft()
            self._dropped += 1
        self._pending.append(_Work(sequence.request_id, text, watched))

    @property
    def has_idle_work(self) -> bool:
        return self._current is not None or bool(self._pending)

    def use_idle_time(self) -> None:
        """One small pass, if there is something to check. Only while the engine has no work."""
        if self._current is None and not self._start():
            return
        work = self._current
        assert work is not None
        assert work.rescoring is not None
        try:
            self._judge(work, work.rescoring.advance(ROWS))
        except Exception:
            logger.exception("the audit of request %s failed; no further text is audited", work.request_id)
            self._fraction = 0.0
            self._stop()
            self._pending.clear()
            return
        if work.rescoring.is_done:
            self._stop()
            self._count(work)

    def before_step(self) -> None:
        """Release all blocks, because a request runs. An interrupted audit starts again later."""
        work = self._current
        if work is None:
            return
        self._stop()
        work.tries += 1
        if work.tries < MAX_TRIES and len(self._pending) < MAX_PENDING:
            work.rescoring, work.wrong = None, []
            self._pending.appendleft(work)
        else:
            self._dropped += 1

    def _start(self) -> bool:
        while self._pending:
            work = self._pending.popleft()
            self._begun += 1
            table, ids = -self._begun, work.text.ids  # sequences count up from 0
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
                f"output token {difference.index} is {difference.token} where plain decoding picks {difference.pick}, "
                f"{difference.gap:.3g} above it"
                for difference in differences(rescored, computed_in(self._runner))
                if not difference.is_rounding
            )
        else:
            work.wrong.extend(self._unlike(work.watched, rescored))

    def _unlike(self, watched: _Watched, rescored: Rescored) -> list[str]:
        """|log p(x) as used - log p(x) of a plain pass| beyond what rounding of the logits explains."""
        if not rescored.tokens:
            return []
        plain = log_distribution(rescored.logits, rescored.rows)
        found = []
        for i, token in enumerate(rescored.tokens):
            index = rescored.first + i - watched.first
            if not 0 <= index < len(watched.probs):
                continue
            used, own = watched.probs[index], math.exp(float(plain[i, token]))
            row, tolerance = rescored.rows[i], rounding(rescored.logits[i], computed_in(self._runner))
            if own == 0.0:  # on the edge of a truncation, perhaps
                raised = rescored.logits[i : i + 1].clone()
                raised[0, token] += tolerance
                own = math.exp(float(log_distribution(raised, [row])[0, token]))
            if own == 0.0 or used <= 0.0 or abs(math.log(used / own)) > 2.0 * tolerance / row.params.temperature:
                found.append(
                    f"output token {rescored.first + i}, {token}, was judged with p = {used:.6g} and has {own:.6g}"
                )
        return found

    def _count(self, work: _Work) -> None:
        self._audited += len(work.text.output_ids) - (0 if work.watched.is_coupled else work.watched.first)
        self._drifted += len(work.wrong)
        if work.wrong:
            logger.error(
                "drift: the text of request %s, choice %d, is not plain decoding's: %d of %d tokens, the first: %s",
                work.request_id,
                work.text.choice,
                len(work.wrong),
                len(work.text.output_ids),
                work.wrong[0],
            )
