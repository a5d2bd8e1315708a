"""The pool proposer of a worker that is told, again and again, which draft workers there are."""

from collections.abc import Iterable

from paceline.runtime.draft_link import DraftAddress, DraftLink
from paceline.runtime.messages import Goodbye
from paceline.runtime.pool_proposer import PoolProposer


class SteeredProposer(PoolProposer):
    """Starts without any draft worker; until it is told of one, its fallback drafts."""

    def __init__(self, vocabulary: str, vocab_size: int, **options: object) -> None:
        super().__init__((), vocabulary, vocab_size, **options)  # type: ignore[arg-type]
        self._vocabulary = vocabulary
        self._name = str(options.get("name", ""))

    def set_workers(self, workers: Iterable[DraftAddress]) -> None:
        """Use these and no others; lines to those that stay are kept."""
        wanted = {where.name: where for where in workers}
        kept = {link.where.name: link for link in self._links if wanted.get(link.where.name) == link.where}
        for link in self._links:
            if link.where.name not in kept:
                self._unassign(link)
                if link.is_up:
                    link.line.send(Goodbye("no longer in the cluster"))
                link.close()
        for name, where in wanted.items():
            if name not in kept:
                kept[name] = DraftLink(where, self._vocabulary, self._name, self._unassign)
        self._by_name, self._links = kept, list(kept.values())
        self.tend()

    def tend(self) -> None:
        """Keep the lines alive while nobody generates."""
        now = self._hear()
        for link in self._links:
            link.tend(now)
