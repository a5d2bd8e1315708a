"""Tokens as each step adds them. Tokens that were drafted and accepted are marked with [ ].

python examples/streaming.py "Why is the sky blue?"
"""

import sys

from paceline.core.request import SamplingParams
from paceline.core.sequence import Origin
from paceline.engine.start.llm import LLM


def main() -> None:
    question = sys.argv[1] if len(sys.argv) > 1 else "Why is the sky blue?"
    steps = tokens = 0
    with LLM("smollm2", draft="smollm2-eagle") as llm:
        messages = [{"role": "user", "content": question}]
        for output in llm.stream(messages, SamplingParams(temperature=0, max_tokens=64)):
            steps += 1
            tokens += len(output.tokens)
            accepted = any(origin is Origin.ACCEPTED for origin in output.origins)
            print(f"[{output.text}]" if accepted else output.text, end="", flush=True)
    print(f"\n\n{tokens} tokens in {steps} steps")


if __name__ == "__main__":
    main()
