"""dspy: a prompt over the context is its ContextWindowExceededError, for a chat, a completion and a module."""

import os
from functools import partial

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else its import waits for a file of prices from GitHub

import dspy
from checks import Service, main
from dspy.utils.exceptions import ContextWindowExceededError


def over_the_context(service: Service) -> None:
    text = "long " * 10_000
    for kind in ("chat", "text"):
        model = dspy.LM(
            f"openai/{service.model}",
            api_base=service.url,
            api_key=service.key,
            model_type=kind,
            max_tokens=50,
            num_retries=0,
            cache=False,
        )
        with dspy.context(lm=model):
            for call in (partial(model, text), partial(dspy.Predict("question -> answer"), question=text)):
                message = ""
                try:
                    call()
                except ContextWindowExceededError as error:
                    message = str(error)
                assert "maximum context length is 8192 tokens" in message


main({"tiny": [over_the_context]})
