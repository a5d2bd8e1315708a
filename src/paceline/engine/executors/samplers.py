"""The rules by which a pass picks tokens itself, without returning its logits."""

from paceline.core.sequence import Sequence
from paceline.engine.output import OutputProcessor
from paceline.engine.schedule import Schedule
from paceline.kernels.cpu.decoder_pass import Sampler
from paceline.speculation.verification.noise import Purpose, stream


def samplers_of(schedule: Schedule, output: OutputProcessor) -> list[Sampler] | None:
    """The sampler of each item. None if a sequence needs its logits."""
    samplers = []
    for item in schedule.items:
        sequence = item.sequence
        if _needs_logits(sequence) or output.has_grammar(sequence):
            return None
        samplers.append(Sampler(sequence.sampling, stream(Purpose.SHARED, sequence.seed, sequence.choice)))
    return samplers


def _needs_logits(sequence: Sequence) -> bool:
    """Whether its logits are returned, or modified before a token is picked, or verified by probabilities."""
    params = sequence.sampling
    return (
        (sequence.verification != "coupled" and not params.is_greedy)
        or params.logprobs is not None
        or params.has_penalties
        or bool(params.logit_bias)
        or (sequence.num_output < params.min_tokens and bool(params.blocked_ids))
        or sequence.needs_prompt_scores
    )
