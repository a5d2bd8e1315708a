"""What was seen of one request, whoever served it. Seconds on one clock."""

from dataclasses import dataclass

from paceline.core.output import StepOutput


@dataclass(frozen=True, slots=True)
class Beat:
    """One arrival: the tokens of a step, together."""

    at: float
    tokens: int
    drafted: int = 0
    accepted: int = 0

    @classmethod
    def of(cls, output: StepOutput, at: float) -> "Beat":
        return cls(at, len(output.tokens), output.drafted, output.accepted)


@dataclass(frozen=True, slots=True)
class Trace:
    category: str
    started: float
    beats: tuple[Beat, ...]
    text: str
    token_ids: tuple[int, ...] | None = None
    """None where only text came back."""
    rounds: int | None = None
    """Passes of the target after the first token, where beats are not steps: 0 if nobody knows. None: each beat is one."""

    @property
    def tokens(self) -> int:
        return sum(beat.tokens for beat in self.beats)

    @property
    def seconds(self) -> float:
        return self.beats[-1].at - self.started if self.beats else 0.0

    @property
    def ttft(self) -> float | None:
        """Time to first token."""
        return self.beats[0].at - self.started if self.beats else None

    @property
    def token_seconds(self) -> list[float]:
        """What each token after the first arrival took. Tokens that arrive together share the wait for them."""
        waits: list[float] = []
        last = self.beats[0].at if self.beats else 0.0
        for beat in self.beats[1:]:
            if beat.tokens:
                waits += [(beat.at - last) / beat.tokens] * beat.tokens
                last = beat.at
        return waits

    @property
    def num_rounds(self) -> int:
        """Passes of the target after the one that computed the prompt and gave the first token."""
        return max(0, len(self.beats) - 1) if self.rounds is None else self.rounds

    @property
    def round_tokens(self) -> int:
        """Tokens of those rounds; 0 where they are not known."""
        return self.tokens - 1 if self.num_rounds else 0
