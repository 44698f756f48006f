"""What to give instead of keywords and options that vLLM and SGLang take, and lightkv does not."""

import difflib
from collections.abc import Mapping
from dataclasses import fields

from .config import EngineConfig, flag

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
_WEIGHTS = (
    "weights are read as the checkpoint stores them; leave it out (--kv-dtype stores K and V in fewer bits)"
)
_REPLICAS = "a service runs one replica; start several behind a router (docs/using.md, Several replicas)"
# Of engines and services alike.
_REMEDIES = {
    "enable_prefix_caching": f"prefixes are cached to the token, and {_ALWAYS}",
    "no_enable_prefix_caching": "prefixes are always cached, but for requests with skip_reading_prefix_cache",
    "disable_radix_cache": "prefixes are always cached, but for requests with skip_reading_prefix_cache",
    "enable_chunked_prefill": f"prompts are computed in chunks (prefill_chunk), and {_ALWAYS}",
    "block_size": "a page is one token; leave it out",
    "page_size": "a page is one token; leave it out",
    "tokenizer": "the tokenizer is the one in the model's directory; leave it out",
    "tokenizer_path": "the tokenizer is the one in the model's directory; leave it out",
    "trust_remote_code": "code that comes with weights is never run; leave it out",
    "quantization": _WEIGHTS,
    "load_format": _WEIGHTS,
    "swap_space": "K and V stay on the device; leave it out",
    "cpu_offload_gb": "weights stay on the device; leave it out",
    "num_gpu_blocks_override": "the pool is given in tokens: --max-total-tokens",
    "max_mamba_cache_size": "states are given by their bytes over those of K/V: --mamba-full-memory-ratio",
}
_ONE_GPU = "an LLM runs on one GPU; leave it out, or start lightkv serve --tensor-parallel N"
_OF_AN_LLM = {
    "tensor_parallel_size": _ONE_GPU,
    "tp_size": _ONE_GPU,
    "seed": "give each call its own: SamplingParams(seed=…)",
    "disable_log_stats": "nothing is logged; llm.stats() returns the counts; leave it out",
}
# Of `lightkv serve` alone, as are the remedies below.
_RENAMED_OPTIONS = {
    "tensor_parallel_size": "tensor_parallel",
    "tp_size": "tensor_parallel",
    "tp": "tensor_parallel",
    "tool_call_parser": "tool_parser",
    "api_keys_file": "api_key_file",
    "generation_config": "sampling_defaults",
    "enable_log_requests": "log_requests",
    "otlp_traces_endpoint": "otlp_endpoint",
    "kv_events_config": "kv_events",
    "uvicorn_log_level": "log_level",
    "enable_cache_report": "report_cached_tokens",
    "enable_prompt_tokens_details": "report_cached_tokens",
}
_OF_A_SERVICE = {
    "enable_auto_tool_choice": f"requests with tools get calls, and {_ALWAYS}",
    "enable_metrics": f"/metrics answers, and {_ALWAYS}",
    "pipeline_parallel_size": "layers are not divided among GPUs; --tensor-parallel divides heads",
    "data_parallel_size": _REPLICAS,
    "dp_size": _REPLICAS,
    "seed": "each request gives its own seed",
    "random_seed": "each request gives its own seed",
    "disable_log_stats": "nothing is logged by itself; /metrics has the counts; leave it out",
    "disable_log_requests": "requests are logged only with --log-requests; leave it out",
    "enable_lora": "adapters cannot be chosen by request; serve a model into which they are merged",
    "speculative_config": "answers are not drafted; leave it out",
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
        elif remedy := (_REMEDIES | _OF_AN_LLM).get(name):
            remedies.append(f"{name}: {remedy}")
        else:
            near = difflib.get_close_matches(name, names, 1)
            remedies.append(f"{name}: there is no such setting{f'; is it {near[0]}?' if near else ''}")
    call = ", ".join(f"{name}={value}" for name, value in settings.items())
    shown = f"LLM(EngineConfig({call}))" if len(settings) > 1 else f"LLM({model})"
    return TypeError("; ".join([f"settings of an LLM are given as an EngineConfig: {shown}", *remedies]))


def unknown_option(option: str) -> str | None:
    """Returns what to give instead of an option of vLLM's or SGLang's server; None if it is not known as one.

    `option`: with the dashes before it or without.
    """
    name = option.lstrip("-").replace("-", "_")
    if ours := (_RENAMED | _RENAMED_OPTIONS).get(name):
        return f"it is {flag(ours)} here"
    if ours := _OPPOSITE.get(name):
        return f"it is --no-{flag(ours)[2:]} here, and in a file {flag(ours)[2:]} = false"
    return (_REMEDIES | _OF_A_SERVICE).get(name)
