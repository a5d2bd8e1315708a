"""Drafts that work on the target's hidden states: what they take, and the proposer that runs them."""

from paceline.core.config import EngineConfig
from paceline.engine.memory_fit import Footprint
from paceline.kernels.layout import BLOCK_SIZE
from paceline.models.drafts.eagle import LANE_BLOCKS, EagleModel, EagleRunner
from paceline.models.drafts.load import LoadedHead
from paceline.speculation.proposer import Proposer
from paceline.speculation.proposers.eagle import WIDTH, EagleProposer
from paceline.speculation.proposers.medusa import MedusaProposer
from paceline.speculation.proposers.pending import PENDING_ROWS


def num_lanes(config: EngineConfig) -> int:
    """Branches of trees that grow at once: one for every sequence, and a full tree's for a few."""
    return max(config.max_num_seqs, 4 * WIDTH)


def head_footprint(head: LoadedHead, config: EngineConfig) -> Footprint:
    model = head.model
    activations = 0
    if isinstance(model, EagleModel):
        shape, width = model.config, model.dtype.itemsize
        rows = config.max_batched_tokens
        activations = PENDING_ROWS * len(shape.state_layers) * shape.hidden_size * width
        activations += rows * (6 * shape.hidden_size + 3 * shape.ffn_size) * width
        activations += num_lanes(config) * LANE_BLOCKS * BLOCK_SIZE * head.kv_bytes_per_token()
    return Footprint(head.name, model.weight_bytes, head.kv_bytes_per_token(), activations)


def head_proposer(head: LoadedHead, num_blocks: int, config: EngineConfig) -> tuple[str, Proposer]:
    """The method's name and its proposer."""
    if isinstance(head.model, EagleModel):
        runner = EagleRunner(head.model, num_blocks, num_lanes(config))
        return "eagle", EagleProposer(runner, config.max_batched_tokens, config.prefix_caching)
    return "medusa", MedusaProposer(head.model)
