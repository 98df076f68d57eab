"""Every route of the public port, and which way what comes there can go.

    disaggregated   prefill on one worker, decode on another, where the request allows it
    colocated       whole to one worker, always
    unsupported     known from other servers, not served here: 404 with a reason, never half served

What is not in the table is 404 as well.
"""

from enum import StrEnum


class Way(StrEnum):
    DISAGGREGATED = "disaggregated"
    COLOCATED = "colocated"
    UNSUPPORTED = "unsupported"


class Endpoint(StrEnum):
    """What is asked for, whatever the route is called."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    EMBEDDINGS = "embeddings"
    POOLING = "pooling"
    CLASSIFY = "classify"
    RERANK = "rerank"
    SCORE = "score"
    TOKENIZE = "tokenize"
    DETOKENIZE = "detokenize"


PATHS: dict[Endpoint, str] = {
    Endpoint.CHAT: "/v1/chat/completions",
    Endpoint.COMPLETIONS: "/v1/completions",
    Endpoint.EMBEDDINGS: "/v1/embeddings",
    Endpoint.POOLING: "/pooling",
    Endpoint.CLASSIFY: "/classify",
    Endpoint.RERANK: "/v1/rerank",
    Endpoint.SCORE: "/v1/score",
    Endpoint.TOKENIZE: "/tokenize",
    Endpoint.DETOKENIZE: "/detokenize",
}
"""Where an engine serves it: vLLM's names, which the others share as far as they serve the thing at all."""

ALIASES: dict[str, Endpoint] = {
    "/rerank": Endpoint.RERANK,
    "/v2/rerank": Endpoint.RERANK,
    "/score": Endpoint.SCORE,
}

ROUTES: dict[str, Endpoint] = {path: endpoint for endpoint, path in PATHS.items()} | ALIASES

WAYS: dict[Endpoint, Way] = {
    endpoint: Way.DISAGGREGATED if endpoint in (Endpoint.CHAT, Endpoint.COMPLETIONS) else Way.COLOCATED for endpoint in Endpoint
}

UNSUPPORTED: dict[str, str] = {
    "/v1/responses": "its answers are kept by one engine and asked for again",
    "/v1/messages": "it is another vendor's protocol",
    "/v1/chat/completions/batch": "it is many requests in one",
    "/v1/batches": "it is many requests in one",
    "/v1/audio/transcriptions": "it takes a form and not JSON",
    "/v1/audio/translations": "it takes a form and not JSON",
    "/v1/audio/speech": "it answers with sound",
    "/v1/images/generations": "it answers with images",
    "/v1/files": "it keeps files",
    "/v1/fine_tuning/jobs": "it trains",
    "/v1/moderations": "no engine here serves it",
    "/v1/load_lora_adapter": "it changes an engine: ask the engine itself",
    "/v1/unload_lora_adapter": "it changes an engine: ask the engine itself",
    "/generate": "it is an engine's own protocol",
    "/invocations": "it is another name for all the routes at once",
    "/inference/v1/generate": "it is an engine's own protocol",
}
"""Routes that people will try, and why they are not here."""


def why_unsupported(path: str) -> str | None:
    """The reason for a route that is declared unsupported, or one below it; None for one that nobody knows."""
    return next((why for known, why in UNSUPPORTED.items() if path == known or path.startswith(f"{known}/")), None)
