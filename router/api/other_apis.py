"""Paths of APIs that other servers have and this one does not, with what to use in their place."""

_CHAT = "send a chat to /v1/chat/completions"
_PLAIN = "send the prompt to /v1/completions"
_MODELS = "GET /v1/models has the models"
_EMBEDS = (
    "this service generates text; send this to a service of an embedding model, such as Text Embeddings "
    "Inference, Infinity or vLLM"
)
_SCORES = "this service generates text; send this to a service of a reranker or classifier"
_TEXT_ONLY = "this service takes and generates text only"
_KEEPS_NOTHING = (
    "this service keeps no files, conversations or jobs; send each request with all that it needs to "
    "/v1/chat/completions or /v1/completions"
)


def _each(paths: str, instead: str) -> dict[str, str]:
    return dict.fromkeys(paths.split(), instead)


# A path stands for all paths below it, too.
_INSTEAD = {
    **_each("/v1/embeddings /embed /embeddings /api/embed /api/embeddings /pooling /v1/pooling", _EMBEDS),
    **_each("/rerank /v1/rerank /v2/rerank /score /v1/score /classify /v1/classify", _SCORES),
    **_each("/v1/moderations", "this service generates text, and moderates none"),
    **_each("/v1/audio /v1/images /v1/videos /v1/realtime", _TEXT_ONLY),
    **_each("/v1/files /v1/uploads /v1/batches /v1/vector_stores /v1/conversations", _KEEPS_NOTHING),
    **_each("/v1/responses /v1/chat/completions /v1/messages /v1/assistants /v1/threads", _KEEPS_NOTHING),
    **_each("/v1/fine_tuning /v1/evals", "this service runs a model, and neither trains nor rates one"),
    **_each("/v1/load_lora_adapter /v1/unload_lora_adapter", "this service has one model, without adapters"),
    **_each("/api/chat", _CHAT),
    **_each("/api/generate /generate /generate_stream /completion /v1/complete /v1/engines", _PLAIN),
    **_each("/api/tags /api/show /api/ps", _MODELS),
    **_each("/infill", "send prompt and suffix to /v1/completions"),
}


def not_found(path: str) -> str:
    """Returns the message for a path that the service does not have."""
    for known, instead in _INSTEAD.items():
        if path == known or path.startswith(f"{known}/"):
            return f"{path[:100]} does not exist here: {instead}"
    return f"{path[:100]} does not exist here; GET /docs lists the routes"
