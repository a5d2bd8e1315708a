"""The loop, step by step: what comes out of it, who shares what, and that nothing is left behind."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from paceline.core.errors import InvalidRequest
from paceline.core.request import Request, SamplingParams, SpeculationFlags
from paceline.core.sequence import FinishReason, Origin
from paceline.engine.engine import Engine
from paceline.engine.start.build import engine_of_parts
from paceline.engine.step.step import HostReason
from paceline.speculation.proposer import Proposer
from tests.engine.harness import (
    GREEDY,
    LONG,
    MODEL,
    PROMPT,
    SAMPLED,
    assert_nothing_held,
    counting,
    engine_of,
    oracle,
    oracle_tree,
    outputs_of,
    plain_tokens,
    request,
    tokens_of,
)
from tests.exactness.suite import mixed_requests, next_logits, plain_text
from tests.fakes import (
    TINY,
    MixedDepth,
    draft_model,
    random_chain,
    random_tree,
    tiny_model,
)

PLAIN, ACCEPTED, RECOVERED, BONUS = Origin.PLAIN, Origin.ACCEPTED, Origin.RECOVERED, Origin.BONUS


# --- what a step says


def test_plain_decoding_is_one_plain_token_a_step() -> None:
    outputs = outputs_of(engine_of(), request("r", PROMPT, max_tokens=5, **GREEDY))
    assert [output.origins for output in outputs] == [(PLAIN,)] * 5
    assert {(output.drafted, output.accepted) for output in outputs} == {(0, 0)}
    assert [output.finish_reason for output in outputs] == [None] * 4 + [FinishReason.LENGTH]


def test_a_right_draft_gives_depth_plus_one_tokens_a_step() -> None:
    text = plain_tokens(max_tokens=9, **SAMPLED)
    outputs = outputs_of(engine_of(oracle(text), depth=3), request("r", PROMPT, max_tokens=9, **SAMPLED))
    assert [o.origins for o in outputs] == [(PLAIN,), (ACCEPTED,) * 3 + (BONUS,), (ACCEPTED,) * 3 + (BONUS,)]
    assert [(o.drafted, o.accepted) for o in outputs] == [(0, 0), (3, 3), (3, 3)]
    assert tokens_of(outputs) == text


def test_the_first_wrong_draft_is_recovered() -> None:
    text = plain_tokens(max_tokens=12, **SAMPLED)
    outputs = outputs_of(engine_of(oracle(text, wrong=(3, 4)), depth=4), request("r", PROMPT, max_tokens=12, **SAMPLED))
    assert [o.origins for o in outputs[:3]] == [(PLAIN,), (ACCEPTED,) * 2 + (RECOVERED,), (RECOVERED,)]
    assert [(o.drafted, o.accepted) for o in outputs[:3]] == [(0, 0), (4, 2), (4, 0)]
    assert tokens_of(outputs) == text


def test_the_right_path_of_a_tree_is_accepted_and_moved_into_place() -> None:
    text = plain_tokens(max_tokens=24, **SAMPLED)
    outputs = outputs_of(engine_of(oracle_tree(text), depth=6), request("r", PROMPT, max_tokens=24, **SAMPLED))
    assert [o.origins for o in outputs[:5]] == [(PLAIN,), *[(ACCEPTED,) * 3 + (BONUS,)] * 4]
    assert [(o.drafted, o.accepted) for o in outputs[:5]] == [(0, 0), *[(6, 3)] * 4]
    assert tokens_of(outputs) == text


def test_blocks_of_rejected_drafts_are_given_back_in_the_same_step() -> None:
    engine = engine_of(random_chain(TINY.vocab_size), depth=30)
    engine.add(request("r", PROMPT, max_tokens=40))
    for _ in range(12):
        engine.step()
        (sequence,) = engine.scheduler.running
        held = engine.scheduler.tables.capacity(sequence.id)
        assert sequence.num_computed <= held < sequence.num_computed + 16


def test_steps_cover_every_running_sequence() -> None:
    engine = engine_of()
    for name in "abc":
        engine.add(request(name, PROMPT, max_tokens=3))
    assert [[o.request_id for o in engine.step()] for _ in range(3)] == [["a", "b", "c"]] * 3
    assert not engine.has_work
    assert engine.step() == []


# --- log-probabilities


@pytest.mark.parametrize("proposer", [None, "right", "sometimes", "tree"])
@pytest.mark.parametrize(
    "sampling", [GREEDY, SAMPLED, {"temperature": 0.7, "top_k": 4, "seed": 1, "repetition_penalty": 1.4}]
)
def test_logprobs_are_the_models_own(proposer: str | None, sampling: dict[str, Any]) -> None:
    sampling = {**sampling, "max_tokens": 12}
    made: dict[str | None, Callable[[], Proposer | None]] = {
        None: lambda: None,
        "right": lambda: draft_model(MODEL),
        "sometimes": lambda: draft_model(tiny_model(perturb=0.3)),
        "tree": lambda: oracle_tree(plain_tokens(**sampling)),
    }
    outputs = outputs_of(engine_of(made[proposer](), depth=6), request("r", PROMPT, logprobs=3, **sampling))
    ids = list(PROMPT)
    for output in outputs:
        assert output.logprobs is not None
        assert [entry.token for entry in output.logprobs] == list(output.tokens)
        for entry in output.logprobs:
            expected = next_logits(MODEL, ids).log_softmax(0)
            assert entry.logprob == pytest.approx(float(expected[entry.token]), abs=1e-5)
            best = expected.topk(3)
            assert [token for token, _ in entry.top] == best.indices.tolist()
            assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=1e-5)
            ids.append(entry.token)
    assert len(ids) == len(PROMPT) + 12


def test_no_logprobs_unless_asked_and_none_beside_the_token_for_0() -> None:
    assert {o.logprobs for o in outputs_of(engine_of(), request("r", PROMPT, max_tokens=2))} == {None}
    (output,) = outputs_of(engine_of(), request("r", PROMPT, max_tokens=1, logprobs=0))
    assert output.logprobs is not None
    assert output.logprobs[0].top == ()


# --- choices, prefixes, priorities


@pytest.mark.parametrize("drafts", [False, True])
def test_choices_share_the_prompt(drafts: bool) -> None:
    engine = engine_of(draft_model(MODEL) if drafts else None)
    passes = counting(engine.runner)
    outputs = outputs_of(engine, request("r", LONG, max_tokens=8, seed=9, n=4))
    cached = {o.choice: o.num_cached for o in outputs}
    assert cached == {0: 0, 1: 32, 2: 32, 3: 32}  # the last token at least is computed, so the last block is
    prefill = [len(span.tokens) for spans in passes for span in spans if span.context_len < 47 and len(span.tokens) > 8]
    assert prefill == [48, 16, 16, 16]


def test_choices_are_separate_texts_of_one_seed() -> None:
    outputs = outputs_of(engine_of(draft_model(tiny_model(perturb=0.2))), request("r", LONG, max_tokens=8, seed=9, n=4))
    texts = [tokens_of(outputs, choice=choice) for choice in range(4)]
    for choice, text in enumerate(texts):
        engine = engine_of()
        engine.add(request("r", LONG, max_tokens=8, seed=9))
        engine.requests.sequences["r"][0].choice = choice
        alone = outputs_of(engine)
        assert tokens_of(alone, choice=choice) == text
    assert len({tuple(text) for text in texts}) > 1


def test_choices_end_one_by_one() -> None:
    engine = engine_of()
    engine.add(request("r", PROMPT, max_tokens=30, seed=1, n=3, stop_token_ids=(4, 17, 23)))
    ended = []
    while engine.has_work:
        for output in engine.step():
            if output.finish_reason:
                ended.append(output.choice)
        if len(ended) < 3:
            with pytest.raises(InvalidRequest, match="already running"):
                engine.add(request("r", PROMPT))
    assert sorted(ended) == [0, 1, 2]
    assert_nothing_held(engine)


def test_num_cached_counts_what_the_prefix_cache_supplied() -> None:
    engine = engine_of(max_model_len=256)
    first = outputs_of(engine, request("a", LONG, max_tokens=20, **GREEDY))
    assert {o.num_cached for o in first} == {0}
    assert {o.num_cached for o in outputs_of(engine, request("b", LONG, max_tokens=3))} == {32}
    # the next turn of the conversation: prompt and answer are both there, but for the token computed last
    turn = (*LONG, *tokens_of(first, "a"), 1, 2, 3)
    assert {o.num_cached for o in outputs_of(engine, request("c", turn, max_tokens=3))} == {64}


def test_other_salts_and_no_caching_share_nothing() -> None:
    engine = engine_of()
    for salt in ("", "one", "two"):
        salted = Request(f"r{salt}", LONG, SamplingParams(max_tokens=2), cache_salt=salt)
        assert {o.num_cached for o in outputs_of(engine, salted)} == {0}
    engine = engine_of(prefix_caching=False)
    for name in "ab":
        assert {o.num_cached for o in outputs_of(engine, request(name, LONG, max_tokens=2))} == {0}


def test_priority_comes_before_arrival() -> None:
    engine = engine_of(max_num_seqs=1)
    for name, priority in (("a", 5), ("b", 0), ("c", 5), ("d", -1)):
        engine.add(engine.validate(Request(name, PROMPT, SamplingParams(max_tokens=2), priority=priority)))
    assert list(dict.fromkeys(o.request_id for o in outputs_of(engine))) == ["d", "b", "a", "c"]


# --- cancellation and identity


def waiting(engine: Engine) -> None:
    for name in ("x", "y"):
        engine.add(request(name, PROMPT, max_tokens=40, ignore_eos=True))
    engine.add(request("r", LONG))
    engine.step()
    assert engine.requests.sequences["r"][0] in engine.scheduler.waiting


def prefilling(engine: Engine) -> None:
    engine.add(request("r", LONG * 2))
    assert engine.step() == []
    assert engine.requests.sequences["r"][0].num_computed > 0


def decoding(engine: Engine) -> None:
    engine.add(request("r", LONG, ignore_eos=True))
    for _ in range(6):
        engine.step()
    assert engine.requests.sequences["r"][0].num_output > 4


def siblings_waiting(engine: Engine) -> None:
    engine.add(request("r", LONG, n=4, seed=1))
    engine.step()
    assert [s in engine.scheduler.running for s in engine.requests.sequences["r"]] == [True, False, False, False]


def siblings_decoding(engine: Engine) -> None:
    engine.add(request("r", PROMPT, n=2, seed=1, ignore_eos=True))
    for _ in range(3):
        engine.step()
    assert all(s.num_output for s in engine.requests.sequences["r"])


@pytest.mark.parametrize("stage", [waiting, prefilling, decoding, siblings_waiting, siblings_decoding])
def test_cancelling_frees_everything_at_once(stage: Callable[[Engine], None]) -> None:
    draft = draft_model(tiny_model(perturb=0.2))
    engine = engine_of(draft, depth=3, max_num_seqs=2, max_batched_tokens=40, tokenizer=True)
    stage(engine)
    held = engine.requests.sequences["r"]
    for name in ("r", "x", "y"):
        engine.cancel(name)
    assert_nothing_held(engine)
    assert not engine.has_work
    assert {sequence.finish_reason for sequence in held} == {FinishReason.CANCELLED}
    assert engine.step() == []
    engine.cancel("r")  # again, and what never was
    engine.cancel("unknown")
    assert tokens_of(outputs_of(engine, request("r", LONG, max_tokens=6, ignore_eos=True, **SAMPLED))) == plain_tokens(
        LONG, max_tokens=6, **SAMPLED
    )


def test_cancelling_leaves_the_others_alone() -> None:
    engine = engine_of(draft_model(tiny_model(perturb=0.2)))
    for name, seed in (("a", 1), ("b", 2)):
        engine.add(request(name, LONG, max_tokens=12, seed=seed))
    outputs = [o for _ in range(3) for o in engine.step()]
    engine.cancel("a")
    outputs += outputs_of(engine)
    assert tokens_of(outputs, "b") == plain_tokens(LONG, max_tokens=12, seed=2)
    assert len(tokens_of(outputs, "a")) < 12


def test_an_id_is_taken_until_its_request_is_done() -> None:
    engine = engine_of()
    engine.add(request("r", PROMPT, max_tokens=2, **SAMPLED))
    with pytest.raises(InvalidRequest, match="already running") as error:
        engine.add(request("r", LONG))
    assert error.value.field == "id"
    first = tokens_of(outputs_of(engine))
    assert first == tokens_of(outputs_of(engine, request("r", PROMPT, max_tokens=2, **SAMPLED)))


# --- the switch


def test_the_switch_allocates_nothing() -> None:
    draft = draft_model(tiny_model(perturb=0.2), num_blocks=24)
    engine = engine_of(draft, depth=4, kv_tokens=512)
    engine.flags.apply(SpeculationFlags(enabled=False))
    caches = [values for runner in (engine.runner, draft.drafter.runner) for layer in runner.cache for values in layer]
    places = [(values.data_ptr(), values.shape) for values in caches]
    passes = counting(draft.drafter.runner)
    engine.add(request("r", LONG, max_tokens=40, **SAMPLED))
    outputs = [o for _ in range(5) for o in engine.step()]
    assert (passes, draft.num_free_blocks) == ([], 24)
    engine.flags.apply(SpeculationFlags())  # as configured: on
    outputs += [o for _ in range(3) for o in engine.step()]
    assert passes
    engine.flags.apply(SpeculationFlags(enabled=False))
    num_passes = len(passes)
    outputs += outputs_of(engine)
    assert len(passes) == num_passes
    assert tokens_of(outputs) == plain_tokens(LONG, max_tokens=40, **SAMPLED)
    assert [(values.data_ptr(), values.shape) for values in caches] == places
    assert (draft.drafter.runner.num_blocks, engine.scheduler.tables.pool.num_blocks) == (24, 32)


# --- all of it at once


@pytest.mark.parametrize("seed", range(8))
def test_anything_at_any_time(seed: int) -> None:
    """StreamedWeights, cancellations, priorities, salts, preemptions and flags in random order: every text is the plain one."""
    rng = random.Random(seed)
    close_draft = tiny_model(perturb=0.2)
    proposer = (draft_model(close_draft, rng.choice((8, 64)), rng.choice((8, 64))), random_tree(TINY.vocab_size))
    engine = engine_of(
        proposer[seed % 2],
        MixedDepth(rng.choice((3, 8, 20)), seed),
        kv_tokens=16 * rng.choice((11, 16, 64)),
        max_num_seqs=rng.choice((2, 8)),
        max_batched_tokens=rng.choice((8, 64)),
        max_model_len=160,
    )
    requests = [
        replace(one, priority=rng.choice((0, 0, 1)), cache_salt=rng.choice(("", "salt")))
        for one in mixed_requests(10, TINY.vocab_size, seed, max_tokens=rng.choice((10, 50)))
    ]
    expected, cancelled = plain_text(MODEL, requests), set()
    tokens: dict[tuple[str, int], list[int]] = {key: [] for key in expected}
    pending = list(requests)
    while pending or engine.has_work:
        if pending and rng.random() < 0.5:
            engine.add(engine.validate(pending.pop(0)))
        if engine.requests.sequences and rng.random() < 0.04:
            cancelled.add(doomed := rng.choice(list(engine.requests.sequences)))
            engine.cancel(doomed)
        if rng.random() < 0.1:
            engine.flags.apply(SpeculationFlags(enabled=rng.random() < 0.6, max_depth=rng.choice((None, 2))))
        for output in engine.step():
            assert output.request_id not in cancelled
            tokens[output.request_id, output.choice].extend(output.tokens)
        engine.scheduler.tables.pool.check()
    for key, text in tokens.items():
        assert text == expected[key][: len(text)]
        assert len(text) == len(expected[key]) or key[0] in cancelled
    assert_nothing_held(engine)


def test_warm_up_does_nothing_while_a_request_runs() -> None:
    warmed: list[bool] = []

    class Graphs:
        num_inflight, is_loaded = 0, False

        def schedule(self, can_prefill: bool) -> HostReason:
            return HostReason.PREFILL

        def yield_to_host(self) -> None:
            pass

        def warm_up(self) -> None:
            warmed.append(engine.has_work)

    built = engine_of()
    graph: Any = Graphs()
    engine = engine_of_parts(
        built.runner, built.scheduler, built.speculator, built.validator, clock=built.clock, graph=graph
    )
    engine.add(request("r", PROMPT, max_tokens=2))
    engine.warm_up()
    assert warmed == []
    while engine.has_work:
        engine.step()
    engine.warm_up()
    assert warmed == [False]
    assert engine.executors.counts == {HostReason.PREFILL: 2}
