"""Eight streams to the gateway of a cluster at once, then the figures of its workers.

paceline serve --config examples/cluster/cluster.yaml     # in another terminal
python examples/cluster/client.py http://127.0.0.1:8000
"""

import asyncio
import sys

import httpx


async def generate(client: httpx.AsyncClient, number: int) -> int:
    body = {
        "messages": [{"role": "user", "content": f"Tell me something about the number {number}."}],
        "max_tokens": 32,
        "speculation": {"method": "pool"},
    }
    response = await client.post("/v1/chat/completions", json=body)
    response.raise_for_status()
    answer = response.json()
    figures = answer["metrics"]["speculative_decoding"]
    print(f"{number}: {figures['num_accepted_draft_tokens']} of {figures['num_draft_tokens']} drafts accepted")
    return int(answer["usage"]["completion_tokens"])


async def main() -> None:
    url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        tokens = await asyncio.gather(*(generate(client, number) for number in range(8)))
        workers = (await client.get("/v1/paceline/overview")).json()["workers"]
    print(f"{sum(tokens)} tokens from {len(workers)} workers:")
    for worker in workers:
        print(f"  {worker['name']}: {worker['role']}, {worker['state']}")


if __name__ == "__main__":
    asyncio.run(main())
