"""How far a text is from what the target itself would have said."""

import torch

from paceline.engine.engine import Engine
from paceline.kernels.layout import BLOCK_SIZE
from paceline.models.runner import Span


def largest_gap(engine: Engine, prompt: list[int], text: list[int]) -> float:
    """Re-scored in one pass: the largest distance of any token's logit from the arg-max. The engine must be idle, for its cache
    is written to."""
    ids = prompt + text[:-1]
    logits = engine.runner.forward([Span(range(-(-len(ids) // BLOCK_SIZE)), 0, ids, len(text))]).logits
    chosen = logits.gather(1, torch.tensor(text, device=logits.device).unsqueeze(1)).squeeze(1)
    return float((logits.amax(1) - chosen).max())
