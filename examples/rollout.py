"""Reinforcement learning on policy with speculation on: rollouts, a policy gradient, new weights in the running engine.

    python examples/rollout.py --rounds 3

Every round samples answers with drafts and keeps the log-probabilities of decoding. One scoring pass over the finished texts
gives the same ones bit for bit, so the importance ratio of the first update is exactly 1. The reward of a token is 1 if it has
the letter e. The update changes the final norm alone, so that it takes seconds; a trainer would write all weights.
`LLM.change_weights` puts them in use between two steps, as `POST /admin/weights` does on a server.
"""

import argparse
import tempfile
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline import LLM, SamplingParams
from paceline.core.output import Generation
from paceline.engine import StepHook
from paceline.model_files.hub import find_checkpoint
from paceline.models.loading import open_checkpoint

PROMPTS = (
    "Tell me about your day.",
    "What do you think of my idea?",
    "Say hello to my friend Ann.",
    "How was the party?",
)
CHOICES, TOKENS = 4, 16
DRAFTING = {"depth": "fixed", "max_depth": 2, "breaker_rounds": 10**9}
"""Drafts in every round, also where they do not pay."""
STEP = 0.01
"""Length of an update, as a share of the length of the weights."""


class FinalStates(StepHook):
    """Keeps the hidden states before the final norm of every computed token, by request."""

    def __init__(self, num_layers: int) -> None:
        self._layer = num_layers
        self.states: dict[str, list[Tensor]] = defaultdict(list)
        self.is_recording = False

    def hidden_layers(self, schedule: Any) -> Collection[int]:
        return (self._layer,) if self.is_recording else ()

    def after_pass(self, schedule: Any, drafts: Mapping[int, Any], output: Any) -> None:
        if self.is_recording:
            row = 0
            for item in schedule.items:
                states = output.hidden_by_layer[self._layer][row : row + item.num_tokens]
                self.states[item.sequence.request_id].append(states.clone())
                row += item.num_tokens


def rollouts(llm: LLM) -> list[Generation]:
    """Sampled answers, with the log-probabilities that decoding reports. The seeds are those of the round before, so that a
    change of the reward comes from the weights."""
    conversations = [[{"role": "user", "content": prompt}] for prompt in PROMPTS for _ in range(CHOICES)]
    sampling = [
        SamplingParams(temperature=1.0, seed=i, max_tokens=TOKENS, logprobs=0) for i in range(len(conversations))
    ]
    return llm.generate(conversations, sampling)


def score(llm: LLM, texts: Sequence[Generation], hook: FinalStates) -> list[tuple[Tensor, list[int], list[float]]]:
    """Hidden states, tokens and log-probabilities of every output, from one pass over the finished text."""
    ids = [[*text.prompt_token_ids, *text.completions[0].token_ids] for text in texts]
    hook.is_recording = True
    scored = llm.generate(ids, SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0))
    hook.is_recording = False
    found = []
    for text, again in zip(texts, scored, strict=True):
        first, states = len(text.prompt_token_ids) - 1, torch.cat(hook.states.pop(again.request_id))
        tokens = list(text.completions[0].token_ids)
        values = [entry.logprob for entry in again.prompt_logprobs or ()][first:]
        found.append((states[first : first + len(tokens)], tokens, values))
    return found


def update(norm: Tensor, head: Tensor, eps: float, hidden: Tensor, tokens: Sequence[int], gains: Tensor) -> Tensor:
    """The final norm after a step along the gradient of the expected reward."""
    normed = hidden / (hidden.square().mean(1, keepdim=True) + eps).sqrt()
    weight = norm.clone().requires_grad_()
    logprobs = ((normed * weight) @ head.T).log_softmax(1).gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1)
    (logprobs * gains).mean().backward()
    assert weight.grad is not None
    return norm + STEP * norm.norm() * weight.grad / weight.grad.norm()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    source, checkpoint = find_checkpoint("smollm2"), open_checkpoint("smollm2")
    norm = checkpoint.weights.vector("model.norm.weight").clone()
    head = checkpoint.weights.matrix("model.embed_tokens.weight").dequantize().float()
    data = bytearray(source.read_bytes())
    place = data.index(norm.numpy().tobytes())  # of the final norm in the file
    hook = FinalStates(checkpoint.config.num_layers)
    with (
        tempfile.TemporaryDirectory() as folder,
        LLM("smollm2", draft="smollm2-eagle", speculation=DRAFTING, hooks=(hook,)) as llm,
    ):
        for number in range(rounds):
            texts = rollouts(llm)
            scored = score(llm, texts, hook)
            largest = accepted = 0
            for text, (_, _, values) in zip(texts, scored, strict=True):
                (choice,) = text.completions
                accepted += choice.speculation.num_accepted_draft_tokens
                assert choice.logprobs is not None
                gaps = (abs(entry.logprob - value) for entry, value in zip(choice.logprobs, values, strict=True))
                largest = max(largest, *gaps)
            tokens = [token for _, own, _ in scored for token in own]
            rewards = torch.tensor([float("e" in llm.tokenizer.decode([token])) for token in tokens])
            print(
                f"round {number}: {llm.system_fingerprint}, reward {rewards.mean():.3f}, {accepted} drafts accepted, "
                f"largest difference of a log-probability {largest:g}"
            )
            states = torch.cat([own for own, _, _ in scored])
            norm = update(norm, head, checkpoint.config.rms_eps, states, tokens, rewards - rewards.mean())
            data[place : place + norm.nbytes] = norm.numpy().tobytes()
            new = Path(folder) / f"step-{number}.gguf"
            new.write_bytes(data)
            llm.change_weights(str(new))
            new.unlink()
        (first, *_) = rollouts(llm)
        print(f"after {rounds} updates: {llm.system_fingerprint}, {first.text!r}")


if __name__ == "__main__":
    main()
