"""The request fields of other servers: some have another name here, some are only hints, and some are not
supported by this service.

A value of an unsupported field is accepted if the answer is the same without it. Every other value is refused
by the field's name, so that no client gets an answer that silently ignores its request. docs/api.md lists all
of them.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from lightkv.router.sampling_params import InvalidParams


class Unsupported(NamedTuple):
    """One field. `harmless`: the values, besides null, that change nothing. `instead`: what to send instead."""

    field: str
    harmless: tuple[Any, ...]
    instead: str


_TOOLS = "none, or send a chat: a plain completion calls no tools"
_BUDGET = "null, and use max_tokens: the engine does not tell tokens of reasoning from others"
_MEDIA = "null: this service supports only text"
_LOGPROBS = "null: log-probabilities are computed only for sampled and likeliest tokens"
_SAMPLER = "a value that switches it off: the sampler's kernels have no such rule"
_BEAMS = "null, or search beams in a program: LLM.beam_search(prompts, BeamParams(width=4))"
_TENSORS = "false: the model's inner values stay on its device"
_TRANSFER = "null: this service computes its K/V itself"
_TEMPLATE = "null: a plain completion has no chat template"
_REASONS = "null, and use chat_template_kwargs, with the variable of the model's chat template"
# Names that other servers have for fields of this one. Both names mean exactly the same.
RENAMED = {
    "max_new_tokens": "max_tokens",
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "min_new_tokens": "min_tokens",
    "stop_sequences": "stop",
    "stop_words": "stop",
    "random_seed": "seed",
    "num_return_sequences": "n",
    "extra_key": "cache_salt",
    "guided_json": "structured_outputs.json",
    "guided_json_object": "structured_outputs.json_object",
    "guided_regex": "structured_outputs.regex",
    "guided_choice": "structured_outputs.choice",
    "guided_grammar": "structured_outputs.grammar",
    "guided_whitespace_pattern": "structured_outputs.whitespace_pattern",
    "json_schema": "structured_outputs.json",
    "regex": "structured_outputs.regex",
    "ebnf": "structured_outputs.grammar",
    "grammar": "structured_outputs.grammar",
    "structural_tag": "structured_outputs.structural_tag",
}
# No answer is wrong without them, so they are accepted without an effect, and the log of requests names them.
HINTS = frozenset({"store", "service_tier", "verbosity", "reasoning_effort"})


def _each(names: str, harmless: tuple[Any, ...], instead: str) -> tuple[Unsupported, ...]:
    return tuple(Unsupported(name, harmless, instead) for name in names.split())


UNSUPPORTED = (
    # Other forms
    Unsupported("do_sample", (True,), "true, or null and temperature: 0 for the likeliest tokens"),
    *_each("use_beam_search early_stopping", (False,), _BEAMS),
    *_each("length_penalty num_beams", (1,), _BEAMS),
    Unsupported("best_of", (1,), "null, and choose among n answers by their logprobs"),
    # The form of the text
    Unsupported("stop_regex", ([],), "null, and use stop: a regex of a request can keep a core busy"),
    # The prompt
    *_each(
        "prompt_embeds input_embeds",
        (),
        "null, and the prompt as text or token ids: a prefix is cached by its tokens",
    ),
    Unsupported("input_ids", (), "null, and the prompt as token ids to /v1/completions"),
    Unsupported("safe_prompt", (False,), "false, and put the instruction into a message: no template has it"),
    Unsupported("task", (), "null, and put the instruction into a message"),
    Unsupported("functions", ([],), "null, and use tools on a chat"),
    Unsupported("function_call", ("none", "auto"), "null, and use tool_choice on a chat"),
    Unsupported("truncate_prompt_tokens", (), "null, and cut the prompt: /tokenize returns its tokens"),
    # Reasoning
    *_each("thinking_token_budget thinking_budget", (), _BUDGET),
    # The choice of tokens
    *_each(
        "logits_processors custom_logit_processor", ([],), "none: this service runs no code from requests"
    ),
    *_each("custom_params vllm_xargs session_params", ({},), "none: this service has no extensions"),
    Unsupported("repetition_detection", (), _SAMPLER),
    Unsupported("watermarking", (False,), _SAMPLER),
    *_each("typical_p tfs tfs_z encoder_repetition_penalty", (1,), _SAMPLER),
    *_each("top_a mirostat mirostat_mode epsilon_cutoff eta_cutoff smoothing_factor", (0,), _SAMPLER),
    *_each("dynatemp_range dynatemp_min dynatemp_max dry_multiplier xtc_probability", (0,), _SAMPLER),
    Unsupported("no_repeat_ngram_size", (0,), _SAMPLER),
    Unsupported("repeat_penalty", (1,), "1, and use repetition_penalty, which counts all tokens"),
    Unsupported("max_length", (), "null, and use max_tokens: it counts the prompt, too"),
    Unsupported("min_length", (0,), "0, and use min_tokens: it counts the prompt, too"),
    Unsupported("no_stop_trim", (False,), "false, and use include_stop_str_in_output"),
    # Ollama's own
    Unsupported("options", ({},), "none: each option is a separate field here"),
    Unsupported("format", ("",), "null, and use response_format"),
    Unsupported("num_ctx", (), "null: the service is started with its context, --max-model-len"),
    Unsupported("lora_path", (), "null: this service has one model, without adapters"),
    # What is returned
    Unsupported("logprob_token_ids", (), _LOGPROBS),
    Unsupported("return_prompt_token_ids", (False,), "false, and use return_token_ids"),
    Unsupported("return_prompt_text", (False,), "false, and use echo on a completion"),
    Unsupported("return_token_offsets", (False,), "false: log-probabilities of a completion have offsets"),
    *_each("return_hidden_states return_routed_experts", (False,), _TENSORS),
    Unsupported(
        "return_cached_tokens_details", (False,), "false: usage has them, with --report-cached-tokens"
    ),
    Unsupported("return_meta_info", (False,), "false: the form of OpenAI's answers has no place for it"),
    Unsupported("detokenize", (True,), "true, and use return_token_ids, which are beside the text"),
    Unsupported("moderation", (), "null: answers are not moderated"),
    Unsupported("web_search_options", (), "null: this service does not search the web"),
    # Sound and pictures
    Unsupported("modalities", (["text"],), '["text"]: this service supports only text'),
    Unsupported("audio", (), _MEDIA),
    *_each("mm_processor_kwargs media_io_kwargs images_config", ({},), _MEDIA),
    # The cache
    *_each("kv_transfer_params ec_transfer_params", ({},), _TRANSFER),
    *_each("bootstrap_host bootstrap_port bootstrap_room", (), _TRANSFER),
)
UNSUPPORTED_ON_CHAT = (
    *_each("enable_thinking thinking", (), _REASONS),
    Unsupported("think", (), 'null, and use reasoning_effort, whose value "none" switches reasoning off'),
    Unsupported("reasoning", ({},), "null, and use reasoning_effort"),
    Unsupported("echo", (False,), "false: an answer never repeats the chat"),
    Unsupported("suffix", ("",), "none: an answer ends the chat"),
    Unsupported("chat_template", (), "null: a template is a program; give one at start, --chat-template"),
    Unsupported("documents", ([],), "none, and send them as documents in chat_template_kwargs"),
)
UNSUPPORTED_ON_COMPLETIONS = (
    Unsupported("top_logprobs", (0,), "null, and use logprobs for their number"),
    *_each("chat_template_kwargs reasoning", ({},), _TEMPLATE),
    *_each("chat_template enable_thinking thinking think", (), _TEMPLATE),
    Unsupported("documents", ([],), _TEMPLATE),
    Unsupported("continue_final_message", (False,), "false: a plain completion has no messages"),
    Unsupported("tools", ([],), _TOOLS),
    Unsupported("tool_choice", ("none", "auto"), _TOOLS),
    Unsupported("parallel_tool_calls", (True, False), _TOOLS),
    Unsupported("include_reasoning", (True,), "true: the text includes reasoning as the model wrote it"),
)
UNSUPPORTED_IN_MESSAGES = (
    Unsupported("function_call", (), "null, and use tool_calls"),
    *_each("prefix partial", (False,), "false, and use continue_final_message"),
    Unsupported("audio", (), _MEDIA),
    *_each("images videos audios", ([],), _MEDIA),
)

SECOND_NAMES = {
    name: Unsupported(name, (), f"null, or leave out the other field that means {field}")
    for name, field in RENAMED.items()
}
_BY_NAME = {one.field: one for one in UNSUPPORTED}
CHAT = _BY_NAME | {one.field: one for one in UNSUPPORTED_ON_CHAT}
COMPLETIONS = _BY_NAME | {one.field: one for one in UNSUPPORTED_ON_COMPLETIONS}
MESSAGES = {one.field: one for one in UNSUPPORTED_IN_MESSAGES}


def by_own_names(given: Any) -> Any:
    """Returns a body in which the fields of RENAMED have this service's names. What is given by two names keeps
    the second one, which is then refused (`SECOND_NAMES`). What is no object is returned as it is."""
    if not isinstance(given, dict):
        return given
    own = {name: value for name, value in given.items() if name not in RENAMED}
    taken: set[str] = set()
    for name, value in given.items():
        place = RENAMED.get(name)
        if place is None or value is None:
            continue
        field, _, key = place.partition(".")
        if given.get(field) is not None or place in taken:
            own[name] = value
            continue
        taken.add(place)
        own[field] = {**(own.get(field) or {}), key: value} if key else value
    return own


def refuse_unsupported(given: Mapping[str, Any], unsupported: Mapping[str, Unsupported]) -> None:
    """Raises InvalidParams for the first field of `given` whose value is not harmless.

    `tools` are harmless if the request asks not to call any. Fields that are not in `unsupported` are ignored.
    """
    for field, value in given.items():
        known = unsupported.get(field)
        if known is None or value is None or any(_same(value, one) for one in known.harmless):
            continue
        if field == "tools" and given.get("tool_choice") == "none":
            continue
        raise InvalidParams(field, value, known.instead)


def _same(value: Any, other: Any) -> bool:
    """Returns whether two values are the same in JSON, where true is not 1 as it is in Python."""
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)
