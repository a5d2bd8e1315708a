"""OpenAI's client against a Paceline server.

pip install openai
paceline serve --port 8000                        # in another terminal
python examples/http_client.py http://127.0.0.1:8000/v1
"""

import json
import sys

from openai import OpenAI


def main() -> None:
    base_url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
    client = OpenAI(base_url=base_url, api_key="none")
    model = client.models.list().data[0].id

    # One answer. `speculation` is Paceline's addition: a request may choose less than the server offers.
    messages = [{"role": "user", "content": "Name three fish."}]
    texts = [
        client.chat.completions.create(
            model=model,
            messages=messages,
            max_tokens=32,
            temperature=0.7,
            seed=1,
            extra_body={"speculation": speculation},
        )
        .choices[0]
        .message.content
        for speculation in ({"max_depth": 4}, {"enabled": False})
    ]
    print(texts[0])
    assert texts[0] == texts[1], "the text is the same with and without speculation"

    # A stream.
    for chunk in client.chat.completions.create(model=model, messages=messages, max_tokens=32, stream=True):
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()

    # An answer that follows a JSON schema.
    schema = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"]}
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "A city, as JSON."}],
        max_tokens=64,
        temperature=0,
        response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": schema}},
    )
    print(json.loads(answer.choices[0].message.content or ""))


if __name__ == "__main__":
    main()
