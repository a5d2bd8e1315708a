"""A batch of prompts, generated with and without speculation. The text is the same; only the number of steps differs.

python examples/offline.py
"""

from paceline.core.request import SamplingParams
from paceline.engine.start.llm import LLM

PROMPTS = [
    "List the numbers from one to twenty in words: one, two, three,",
    "Write a Python function that returns the sum of a list.",
    "The quick brown fox jumps over the lazy dog. Repeat: The quick brown fox",
]


def main() -> None:
    greedy = SamplingParams(temperature=0, max_tokens=48)
    sampling = [greedy, SamplingParams(temperature=0.8, seed=1, max_tokens=48), greedy]
    with LLM("smollm2", draft="smollm2-eagle") as llm:
        speculative = llm.generate(PROMPTS, sampling)
        plain = llm.generate(PROMPTS, sampling, speculation={"enabled": False})
    for prompt, drafted, other in zip(PROMPTS, speculative, plain, strict=True):
        figures = drafted.completions[0].speculation
        print(f"> {prompt}\n{drafted.text.strip()}")
        print(f"  accepted {figures.num_accepted_draft_tokens} of {figures.num_draft_tokens} drafted tokens\n")
        assert drafted.text == other.text
    print("All texts are the same as without speculation.")


if __name__ == "__main__":
    main()
