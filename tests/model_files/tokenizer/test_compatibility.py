from dataclasses import replace
from typing import Any

import pytest
import tokenizers
from tokenizers import models

from paceline.core.errors import IncompatibleDraft
from paceline.model_files.tokenizer.compatibility import check_compatible, describe_mismatch, fingerprint
from paceline.model_files.tokenizer.tokenizer import Tokenizer
from paceline.models.families.read import read_config
from paceline.models.heads.vocabulary import proposable_ids
from tests.models.families.test_config import HF

VOCAB = {"a": 0, "b": 1, "c": 2, "ab": 3, "bc": 4}
MERGES = [("a", "b"), ("b", "c")]


def _tokenizer(
    vocab: dict[str, int] = VOCAB,
    merges: list[tuple[str, str]] = MERGES,
    special: tuple[str, ...] = ("<end>",),
    eos: int = 5,
    template: str | None = "{{ messages }}",
) -> Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges))
    backend.add_special_tokens(list(special))
    return Tokenizer(backend, bos_id=None, eos_ids={eos}, special_tokens={}, chat_template=template)


def test_an_equal_tokenizer_is_compatible() -> None:
    assert fingerprint(_tokenizer()) == fingerprint(_tokenizer())
    check_compatible(_tokenizer(), _tokenizer())


def test_a_base_model_is_compatible_with_a_chat_model() -> None:
    check_compatible(_tokenizer(), _tokenizer(template=None))


def test_a_tokenizer_and_its_json_are_compatible(smollm2: Tokenizer) -> None:
    again = Tokenizer(
        tokenizers.Tokenizer.from_str(smollm2.to_json()),
        bos_id=smollm2.bos_id,
        eos_ids=smollm2.eos_ids,
        special_tokens={},
        chat_template=smollm2.chat_template,
    )
    check_compatible(smollm2, again)


def _words(count: int, start: int = 0, **options: Any) -> Tokenizer:
    """A tokenizer of `count` words, the first of which has the id `start`."""
    before = {f"<unused{i}>": i for i in range(start)}
    return _tokenizer(before | {f"w{i}": i + start for i in range(count)}, [], eos=0, **{"special": (), **options})


@pytest.mark.parametrize(
    ("draft", "words"),
    [
        (_tokenizer(vocab={"a": 0, "b": 1, "c": 2, "bc": 3, "ab": 4}), "same tokens under other ids"),
        (_words(6), "another tokenizer .token 0 is 'a' in the target and 'w0' in the draft; 6 of 6 ids differ"),
    ],
)
def test_a_draft_whose_ids_mean_other_tokens_is_refused(draft: Tokenizer, words: str) -> None:
    with pytest.raises(IncompatibleDraft, match=words) as caught:
        check_compatible(_tokenizer(), draft)
    assert "choose a small model with the target's tokenizer" in str(caught.value)


def test_shifted_ids_are_refused() -> None:
    with pytest.raises(IncompatibleDraft, match=r"the same tokens under other ids .* 1000 of 1000 ids differ"):
        check_compatible(_words(1000), _words(1000, 3))


def test_the_refusal_names_a_small_model_with_the_target_s_tokenizer() -> None:
    gemma = _tokenizer({f"<unused{i}>": i for i in range(105)} | {"<start_of_turn>": 105}, [], (), eos=0)
    with pytest.raises(IncompatibleDraft, match="such as Gemma-3-270M"):
        check_compatible(gemma, _words(200))


@pytest.mark.parametrize(
    ("draft", "words"),
    [
        (_words(1003), None),
        (_words(990), "does not know 10 of the target's tokens"),
        (_words(1000, special=("renamed",)), None),
        (_words(1000, template="{{ message }}"), "chat templates differ, and the target's is used"),
        (_words(1000, template=" {{ messages }} "), None),
        (_words(1000, template=None), None),
    ],
)
def test_what_lowers_acceptance_only_is_one_warning(draft: Tokenizer, words: str | None) -> None:
    warning = check_compatible(_words(1000), draft)
    assert (warning is None) == (words is None)
    assert words is None or (warning is not None and words in warning)


def test_a_few_renamed_tokens_and_other_stops_are_one_warning() -> None:
    vocab = {(f"x{i}" if i < 5 else f"w{i}"): i for i in range(1000)}
    warning = check_compatible(_words(1000), _tokenizer(vocab, [], (), eos=7, template="{{ other }}"))
    assert warning == (
        "the draft does not know 5 of the target's tokens; the target stops at [0] and the draft at [7]; "
        "their chat templates differ, and the target's is used: drafts are valid, and fewer of them may be accepted"
    )


def test_peers_compare_checksums() -> None:
    target = fingerprint(_tokenizer())
    for draft in (
        _tokenizer(eos=3),
        _tokenizer(template="x"),
        _tokenizer(merges=MERGES[::-1]),
        _tokenizer(template=None),
    ):
        assert describe_mismatch(target, fingerprint(draft)) is None
    assert target.difference(fingerprint(_tokenizer())) is None
    assert target.difference(fingerprint(_tokenizer(template=None))) is None
    difference = target.difference(fingerprint(_tokenizer(eos=3, template="x")))
    assert difference is not None
    assert difference.startswith("target and draft differ in their stop tokens, chat template: ")
    other = fingerprint(_tokenizer(special=("<end>", "<x>")))
    mismatch = describe_mismatch(target, other)
    assert mismatch is not None
    assert target.vocabulary in mismatch
    assert other.vocabulary in mismatch


def test_a_padded_vocabulary_limits_what_may_be_proposed() -> None:
    target = read_config(HF)
    assert proposable_ids(target, replace(target, vocab_size=128300)) == range(128256)
    assert proposable_ids(target, replace(target, vocab_size=128000)) == range(128000)
