"""Driving a tiny engine by hand: requests in, step outputs out, and a look at what is left behind."""

from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from paceline.core.output import StepOutput
from paceline.core.request import Request, ValidatedRequest
from paceline.engine.engine import Engine
from paceline.model_files.tokenizer.tokenizer import Tokenizer
from paceline.models.runner.runner import ModelRunner, Span
from paceline.requests.text import RequestText
from paceline.speculation.proposer import Proposer, SequenceProgress
from paceline.speculation.proposers.eagle.eagle import EagleProposer
from paceline.speculation.proposers.model.draft_model import DraftModelProposer
from tests import fakes
from tests.fakes import (
    TINY,
    FakeProposer,
    tiny_engine,
    tiny_model,
)

CHARACTERS = 'abcdefghijklmnopqrstuvwxyz{}":,[]012345'  # no space: JSON may pad with it for ever
EOS = len(CHARACTERS)
MODEL = tiny_model()
PROMPT = (5, 11, 2, 30, 7)
LONG = tuple(range(40)) + tuple(range(8))  # three blocks
GREEDY = {"temperature": 0.0}
SAMPLED = {"temperature": 1.0, "seed": 3}


def request(
    name: str, prompt: Sequence[int], speculation: Mapping[str, Any] | None = None, **sampling: Any
) -> ValidatedRequest:
    """Seeded: a test is the same every time."""
    return fakes.request(name, prompt, speculation, **{"seed": 3, **sampling})


def letters() -> Tokenizer:
    """Token i is the i-th character, the last one ends a text."""
    backend = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(CHARACTERS)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<eos>"])
    return Tokenizer(backend, bos_id=None, eos_ids={EOS}, special_tokens={}, chat_template=None)


def engine_of(proposer: Proposer | None = None, depth: Any = 4, tokenizer: bool = False, **options: Any) -> Engine:
    return tiny_engine(MODEL, proposer, depth, tokenizer=letters() if tokenizer else None, **options)


def outputs_of(engine: Engine, *requests: Request) -> list[StepOutput]:
    for one in requests:
        engine.add(engine.validate(one))
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    assert_nothing_held(engine)
    return outputs


def tokens_of(outputs: Sequence[StepOutput], name: str = "r", choice: int = 0) -> list[int]:
    return [t for o in outputs if (o.request_id, o.choice) == (name, choice) for t in o.tokens]


def text_of(outputs: Sequence[StepOutput], one: Request, choice: int = 0) -> str:
    """The text that the receiver of these outputs makes."""
    text = RequestText(letters(), one)
    return "".join(text.add(output).text for output in outputs if output.choice == choice)


def plain_tokens(prompt: Sequence[int] = PROMPT, **sampling: Any) -> list[int]:
    return tokens_of(outputs_of(engine_of(), request("r", prompt, **sampling)))


def assert_nothing_held(engine: Engine) -> None:
    pool = engine.scheduler.tables.pool
    pool.check()
    assert (pool.num_free, len(engine.scheduler.tables)) == (pool.num_blocks, 0)
    assert len(engine.requests.output) == 0
    assert engine.requests.sequences == {}
    for proposer in engine.speculator.proposers.values():
        if isinstance(proposer, FakeProposer):
            assert proposer.progress == {}
        if isinstance(proposer, DraftModelProposer | EagleProposer):
            assert proposer.num_free_blocks == proposer.traits.runners[0].num_blocks
        if isinstance(proposer, DraftModelProposer):
            assert proposer._sequences == {}
        if isinstance(proposer, EagleProposer):
            assert proposer._cache.sequences == {}


def oracle(text: Sequence[int], wrong: Sequence[int] = ()) -> FakeProposer:
    """Drafts the output `text`, except at the positions in `wrong`."""
    text = [(token + 1) % TINY.vocab_size if i in wrong else token for i, token in enumerate(text)]

    def guess(progress: SequenceProgress) -> tuple[list[int], list[int]]:
        done = len(progress.ids) - progress.num_prompt
        tokens = text[done : done + progress.depth]
        return tokens, list(range(-1, len(tokens) - 1))

    return FakeProposer(guess)


def oracle_tree(text: Sequence[int]) -> FakeProposer:
    """Two siblings a level, the wrong one first: the right path is nodes 1, 3, 5, …"""

    def guess(progress: SequenceProgress) -> tuple[list[int], list[int]]:
        done = len(progress.ids) - progress.num_prompt
        right = text[done : done + progress.depth // 2]
        tokens = [token for pair in (((t + 1) % TINY.vocab_size, t) for t in right) for token in pair]
        return tokens, [2 * (i // 2) - 1 for i in range(len(tokens))]

    return FakeProposer(guess)


def counting(runner: ModelRunner) -> list[Sequence[Span]]:
    """Every pass from now on, as it was asked for."""
    passes: list[Sequence[Span]] = []
    forward = runner.forward

    def counted(spans: Sequence[Span], *rest: Any) -> Any:
        passes.append(spans)
        return forward(spans, *rest)

    runner.forward = counted  # type: ignore[method-assign]
    return passes
