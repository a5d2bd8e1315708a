"""The target's own first layers as a model: the same weights, the same cache, and the head straight after."""

import copy
from dataclasses import replace

from paceline.core.errors import InvalidConfig
from paceline.models.runner import ModelRunner


def early_exit(runner: ModelRunner, num_layers: int) -> ModelRunner:
    """Runs `num_layers` layers of the runner's model, then its final norm and head.

    It reads what the whole model has cached, and writes to the same slots: whatever it stores is to be computed again by the
    whole model before anything relies on it.
    """
    whole = runner.model
    if not 1 <= num_layers <= whole.config.num_layers:
        raise InvalidConfig(f"an early exit after {num_layers} layers of a model that has {whole.config.num_layers}")
    model = copy.copy(whole)
    model.config = replace(whole.config, num_layers=num_layers)
    model.layers = whole.layers[:num_layers]
    model.norms_after = [*whole.norms_after[: num_layers - 1], whole.norms_after[-1]]
    return runner.sharing(model)
