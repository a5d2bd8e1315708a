"""Text generation by the target: many rows in parallel, one token per step. On CUDA a step is one graph.

A row follows its script. At GENERATE the target generates until the next user turn begins, and the script continues there.
A turn ends when the target ends it or reaches a limit, and the tokens between turns are inserted. A row is one conversation
without padding.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core.clock import Clock
from paceline.tools.train.corpus import GENERATE, NO_END, Script, TurnTokens
from paceline.tools.train.target import CACHE_STEP, Target

USER_LIMIT, ANSWER_LIMIT = 160, 192
"""Most tokens of a generated turn: greedy answers of small models can repeat without end."""
USER_TEMPERATURE = 0.8


@dataclass(frozen=True, slots=True, eq=False)
class GeneratedRows:
    ids: Tensor  # [B, S] int32
    answer: Tensor  # [B, S] bool: answer tokens that the target generated


class TextGenerator:
    """Generates batches of `rows` rows of `length` tokens. All batches share memory and graphs."""

    def __init__(
        self,
        target: Target,
        turns: TurnTokens,
        rows: int,
        length: int,
        seed: int,
        answer_limit: int = ANSWER_LIMIT,
    ) -> None:
        target.check_length(length)
        self.target, self.turns, self.rows, self.length, self._answer_limit = target, turns, rows, length, answer_limit
        device = target.device
        self._generator = torch.Generator(device)
        self.seed(seed)
        self._cache = target.new_cache(rows, length)
        self._script = torch.empty(rows, length, dtype=torch.int64, device=device)
        self._ids = torch.zeros(rows, length, dtype=torch.int64, device=device)
        self._answer = torch.zeros(rows, length, dtype=torch.bool, device=device)
        self._temperature = torch.zeros(rows, device=device)
        self._position = torch.zeros(1, dtype=torch.int64, device=device)
        self._entry = torch.ones(rows, dtype=torch.int64, device=device)  # of the script, for the next token
        self._in_answer = torch.zeros(rows, dtype=torch.bool, device=device)
        self._turn_tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self._left = torch.zeros(rows, dtype=torch.int64, device=device)  # tokens between turns still to insert
        self._ends = torch.tensor(turns.end_ids, dtype=torch.int64, device=device)
        self._end = torch.tensor((turns.to_answer or turns.end_ids[-1:])[0], device=device)
        # The two separators are right-aligned, so that the number left gives the place.
        separators = (turns.to_user, turns.to_answer[1:] if turns.is_chat else turns.to_user)
        longest = max(1, *map(len, separators))
        self._separators = torch.tensor([[0] * (longest - len(p)) + list(p) for p in separators], device=device)
        self._lengths = torch.tensor([len(p) for p in separators], device=device)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def seed(self, seed: int) -> None:
        """Seed the next batch, which does not depend on earlier batches."""
        self._generator.manual_seed(seed)

    @torch.no_grad()
    def generate(
        self, scripts: Sequence[Script], temperatures: Tensor, on_progress: Callable[[float], None] = lambda done: None
    ) -> GeneratedRows:
        """One row per script, cut to `length`. `temperatures` [B] are those of the answers, and 0 is greedy.

        `on_progress` receives the share done after every token.
        """
        assert len(scripts) == self.rows
        filled = torch.full((self.rows, self.length), GENERATE, dtype=torch.int64)
        for row, script in enumerate(scripts):
            ids = script.ids[: self.length]
            filled[row, : len(ids)] = torch.tensor(ids)
        self._script.copy_(filled)
        self._temperature.copy_(temperatures)
        self._ids[:, 0] = self._script[:, 0]
        self._answer.zero_()
        self._restart()
        for position in range(self.length - 1):
            self._run(-(-(position + 1) // CACHE_STEP) * CACHE_STEP)
            on_progress((position + 1) / (self.length - 1))
        return GeneratedRows(self._ids.to(torch.int32).cpu(), self._answer.cpu())

    @torch.no_grad()
    def measure_step(self, clock: Clock) -> float:
        """Seconds of one step. The second of two runs counts, because the first may compile or capture."""
        self._script.fill_(GENERATE)
        for _ in range(2):
            self._restart()
            before = clock.now()
            self._run(CACHE_STEP)
            int(self._ids[0, 1])  # waits for the device
        return clock.now() - before

    def _restart(self) -> None:
        self._position.zero_()
        self._entry.fill_(1)
        self._in_answer.fill_(not self.turns.is_chat)
        self._turn_tokens.zero_()
        self._left.zero_()

    def _run(self, width: int) -> None:
        if self.target.device.type != "cuda":
            self._step(width)
            return
        if width not in self._graphs:
            self._graphs[width] = self._capture(lambda: self._step(width))
        self._graphs[width].replay()

    def _capture(self, step: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Warm up and capture a step, then restore the state that these runs changed."""
        saved = [t.clone() for t in self._state]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self._generator)
        pool = next(iter(self._graphs.values())).pool() if self._graphs else None
        with torch.cuda.graph(graph, pool=pool):
            step()
        for tensor, value in zip(self._state, saved, strict=True):
            tensor.copy_(value)
        return graph

    @property
    def _state(self) -> tuple[Tensor, ...]:
        return self._position, self._entry, self._in_answer, self._turn_tokens, self._left

    def _step(self, width: int) -> None:
        """Read the tokens at the position and write the next tokens. It works in place only, because a graph replays it."""
        tokens = self._ids.index_select(1, self._position)[:, 0]
        logits = self.target.step(tokens, self._position, self._cache, width)  # [B, V]
        self._position += 1
        script = self._script.gather(1, self._entry[:, None])[:, 0]
        no_end = script == NO_END

        ends = logits.index_select(1, self._ends)
        logits.index_copy_(1, self._ends, ends.masked_fill(no_end[:, None], -torch.inf))
        # argmax(logits + T * Gumbel) samples at temperature T and is greedy at 0.
        noise = torch.empty_like(logits).exponential_(generator=self._generator).log_()
        temperature = torch.where(self._in_answer, self._temperature, USER_TEMPERATURE)
        sampled = (logits - temperature[:, None] * noise).argmax(1)

        limit = torch.where(self._in_answer, self._answer_limit, USER_LIMIT)
        sampled = torch.where((self._turn_tokens >= limit) & ~no_end, self._end, sampled)
        passing = (self._left > 0) & (script < 0)
        separator = self._separators[self._in_answer.long()]  # [B, P]
        place = (separator.shape[1] - self._left).clamp(max=separator.shape[1] - 1)
        between = separator.gather(1, place[:, None])[:, 0]
        token = torch.where(script >= 0, script, torch.where(passing, between, sampled))

        free = (script == GENERATE) & ~passing
        self._answer.index_copy_(1, self._position, (free & self._in_answer)[:, None])
        self._ids.index_copy_(1, self._position, token[:, None])
        opens_user_turn = passing & (self._left == 1) & ~self._in_answer
        self._entry.copy_((self._entry + ((script != GENERATE) | opens_user_turn)).clamp(max=self.length - 1))
        self._turn(token, free, passing)

    def _turn(self, token: Tensor, free: Tensor, passing: Tensor) -> None:
        """Update the turns after a token. End tokens inside the opening do not end a turn."""
        started = self._position >= len(self.turns.opening)
        ended = (token[:, None] == self._ends).any(1) & ~passing & started
        if self.turns.is_chat:
            self._in_answer.logical_xor_(ended)
        left = self._left - passing.long()
        self._left.copy_(torch.where(ended, self._lengths[self._in_answer.long()], left))
        self._turn_tokens.copy_(torch.where(ended, 0, self._turn_tokens + free.long()))
