"""Finds out what kind of server is at a URL."""

from paceline.endpoints.endpoint import Endpoint
from paceline.endpoints.http_client import EndpointFailed, HttpClient
from paceline.endpoints.servers.llama_cpp import LlamaCppEndpoint, LlamaCppPythonEndpoint
from paceline.endpoints.servers.openai import OpenAIEndpoint
from paceline.endpoints.servers.paceline import PacelineEndpoint
from paceline.endpoints.servers.vllm import VllmEndpoint

OWNERS: dict[str, type[Endpoint]] = {
    "paceline": PacelineEndpoint,
    "vllm": VllmEndpoint,
    "llamacpp": LlamaCppEndpoint,
    "me": LlamaCppPythonEndpoint,
}
"""Kinds of servers by `owned_by` in their list of models."""


async def find_endpoint(client: HttpClient, model: str | None = None, tokenizer: Endpoint | None = None) -> Endpoint:
    """The endpoint at the client's URL. `model` is the model to use. If it is None, the first that the server lists is used.
    `tokenizer` is the endpoint that makes tokens of the text of a server without routes for them."""
    listed = await client.get("/v1/models")
    try:
        models = {entry["id"]: entry for entry in listed["data"]}
    except (KeyError, TypeError):
        raise EndpointFailed(f"{client.url}/v1/models is not OpenAI's API: {str(listed)[:200]}") from None
    name = model or next(iter(models), None)
    if name not in models:
        served = ", ".join(models) or "none"
        raise EndpointFailed(f"{client.url} does not serve the model {name!r}; it serves: {served}")
    assert name is not None
    entry = models[name]
    kind = OWNERS.get(str(entry.get("owned_by")))
    if kind is not None:
        return kind(client, name, entry.get("max_model_len") or (entry.get("meta") or {}).get("n_ctx"))
    if tokenizer is None:
        raise EndpointFailed(
            f"{client.url} is no server whose drafts can be verified: the target must be Paceline or vLLM"
        )
    return OpenAIEndpoint(client, name, tokenizer)
