"""The weights of a proposer's draft, which may be exchanged for those of another draft between two steps."""

from collections.abc import Callable

from paceline.models.drafts import AnyDraft, check_exchangeable, exchange


class DraftWeights:
    """The draft of one proposer, and a spare one during a trial. The engine's thread calls it.

    An exchange changes no text. What sequences in flight have in the draft's cache was computed with the other weights: their
    drafts may be worse, and they must not share it. Every version of the weights has its own part of the prefix cache.
    """

    def __init__(self, model: AnyDraft, exchanged: Callable[[], None] = lambda: None) -> None:
        """`exchanged` is called after every exchange."""
        self.model = model
        self._exchanged = exchanged
        self._spare: AnyDraft | None = None
        self._version = self._spare_version = self._newest = 0

    @property
    def has_spare(self) -> bool:
        return self._spare is not None

    def check(self, other: AnyDraft) -> None:
        """Raise `IncompatibleDraft` with the difference if the draft cannot use these weights."""
        check_exchangeable(self.model, other)

    def set_spare(self, other: AnyDraft) -> None:
        """Keep a second draft, whose weights `exchange` puts in use. Raises `IncompatibleDraft`."""
        self.check(other)
        self._newest += 1
        self._spare, self._spare_version = other, self._newest

    def exchange(self) -> None:
        """Use the weights of the spare draft from the next draft on; those in use become the spare ones."""
        assert self._spare is not None
        exchange(self.model, self._spare)
        self._version, self._spare_version = self._spare_version, self._version
        self._exchanged()

    def forget_states(self) -> None:
        """The target's weights have changed: drafts share no cache that was computed from its states before."""
        self._newest += 1
        self._version = self._newest
        self._exchanged()

    def drop_spare(self) -> None:
        """Free the weights that are not in use."""
        self._spare = None

    def salt(self, salt: str) -> str:
        """The salt of the prefix cache for the weights in use."""
        return salt if self._version == 0 else f"{salt}\0draft {self._version}"
