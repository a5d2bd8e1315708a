"""Every way to guess that this engine offers, by name."""

import torch

from paceline.core.clock import WallClock
from paceline.core.config import EngineConfig
from paceline.engine.heads import head_proposer
from paceline.kv.block_tables import BlockTables
from paceline.models.drafts.compatibility import proposable_ids
from paceline.models.drafts.load import LoadedHead
from paceline.models.loading.load import LoadedModel
from paceline.models.runner import ModelRunner
from paceline.models.runners import make_runner
from paceline.speculation.proposer import Proposer
from paceline.speculation.proposers.combined import CombinedProposer
from paceline.speculation.proposers.draft_model import DraftModelProposer
from paceline.speculation.proposers.layer_skip import LayerSkipProposer
from paceline.speculation.proposers.lookahead import LookaheadProposer
from paceline.speculation.proposers.ngram import NgramProposer
from paceline.speculation.proposers.suffix import SuffixProposer

EXIT_SHARE = 0.5
"""Of the target's layers, how many `layer_skip` drafts with. A target has to be trained for early exits to gain by it: in
SmolLM2's 30 layers alpha is 0.11 after 15, 0.46 after 24 and 0.64 after 27, and no exit pays."""
LOOKUPS = ("ngram", "suffix")
MODELS = ("draft_model", "eagle", "medusa", "layer_skip")
"""What `combined` chooses from, of either kind, where it is there."""


def make_proposers(
    config: EngineConfig,
    target: LoadedModel,
    draft: LoadedModel | LoadedHead | None,
    runner: ModelRunner,
    tables: BlockTables,
    kv_dtype: torch.dtype | None,
) -> dict[str, Proposer]:
    """`runner` and `tables` are the target's."""
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
            config.max_batched_tokens * catch_up_passes(target.model.weight_bytes, draft.model.weight_bytes),
        )
    lookups, models = ({name: proposers[name] for name in kind if name in proposers} for kind in (LOOKUPS, MODELS))
    proposers["combined"] = CombinedProposer(lookups, models, WallClock())
    return proposers


def catch_up_passes(target_bytes: int, draft_bytes: int) -> int:
    """Passes in which a draft may catch up within a step: so many as take no longer than one of the target's. A small model
    is far from as much faster as it is smaller: a quarter of that."""
    return max(1, target_bytes // draft_bytes // 4)
