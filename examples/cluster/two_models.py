"""Asks both models of examples/cluster/two_models.yaml through every gateway, and checks that gateways give the same text.

python examples/cluster/two_models.py http://127.0.0.1:8000 http://127.0.0.1:8001
"""

import sys

import httpx


def ask(client: httpx.Client, model: str) -> str:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "Name three colours."}],
        "max_tokens": 24,
        "temperature": 0.7,
        "seed": 1,
        "speculation": {"method": "pool"},
    }
    response = client.post("/v1/chat/completions", json=body)
    response.raise_for_status()
    return str(response.json()["choices"][0]["message"]["content"])


def main() -> None:
    urls = sys.argv[1:] or ["http://127.0.0.1:8000"]
    texts: dict[str, set[str]] = {}
    for url in urls:
        with httpx.Client(base_url=url, timeout=120) as client:
            for model in [entry["id"] for entry in client.get("/v1/models").json()["data"]]:
                text = ask(client, model)
                texts.setdefault(model, set()).add(text)
                print(f"{url} {model}: {text!r}")
            unknown = client.post("/v1/completions", json={"model": "unknown", "prompt": "Hello"})
            print(f"{url} unknown: {unknown.status_code} {unknown.json()['error']['code']}")
    same = all(len(answers) == 1 for answers in texts.values())
    print(f"{len(texts)} models, {len(urls)} gateways: {'the same texts' if same else 'DIFFERENT TEXTS'}")


if __name__ == "__main__":
    main()
