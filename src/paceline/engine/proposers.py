"""The proposers of an engine by method, and the memory of draft heads."""

import torch

from paceline.core.clock import WallClock
from paceline.core.config import EngineConfig
from paceline.engine.memory_fit import Footprint
from paceline.kernels.layout import BLOCK_SIZE
from paceline.kv.block_tables import BlockTables
from paceline.models.drafts.compatibility import proposable_ids
from paceline.models.drafts.eagle import LANE_BLOCKS, EagleModel, EagleRunner
from paceline.models.drafts.load import LoadedHead
from paceline.models.loading.load import LoadedModel
from paceline.models.runner import ModelRunner
from paceline.models.runners import make_runner
from paceline.speculation.proposer import Proposer
from paceline.speculation.proposers.combined import CombinedProposer
from paceline.speculation.proposers.draft_model import DraftModelProposer
from paceline.speculation.proposers.eagle import WIDTH, EagleProposer
from paceline.speculation.proposers.layer_skip import LayerSkipProposer
from paceline.speculation.proposers.lookahead import LookaheadProposer
from paceline.speculation.proposers.medusa import MedusaProposer
from paceline.speculation.proposers.ngram import NgramProposer
from paceline.speculation.proposers.pending_states import PENDING_ROWS
from paceline.speculation.proposers.suffix import SuffixProposer

EXIT_SHARE = 0.5
"""Share of the target's layers that `layer_skip` drafts with. It pays only for a target trained for early exits."""
LOOKUPS = ("ngram", "suffix")
MODELS = ("draft_model", "eagle", "medusa", "layer_skip")
"""Methods that `combined` chooses from, if the engine has them."""


def make_proposers(
    config: EngineConfig,
    target: LoadedModel,
    draft: LoadedModel | LoadedHead | None,
    runner: ModelRunner,
    tables: BlockTables,
    kv_dtype: torch.dtype | None,
) -> dict[str, Proposer]:
    """Proposers by method. `runner` and `tables` are the target's."""
    exit_layer = max(1, round(EXIT_SHARE * target.config.num_layers))
    proposers: dict[str, Proposer] = {
        "ngram": NgramProposer(),
        "suffix": SuffixProposer(),
        "lookahead": LookaheadProposer(),
        "layer_skip": LayerSkipProposer(runner, tables, exit_layer),
    }
    if isinstance(draft, LoadedHead):
        name, proposer = head_proposer(draft, runner.num_blocks, config)
        proposers[name] = proposer
    elif draft is not None:
        proposers["draft_model"] = DraftModelProposer(
            make_runner(draft.model, runner.num_blocks, kv_dtype),
            config.max_batched_tokens,
            len(proposable_ids(target.config, draft.config)),
            target.config.vocab_size,
            config.prefix_caching,
            config.max_batched_tokens * prefill_passes(target.model.weight_bytes, draft.model.weight_bytes),
        )
    lookups, models = ({name: proposers[name] for name in kind if name in proposers} for kind in (LOOKUPS, MODELS))
    proposers["combined"] = CombinedProposer(lookups, models, WallClock())
    return proposers


def prefill_passes(target_bytes: int, draft_bytes: int) -> int:
    """Passes of a draft prefill within one step: about as many as take the time of one target pass. A draft that is n times
    smaller is taken to be n / 4 times faster."""
    return max(1, target_bytes // draft_bytes // 4)


def num_lanes(config: EngineConfig) -> int:
    """Tree branches that an EAGLE head computes in one pass: at least one per sequence, and full trees of a few."""
    return max(config.max_num_seqs, 4 * WIDTH)


def head_footprint(head: LoadedHead, config: EngineConfig) -> Footprint:
    """Memory of a head: weights, cache per token, and activations with pending hidden states."""
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
    """The method of a head and its proposer."""
    if isinstance(head.model, EagleModel):
        runner = EagleRunner(head.model, num_blocks, num_lanes(config))
        return "eagle", EagleProposer(runner, config.max_batched_tokens, config.prefix_caching)
    return "medusa", MedusaProposer(head.model)
