"""What an audit finds, prompt by prompt."""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["token", "text", "logits", "p", "q", "draw", "law"]
MEANING: dict[Kind, str] = {
    "token": "not what plain decoding picks after the same text",
    "text": "not what was generated without speculation",
    "logits": "judged by other logits than a plain pass gives",
    "p": "judged by another p than a plain pass gives",
    "q": "another q than the draft gives after the same text",
    "draw": "not drawn from the q it was judged by",
    "law": "tokens follow another law with speculation than without",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that differs beyond the float contract: drift."""

    kind: Kind
    prompt: int
    index: int
    """Which output token."""
    origin: str
    """accepted, recovered, bonus or plain."""
    token: int
    other: int | None
    """What it should have been, where that is one token."""
    figure: float
    """The gap in logits, or the divergence."""


@dataclass(frozen=True, slots=True)
class AuditedText:
    """One prompt's text, generated with speculation and checked."""

    prompt: int
    origins: tuple[str, ...]
    """Of its tokens."""
    drafted: int
    accepted: int
    findings: tuple[Finding, ...]
    num_rounding: int = 0
    """Tokens that differ within the float contract."""
    margins: tuple[float, ...] = ()
    """Coupled: by how much each pick's score beat the second best, in logits."""
    p_divergence: tuple[tuple[int, float], ...] = ()
    """(output token, KL): of rejection rounds, the p that was used; of coupled ones, what the logits amount to."""
    q_divergence: tuple[tuple[int, float], ...] = ()
    """Rejection: (output token, KL) where a draft's q was derived again."""
    most_divergence: float = 0.0
    """The most that rounding explains, where it explains most."""
    num_draws: int = 0
    """Rejection: drafts whose draw was replayed."""
    ranks: tuple[float, ...] = ()
    """Rejection: see `two_sample.py`."""
    plain_ranks: tuple[float, ...] = ()
    """Of another text for the same prompt, generated without speculation."""
