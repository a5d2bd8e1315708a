from dataclasses import replace

import pytest
import tokenizers
from tokenizers import models

from paceline.core.errors import IncompatibleDraft
from paceline.model_files.tokenizer.compatibility import check_compatible, fingerprint
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


@pytest.mark.parametrize(
    ("draft", "words"),
    [
        (
            _tokenizer(vocab={"a": 0, "b": 1, "c": 2, "bc": 3, "ab": 4}),
            "vocabulary: token 3 is 'ab' .* 'bc' in the draft",
        ),
        (_tokenizer(special=("<end>", "<x>")), "vocabulary: token 6 is absent in the target and '<x>' in the draft"),
        (_tokenizer(merges=MERGES[::-1]), r"merges: merge 0 is 'a \+ b' in the target and 'b \+ c' in the draft"),
        (_tokenizer(merges=MERGES[:1]), r"merges: merge 1 is 'b \+ c' in the target and absent in the draft"),
        (_tokenizer(special=("<end>", "ab")), r"special tokens: token 3 \('ab'\) is special only in the draft"),
        (_tokenizer(eos=3), r"stop tokens: the target stops at \[5\], the draft at \[3\]"),
        (
            _tokenizer(template="{{ message }}"),
            "chat template: from character 10 on the target has 's }}' and the draft",
        ),
    ],
)
def test_the_first_difference_is_reported(draft: Tokenizer, words: str) -> None:
    target = _tokenizer()
    with pytest.raises(IncompatibleDraft, match=words) as caught:
        check_compatible(target, draft)
    field = next(f for f in ("vocabulary", "merges", "special_tokens", "stop_tokens", "chat_template")
                 if getattr(fingerprint(target), f) != getattr(fingerprint(draft), f))  # fmt: skip
    for tokenizer in (target, draft):
        assert getattr(fingerprint(tokenizer), field) in str(caught.value)


def test_a_padded_vocabulary_limits_what_may_be_proposed() -> None:
    target = read_config(HF)
    assert proposable_ids(target, replace(target, vocab_size=128300)) == range(128256)
    assert proposable_ids(target, replace(target, vocab_size=128000)) == range(128000)
