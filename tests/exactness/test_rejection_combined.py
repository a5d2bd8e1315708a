"""Rejection verification with drafts of several methods in one batch: some with a `q`, some one-hot."""

from paceline.core.clock import VirtualClock
from paceline.core.request import SamplingParams
from paceline.speculation.proposers.choice import MethodChoice
from paceline.speculation.proposers.combined import CombinedProposer
from paceline.speculation.proposers.lookahead import LookaheadProposer
from paceline.speculation.proposers.suffix import NgramProposer, SuffixProposer
from tests.exactness.suite import check_distribution, next_logits
from tests.fakes import TINY, Sampled, tiny_engine, tiny_model
from tests.specs import changed

SMALL = changed(TINY, vocab_size=5)
PROMPT = (1, 3, 2, 1, 3, 4, 1, 3)
"""Repeats itself: lookups have something to say from the first token on."""
DRAWS = 10_000


class InTurn(MethodChoice):
    """Every method that has something gets its share, whatever it is worth."""

    def __init__(self):
        super().__init__(["sampled"])
        self.used = {}

    def choose(self, batch):
        chosen = []
        for candidate in batch:
            methods = sorted(["sampled", *candidate.lookups])
            chosen.append(methods[candidate.sequence_id % len(methods)])
            self.used[chosen[-1]] = self.used.get(chosen[-1], 0) + 1
        return chosen


def test_joint_of_four_tokens():
    target = tiny_model(config=SMALL, scale=1.2)
    draft = tiny_model(config=SMALL, perturb=0.5, scale=1.2)
    sampled = Sampled(lambda output: next_logits(draft, (*PROMPT, *output)))
    lookups = {"ngram": NgramProposer(1, 3), "suffix": SuffixProposer(), "lookahead": LookaheadProposer()}
    combined = CombinedProposer(lookups, {"sampled": sampled}, VirtualClock())
    combined._choice = choice = InTurn()

    def engine():
        return tiny_engine(target, combined, depth=3, max_num_seqs=512, max_batched_tokens=8192, kv_tokens=16 * 1024)

    check_distribution(target, engine, PROMPT, SamplingParams(temperature=1.0), DRAWS)
    assert set(choice.used) == {"sampled", *lookups}
    assert min(choice.used.values()) > 1_000
