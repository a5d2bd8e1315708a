"""A proposer of your own: after a token it drafts the token that followed it the last time, in any text of the same tenant.

    python examples/custom_proposer.py

It can only change the speed: verification keeps the text that of the target. docs/add_a_proposer.md has the rules.
"""

from collections.abc import Sequence

from paceline import LLM, SamplingParams
from paceline.speculation import ProposerTraits, SequenceProgress
from paceline.speculation.drafts import DraftBatch


class BigramProposer:
    traits = ProposerTraits()  # no hidden states, chains, observes every sequence

    def __init__(self) -> None:
        self._following: dict[tuple[str, int], int] = {}  # (cache salt, token) -> the token after it
        self._progress: dict[int, SequenceProgress] = {}
        self._num_learned: dict[int, int] = {}

    def observe(self, batch: Sequence[SequenceProgress]) -> None:
        for progress in batch:
            ids, salt = progress.ids, progress.cache_salt
            for i in range(self._num_learned.get(progress.sequence_id, 1), len(ids)):
                self._following[salt, ids[i - 1]] = ids[i]
            self._num_learned[progress.sequence_id] = len(ids)
            self._progress[progress.sequence_id] = progress

    def collect(self, sequence_ids: Sequence[int], deadline: float) -> DraftBatch:
        known = [sequence_id for sequence_id in sequence_ids if sequence_id in self._progress]
        return DraftBatch.chains((sequence_id, self._draft(sequence_id)) for sequence_id in known)

    def close(self, sequence_ids: Sequence[int]) -> None:
        for sequence_id in sequence_ids:
            self._progress.pop(sequence_id, None)
            self._num_learned.pop(sequence_id, None)

    def _draft(self, sequence_id: int) -> list[int]:
        progress = self._progress[sequence_id]
        draft: list[int] = []
        token: int | None = progress.ids[-1]
        while len(draft) < progress.depth:
            token = self._following.get((progress.cache_salt, token)) if token is not None else None
            if token is None:
                break
            draft.append(token)
        return draft


def main() -> None:
    prompt = "one two three four one two three four one two three"
    sampling = SamplingParams(temperature=0, max_tokens=32)
    options = {"depth": "fixed", "max_depth": 4}
    with LLM("smollm2", draft=None, proposers={"bigram": BigramProposer()}, speculation=options) as llm:
        drafted = llm.generate(prompt, sampling, speculation={"method": "bigram"})[0]
        plain = llm.generate(prompt, sampling, speculation={"enabled": False})[0]
    figures = drafted.completions[0].speculation
    print(drafted.text)
    print(f"accepted {figures.num_accepted_draft_tokens} of {figures.num_draft_tokens} drafted tokens")
    assert drafted.text == plain.text
    print("the same text as without speculation")


if __name__ == "__main__":
    main()
