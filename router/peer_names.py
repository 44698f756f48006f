"""The errors for keywords that vLLM's and SGLang's engines take and `LLM` does not: what to give instead."""

import difflib
from collections.abc import Mapping
from dataclasses import fields

from .config import EngineConfig

# Settings of the same meaning under another name.
_RENAMED = {
    "model_path": "model",
    "gpu_memory_utilization": "mem_fraction",
    "mem_fraction_static": "mem_fraction",
    "kv_cache_dtype": "kv_dtype",
    "context_length": "max_model_len",
    "max_running_requests": "max_num_seqs",
    "max_num_batched_tokens": "prefill_chunk",
    "chunked_prefill_size": "prefill_chunk",
}
# Settings that switch off what a setting here switches on.
_OPPOSITE = {"enforce_eager": "cuda_graphs", "disable_cuda_graph": "cuda_graphs"}
_ALWAYS = "it is always so; leave it out"
_ONE_GPU = "an LLM runs on one GPU; leave it out, or start lightkv serve --tensor-parallel N"
_REMEDIES = {
    "tensor_parallel_size": _ONE_GPU,
    "tp_size": _ONE_GPU,
    "enable_prefix_caching": f"prefixes are cached to the token, and {_ALWAYS}",
    "enable_chunked_prefill": f"prompts are computed in chunks (prefill_chunk), and {_ALWAYS}",
    "block_size": "a page is one token; leave it out",
    "page_size": "a page is one token; leave it out",
    "tokenizer": "the tokenizer is the one in the model's directory; leave it out",
    "trust_remote_code": "code that comes with weights is never run; leave it out",
    "seed": "give each call its own: SamplingParams(seed=…)",
    "disable_log_stats": "nothing is logged; llm.stats() returns the counts; leave it out",
}
_OF_A_CALL = {
    "params": "its name is sampling_params",
    "prompt_token_ids": "token ids are prompts, too: generate([[1, 2, 3]])",
    "use_tqdm": "no progress bar is drawn; leave it out",
    "lora_request": "adapters cannot be chosen by call; load a model into which they are merged",
    "chat_template": "it is the model's own; give the token ids of "
    "llm.tokenizer.render_chat(messages, template=…) to generate for another one",
    "tools": "give the token ids of llm.tokenizer.render_chat(messages, tools=…) to generate, or use lightkv "
    "serve, which reads the calls of the answer, too",
    "add_generation_prompt": "chats are ended with the words that begin an answer; give the token ids of "
    "llm.tokenizer.render_chat(messages, add_generation_prompt=False) to generate for one that is not",
}


def unknown_setting(model: str, given: Mapping[str, object]) -> TypeError:
    """Returns the error for an `LLM` that is given settings as keywords. It shows the EngineConfig to give."""
    names = [field.name for field in fields(EngineConfig)]
    settings, remedies = {"model": model}, []
    for name, value in given.items():
        if name in names or name in _RENAMED:
            settings[_RENAMED.get(name, name)] = repr(value)
        elif name in _OPPOSITE:
            settings[_OPPOSITE[name]] = repr(not value)
        elif name in _REMEDIES:
            remedies.append(f"{name}: {_REMEDIES[name]}")
        else:
            near = difflib.get_close_matches(name, names, 1)
            remedies.append(f"{name}: there is no such setting{f'; is it {near[0]}?' if near else ''}")
    call = ", ".join(f"{name}={value}" for name, value in settings.items())
    shown = f"LLM(EngineConfig({call}))" if len(settings) > 1 else f"LLM({model})"
    return TypeError("; ".join([f"settings of an LLM are given as an EngineConfig: {shown}", *remedies]))


def unknown_keyword(call: str, given: Mapping[str, object], known: str) -> TypeError:
    """Returns the error for a call of `LLM` with other keywords than `known`."""
    unheard = "there is no such argument; if it is about sampling, it is a field of SamplingParams"
    remedies = [f"{name}: {_OF_A_CALL.get(name, unheard)}" for name in given]
    return TypeError("; ".join([f"{call} takes {known}", *remedies]))
