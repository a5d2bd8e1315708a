"""Swaps of the draft inside a target worker's engine: loads the new draft in addition to the current draft, tries it, and
reports the trial.
"""

import logging
import threading
from collections.abc import Callable

from paceline.core.config import EngineConfig
from paceline.core.errors import PacelineError
from paceline.core.status import DraftStatus, DraftSwapStatus
from paceline.engine import EngineLoop
from paceline.engine.start import draft_of, load_second
from paceline.models.drafts import AnyDraft
from paceline.models.loading import LoadedModel
from paceline.policy.pairing.draft_trial import TrialVerdict
from paceline.wire.gateway_messages import SwapDraft
from paceline.worker.server.draft_trial import AlternatingDraftTrial

logger = logging.getLogger(__name__)

LOADING = "the new draft loads"
INTERRUPTED = "the trial was interrupted"
MAX_REASON = 2000
"""Characters of a reason."""


def draft_loader(config: EngineConfig, loop: EngineLoop) -> Callable[[str], AnyDraft]:
    """A function that loads a draft by name or folder for the target of a running engine."""

    def load(name: str) -> AnyDraft:
        model, tokenizer = loop.engine.runner.model, loop.engine.tokenizer
        assert tokenizer is not None
        return load_second(name, config, LoadedModel(config.model, model.config, model, tokenizer)).model

    return load


class DraftSwaps:
    """`start` and `status` are for the worker's thread. The draft loads on a thread of its own and is tried on the engine's."""

    def __init__(
        self, draft_trial: AlternatingDraftTrial, loop: EngineLoop, draft: str, load: Callable[[str], AnyDraft]
    ) -> None:
        """`draft_trial` is a hook of the engine of `loop`. `draft` is the name of the draft that the engine was built with."""
        self._draft_trial, self._loop, self._load = draft_trial, loop, load
        self._draft = draft
        self._swap: SwapDraft | None = None
        """The last swap."""
        self._refusal: str | None = None
        """Why its trial did not begin, or did not end well."""
        self._is_loading = self._is_tried = self._is_cancelled = False

    @classmethod
    def of(cls, draft_trial: AlternatingDraftTrial, loop: EngineLoop, config: EngineConfig) -> "DraftSwaps":
        return cls(draft_trial, loop, draft_of(config) or "", draft_loader(config, loop))

    def start(self, swap: SwapDraft) -> None:
        """Load and try a draft; an empty name ends the trial. A second swap is ignored while one runs."""
        if not swap.draft:
            self._is_cancelled = True
            self._loop.call(self._stop)
            return
        if self._draft_trial.weights is None or self._is_loading or self._draft_trial.is_running:
            logger.warning("the draft %s is not tried: %s", swap.draft, "another one is, or the engine has no draft")
            return
        self._settle()
        self._swap, self._refusal = swap, None
        self._is_loading, self._is_tried, self._is_cancelled = True, False, False
        threading.Thread(target=self._run, args=(swap,), name="paceline-draft-swap", daemon=True).start()

    @property
    def status(self) -> DraftStatus | None:
        """The draft in use and the last swap. None if the engine drafts without a model of its own."""
        if self._draft_trial.weights is None:
            return None
        if self._draft_trial.is_overdue and self._loop.is_running:
            self._loop.call(self._draft_trial.expire)
        self._settle()
        return DraftStatus(self._draft, self._draft_trial.method, self._swap_status())

    def _swap_status(self) -> DraftSwapStatus | None:
        swap = self._swap
        if swap is None:
            return None
        if self._refusal is not None:
            return DraftSwapStatus(swap.number, swap.draft, TrialVerdict.ROLL_BACK.value, self._refusal)
        if self._is_loading or not self._is_tried:
            return DraftSwapStatus(swap.number, swap.draft, TrialVerdict.CONTINUE.value, LOADING)
        decision = self._draft_trial.decision
        return DraftSwapStatus(
            swap.number, swap.draft, decision.verdict.value, decision.reason, decision.gain, *self._draft_trial.counts
        )

    def _settle(self) -> None:
        """Remember the name of a draft that was kept."""
        if self._is_tried and self._swap is not None and self._draft_trial.decision.verdict is TrialVerdict.KEEP:
            self._draft = self._swap.draft

    def _stop(self) -> None:
        self._draft_trial.stop(INTERRUPTED)

    def _run(self, swap: SwapDraft) -> None:
        """Load the draft and begin its trial."""
        try:
            candidate = self._load(swap.draft)
            if self._is_cancelled:
                self._refusal = INTERRUPTED
            else:
                self._loop.run(lambda: self._draft_trial.begin(candidate, swap.seconds, swap.period))
                self._is_tried = True
            if self._is_cancelled:  # meanwhile
                self._loop.call(self._stop)
        except PacelineError as error:
            self._refusal = f"the new draft is refused: {error}"[:MAX_REASON]
            logger.warning("%s", self._refusal)
        except Exception as error:  # a folder of any content must not end the worker
            logger.exception("the draft %s could not be loaded", swap.draft)
            self._refusal = f"the new draft could not be loaded: {error!r}"[:MAX_REASON]
        finally:
            self._is_loading = False
