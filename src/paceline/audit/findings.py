"""The findings of an audit, by prompt."""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["token", "text", "logits", "p", "q", "sample", "distribution"]
MEANING: dict[Kind, str] = {
    "token": "differs from the token of plain decoding after the same text",
    "text": "differs from the text generated without speculation",
    "logits": "verified with logits that differ from a plain pass",
    "p": "verified with a p that differs from a plain pass",
    "q": "q differs from the draft's q after the same text",
    "sample": "not a sample of the q it was verified with",
    "distribution": "tokens have another distribution with speculation than without",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """A difference beyond rounding: drift."""

    kind: Kind
    prompt: int
    index: int
    """Number of the output token."""
    origin: str
    """Origin of the token: accepted, recovered, bonus or plain."""
    token: int
    other: int | None
    """Expected token, if there is one."""
    figure: float
    """Gap in logits, or divergence."""


@dataclass(frozen=True, slots=True)
class AuditedText:
    """One prompt's text, generated with speculation and checked."""

    prompt: int
    origins: tuple[str, ...]
    """Origins of its tokens."""
    drafted: int
    accepted: int
    findings: tuple[Finding, ...]
    num_rounding: int = 0
    """Tokens that differ within rounding."""
    margins: tuple[float, ...] = ()
    """Coupled: distance of each token's score from the second best, in logits."""
    p_divergence: tuple[tuple[int, float], ...] = ()
    """(output token, KL) of the used p; in coupled rounds, of the distribution of the used logits."""
    q_divergence: tuple[tuple[int, float], ...] = ()
    """Rejection: (output token, KL) of the used q."""
    most_divergence: float = 0.0
    """Largest KL that rounding explains in this text."""
    num_samples: int = 0
    """Rejection: drafts whose sampling was replayed."""
    ranks: tuple[float, ...] = ()
    """Rejection: ranks of the tokens, see `two_sample.py`."""
    plain_ranks: tuple[float, ...] = ()
    """Ranks of another text for the same prompt, generated without speculation."""
