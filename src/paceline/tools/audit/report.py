"""The result of an audit, with its findings by prompt, its checks and their power."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from math import isfinite
from typing import Any, Literal

from paceline.tools.audit.tests import LEVEL, MISS, TwoSample, compare

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
    """Under coupled verification, the distance of each token's score from the second best, in logits."""
    p_divergence: tuple[tuple[int, float], ...] = ()
    """(output token, KL) of the used p. In coupled rounds it is that of the distribution of the used logits."""
    q_divergence: tuple[tuple[int, float], ...] = ()
    """(output token, KL) of the used q, under rejection."""
    most_divergence: float = 0.0
    """Largest KL that rounding explains in this text."""
    num_samples: int = 0
    """Number of drafts whose sampling was replayed, under rejection."""
    ranks: tuple[float, ...] = ()
    """Ranks of the tokens under rejection, see `two_sample.py`."""
    plain_ranks: tuple[float, ...] = ()
    """Ranks of another text for the same prompt, generated without speculation."""


@dataclass(frozen=True, slots=True)
class Check:
    """One kind of check over all texts."""

    kind: Kind
    name: str
    num_checked: int
    unit: str
    num_wrong: int
    detail: str


@dataclass(frozen=True)
class Report:
    """`about` holds the settings of the audit, in display order."""

    about: Mapping[str, Any]
    texts: Sequence[AuditedText]
    is_coupled: bool

    @cached_property
    def checks(self) -> tuple[Check, ...]:
        return self._coupled() if self.is_coupled else self._rejection()

    @cached_property
    def findings(self) -> tuple[Finding, ...]:
        return tuple(finding for text in self.texts for finding in text.findings)

    @property
    def is_clean(self) -> bool:
        return not any(check.num_wrong for check in self.checks)

    @property
    def num_drafted(self) -> int:
        """Drafted tokens. With 0 the audit checked nothing."""
        return sum(text.drafted for text in self.texts)

    @property
    def num_accepted(self) -> int:
        return sum(text.accepted for text in self.texts)

    @cached_property
    def two_sample(self) -> TwoSample:
        return compare(
            [rank for text in self.texts for rank in text.ranks],
            [rank for text in self.texts for rank in text.plain_ranks],
        )

    @property
    def power(self) -> tuple[str, ...]:
        """Sentences on the size of faults that the checks detect, and on false alarms."""
        count = len(self.texts)
        share = 1.0 - MISS ** (1.0 / count)
        lines = [
            f"A fault in at least {share:.1%} of the texts is found among {count} with probability {1 - MISS:.0%}: "
            f"the probability to miss it is (1 - share)^{count}.",
            "These checks have no false alarms if kernels are batch-invariant (the CPU's are); otherwise differences within "
            "rounding are accepted.",
        ]
        if not self.is_coupled:
            lines.append(
                f"The two-sample test detects a distance of {self.two_sample.detectable:.3f} between ranks with probability "
                f"{1 - MISS:.0%} or more, and has a false alarm once in {1 / LEVEL:.0f} audits."
            )
        return tuple(lines)

    def to_json(self) -> dict[str, Any]:
        return {
            "about": dict(self.about),
            "clean": self.is_clean,
            "drafted": self.num_drafted,
            "accepted": self.num_accepted,
            "checks": [asdict(check) for check in self.checks],
            "power": list(self.power),
            # JSON has no infinity
            "findings": [
                asdict(finding) | {"figure": finding.figure if isfinite(finding.figure) else None}
                for finding in self.findings
            ],
        }

    def _coupled(self) -> tuple[Check, ...]:
        tokens = sum(len(text.origins) for text in self.texts)
        rounding = sum(text.num_rounding for text in self.texts)
        logged = [kl for text in self.texts for _, kl in text.p_divergence]
        within = f"{rounding} differ within rounding" if rounding else "none differs"
        return (
            self._check("token", "replayed and re-scored in one plain pass", tokens, "tokens", within),
            self._check("text", "generated again without speculation", len(self.texts), "texts", "same seed"),
            self._check(
                "logits", "KL of the used logits from plain p", len(logged), "tokens", _worst(logged, "none logged")
            ),
        )

    def _rejection(self) -> tuple[Check, ...]:
        p = [kl for text in self.texts for _, kl in text.p_divergence]
        q = [kl for text in self.texts for _, kl in text.q_divergence]
        samples = sum(text.num_samples for text in self.texts)
        two = self.two_sample
        return (
            self._check("p", "KL of the used p from plain p", len(p), "tokens", _worst(p)),
            self._check("q", "KL of the used q from the draft's q", len(q), "drafts", _worst(q)),
            self._check("sample", "drafts replayed from q and their noise", samples, "drafts", ""),
            Check(
                "distribution",
                "two-sample test: with and without speculation",
                sum(two.sizes),
                "tokens",
                int(two.is_different),
                f"distance {two.distance:.4f}, p = {two.p_value:.3g}",
            ),
        )

    def _check(self, kind: Kind, name: str, count: int, unit: str, detail: str) -> Check:
        wrong = sum(finding.kind == kind for finding in self.findings)
        gaps = [finding.figure for finding in self.findings if finding.kind == kind]
        if wrong and kind in ("token", "text"):
            detail = f"largest gap {max(gaps):.3g} logits"
        return Check(kind, name, count, unit, wrong, detail)


def _worst(values: Sequence[float], nothing: str = "none: q is one-hot") -> str:
    return f"largest {max(values):.2g}, mean {sum(values) / len(values):.2g}" if values else nothing
