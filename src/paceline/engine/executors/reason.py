"""Why a step ran on the host: the labels of `ExecutorSelector.counts`."""

from enum import StrEnum

GRAPH = "graph"


class HostReason(StrEnum):
    """Why the host executor takes a step."""

    NO_GRAPHS = "no_graphs"
    """The engine has no graph executor: no GPU, or several ranks."""
    IDLE = "idle"
    """No sequence ran; the step starts the first one."""
    RESIZE = "resize"
    """The batch fits half the slots."""
    ADMISSION = "admission"
    """A waiting sequence is admitted to a batch that drafts."""
    PREFILL = "prefill"
    """A sequence has prompt tokens to compute, and no mixed step can compute them."""
    SAMPLING = "sampling"
    """A request has penalties, a logit bias, a grammar, log-probabilities, or sampled rejection."""
    PROPOSER = "proposer"
    """A sequence drafts with a proposer that cannot run inside a graph."""
    DRAFT_BEHIND = "draft_behind"
    """The draft has to compute tokens of a sequence first."""
    FEW_DRAFTS = "few_drafts"
    """So few sequences draft that a ragged pass is cheaper."""
    WINDOW = "window"
    """A sequence may reach `max_model_len` in the step."""
    BLOCKS = "blocks"
    """The cache has too few free blocks for the step."""
