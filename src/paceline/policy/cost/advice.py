"""Advice from the cost model: whether to speculate, with which method, at which depth, and why.

Only the cost model decides. The advice names published rules of thumb where they disagree with it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from paceline.policy.cost.cost import Estimate, MethodCosts, TargetCosts, estimates_by_depth, plain, speculative_slots
from paceline.policy.cost.speculation import expected_tokens

MARGIN = 0.03
"""Minimum gain. The depth rule `goodput` starts drafting at the same gain."""
RULE_DEPTH, RULE_ALPHA = 4, 0.65
"""Rule of thumb: depth 4, deeper only above this alpha."""
LOSING_ALPHA = 0.5
"""Rule of thumb: speculation loses below this alpha."""
ALERT_ALPHA = 0.6
MIN_ACCEPTED = 2.0
LARGE_SLOTS = 0.05
"""Share of the cache held by drafts from which a caution is given."""

POOL = "pool"
"""The method whose drafts come from workers on other devices than the target's."""
EVEN = 0.02
"""Difference of speed within which a pool and a local draft count as equally fast."""

Cause = Literal["acceptance", "draft time", "network", "memory", "verify time"]


@dataclass(frozen=True, slots=True)
class Caution:
    """A failure mode of speculation: the finding and the remedy."""

    cause: Cause
    finding: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.finding} {self.remedy}"


@dataclass(frozen=True, slots=True)
class Advice:
    """`choice` is plain decoding if no method pays. `table` holds plain decoding, then every method by depth."""

    choice: Estimate
    table: tuple[Estimate, ...]
    verdict: str
    reasons: tuple[str, ...]
    cautions: tuple[Caution, ...]
    """Cautions about the choice, or about the best method if the choice is plain decoding."""

    @property
    def speculate(self) -> bool:
        return self.choice.depth > 0


def advise(target: TargetCosts, methods: Sequence[MethodCosts], max_depth: int) -> Advice:
    """The fastest estimate that fits the device and gains more than `MARGIN`, or none."""
    baseline = plain(target)
    by_method = {method.name: estimates_by_depth(target, method, max_depth) for method in methods}
    every = [estimate for some in by_method.values() for estimate in some]
    table = (baseline, *every)
    if not every:
        return Advice(baseline, table, "Do not speculate: there is no method to draft with.", (), ())
    fitting = [estimate for estimate in every if estimate.fits]
    best = _fastest(fitting or every)
    method = next(method for method in methods if method.name == best.method)
    cautions = _cautions(target, best)
    if not fitting or best.speedup < 1.0 + MARGIN:
        verdict = "Do not speculate: " + (
            f"the best, {_name(best)}, would run at {best.speedup:.2f}x of plain decoding."
            if fitting
            else "no method fits the device's memory."
        )
        reasons = (
            [_refusal(target, method, best)] if fitting else [f"Given the room it would bring {best.speedup:.2f}x."]
        )
        return Advice(baseline, table, verdict, tuple(reasons), cautions)
    reasons = [_arithmetic(target, best), *_depth_reasons(by_method[best.method], method, best)]
    reasons += _placement(by_method) or _next_best(by_method, best)
    fastest = _fastest(every)
    if not fastest.fits:
        reasons.append(f"{_name(fastest)} would be faster ({fastest.speedup:.2f}x), but {_too_large(target, fastest)}")
    if best.dollars_per_million is not None and baseline.dollars_per_million is not None:
        reasons.append(_money(best.dollars_per_million, baseline.dollars_per_million))
    verdict = f"Speculate with {_name(best)}: {best.speedup:.2f}x plain decoding."
    return Advice(best, table, verdict, tuple(reasons), cautions)


def _fastest(candidates: Sequence[Estimate]) -> Estimate:
    """Ties go to the first, which has the smallest depth."""
    return max(candidates, key=lambda estimate: estimate.speedup)


def _arithmetic(target: TargetCosts, best: Estimate) -> str:
    network = f" + network {_ms(best.network_seconds)}" if best.network_seconds else ""
    return (
        f"A round yields {best.tokens:.2f} tokens (alpha {best.alpha:.2f}) and takes {_ms(best.round_seconds)}: draft "
        f"{_ms(best.draft_seconds)} + verify {_ms(best.verify_seconds)}{network}. Plain decoding takes "
        f"{_ms(best.tokens * target.plain_seconds)} for as many."
    )


def _depth_reasons(depths: Sequence[Estimate], method: MethodCosts, best: Estimate) -> list[str]:
    reasons = []
    after = next((estimate for estimate in depths if estimate.depth > best.depth), None)
    if after is not None:
        reasons.append(
            f"Deeper does not pay: depth {after.depth} adds {after.tokens - best.tokens:.2f} tokens and "
            f"{_ms(after.round_seconds - best.round_seconds)} to a round ({after.speedup:.2f}x)."
        )
    elif len(depths) > 1:
        reasons.append(f"Depth {best.depth} is the largest that was compared; a larger --max-depth may do better.")
    if best.depth > RULE_DEPTH and best.alpha <= RULE_ALPHA and not method.tokens:  # the rule is about chains
        reasons.append(
            f"The rule of thumb would stay at depth {RULE_DEPTH} below alpha {RULE_ALPHA:g}; here drafting is cheap enough "
            f"({_ms(best.draft_seconds)} a round) to go deeper."
        )
    if best.alpha < LOSING_ALPHA:
        reasons.append(
            f"The rule of thumb expects a loss below alpha {LOSING_ALPHA:g}. It gains here because drafting takes "
            f"{best.draft_seconds / best.verify_seconds:.0%} of a verify pass"
            + (f" and {method.delivery:.0%} of rounds have a draft." if method.delivery < 1.0 else ".")
        )
    return reasons


def _next_best(by_method: dict[str, list[Estimate]], best: Estimate) -> list[str]:
    others = [_fastest(some) for name, some in by_method.items() if name != best.method and some]
    others = sorted((estimate for estimate in others if estimate.fits), key=lambda estimate: -estimate.speedup)
    return [f"Next best: {_name(estimate)}, {estimate.speedup:.2f}x." for estimate in others[:1]]


def _placement(by_method: dict[str, list[Estimate]]) -> list[str]:
    """Where to place the draft, if it was priced on the target's device and in a pool."""
    pools = by_method.get(POOL)
    locals_ = [estimate for name, some in by_method.items() if name != POOL for estimate in some]
    if not pools or not locals_:
        return []
    pool, local = _fastest(pools), _fastest(locals_)
    share, saved = pool.speedup / local.speedup, (local.memory_bytes - pool.memory_bytes) / 1e9
    memory = f" and leaves {saved:.1f} GB to the KV cache" if saved >= 0.05 else ""
    found = f"a pool reaches {share:.2f} of the speed of {_name(local)}{memory}."
    if not local.fits:
        return [f"Use a pool: {_name(local)} does not fit; {found}"]
    if share >= 1.0 + EVEN:
        return [f"Use a pool: {found}"]
    if share >= 1.0 - EVEN:
        return [f"Either place serves: {found} Use a pool if memory is short, or if several targets share it."]
    return [
        f"Draft in the engine: {found} Use a pool only if the memory is worth that, or if several targets share it."
    ]


def _money(speculative: float, baseline: float) -> str:
    text = f"A million tokens cost ${speculative:.2f}, plain ${baseline:.2f}."
    if speculative > baseline:
        text += " Faster, but more expensive: the draft's own device costs more than the speed saves."
    return text


def _refusal(target: TargetCosts, method: MethodCosts, best: Estimate) -> str:
    """The term that takes the gain: whether the method would pay without it."""
    gain = best.tokens * target.plain_seconds
    without = {
        "drafting": gain / (best.round_seconds - best.draft_seconds),
        "the network": gain / (best.round_seconds - best.network_seconds),
        "the larger pass": gain / (best.round_seconds - best.verify_seconds + target.plain_seconds),
    }
    needed = _needed_alpha(target, method, best)
    text = _arithmetic(target, best)
    term, speedup = max(without.items(), key=lambda item: item[1])
    if speedup >= 1.0 + MARGIN:
        text += f" If {term} were free it would be {speedup:.2f}x."
    elif best.tokens < 1.0 + MARGIN:
        text += " Even a free draft would not pay: too little is accepted."
    else:
        text += f" No single term takes the gain: even if {term} were free it would be {speedup:.2f}x."
    if best.alpha < LOSING_ALPHA:
        text += f" Alpha is below {LOSING_ALPHA:g}: a quantised target, or a draft trained on this traffic, may help."
    if needed is not None:
        text += f" At these times depth {best.depth} breaks even at alpha {needed:.2f}."
    return text


def _needed_alpha(target: TargetCosts, method: MethodCosts, best: Estimate) -> float | None:
    """The alpha at which this depth breaks even. None if there is no such alpha."""
    need = 1.0 + (best.round_seconds / target.plain_seconds - 1.0) / method.delivery
    if method.tokens or need > best.depth + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2.0
        low, high = (middle, high) if expected_tokens((middle,), best.depth) < need else (low, middle)
    return high


def _cautions(target: TargetCosts, best: Estimate) -> tuple[Caution, ...]:
    """The four failure modes, and passes that grow with their rows."""
    found = []
    if best.depth >= MIN_ACCEPTED and best.accepted < MIN_ACCEPTED:
        alert = " Below 0.6 for ten minutes is worth an alert." if best.alpha < ALERT_ALPHA else ""
        found.append(
            Caution(
                "acceptance",
                f"{best.accepted:.2f} accepted drafts per round, fewer than {MIN_ACCEPTED:.0f}.",
                f"Use a draft closer to the target: same family, distilled, or trained on this traffic.{alert}",
            )
        )
    if best.draft_seconds > best.verify_seconds:
        found.append(
            Caution(
                "draft time",
                f"Drafting ({_ms(best.draft_seconds)}) takes longer than verifying ({_ms(best.verify_seconds)}).",
                "Use a smaller or quantised draft, a head on the target, or draft less deep.",
            )
        )
    if best.network_seconds > best.draft_seconds:
        found.append(
            Caution(
                "network",
                f"The round trip ({_ms(best.network_seconds)}) takes longer than drafting ({_ms(best.draft_seconds)}).",
                "Place the draft next to its target, or draft on the target's own device.",
            )
        )
    slots = speculative_slots(best.depth, target.batch)
    if not best.fits or (target.kv_tokens and slots > LARGE_SLOTS * target.kv_tokens):
        found.append(
            Caution(
                "memory",
                _too_large(target, best)
                if not best.fits
                else f"Drafts hold {slots} slots, {slots / target.kv_tokens:.0%} of the cache: preemptions may rise.",
                "Run fewer sequences at once, draft less deep, or use a head instead of a second model.",
            )
        )
    if best.verify_seconds > (1.0 + MARGIN) * target.plain_seconds:
        found.append(
            Caution(
                "verify time",
                f"Verifying takes {best.verify_seconds / target.plain_seconds:.2f}x a plain step at batch {target.batch}.",
                "This grows with the batch; let the depth follow the load (speculation.depth: goodput).",
            )
        )
    return tuple(found)


def _too_large(target: TargetCosts, estimate: Estimate) -> str:
    assert target.memory_bytes is not None
    return f"{_name(estimate)} needs {estimate.memory_bytes / 1e9:.1f} GB of the device's {target.memory_bytes / 1e9:.1f} GB."


def _name(estimate: Estimate) -> str:
    return f"{estimate.method} at depth {estimate.depth}"


def _ms(seconds: float) -> str:
    return f"{1000.0 * seconds:.2f} ms"
