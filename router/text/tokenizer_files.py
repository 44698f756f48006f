"""Reads the files of a model's tokenizer: its tokens and chat templates, wherever a published model has them.
transformers reads the same from them."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers

from lightkv.errors import LightKVError
from lightkv.router.model_files import one_line, read_json, refuse_pointer
from lightkv.router.sampling_params import RECOMMENDED, InvalidParams, SamplingParams

_NAME_END = "_token"  # of the fields that name special tokens, such as bos_token and image_token


class UnreadableTokenizer(LightKVError):
    """A file of the tokenizer, or one that it needs, is missing or damaged."""

    def __init__(self, path: Path, reason: str) -> None:
        self.path = path
        self.reason = reason
        super().__init__(f"{path}: {reason}; replace it with a whole copy")


def read_object(path: Path, optional: bool = False) -> dict[str, Any]:
    """Returns the JSON object in the file at `path`, which is empty where an `optional` file is missing. Raises
    UnreadableTokenizer."""
    if optional and not path.is_file():
        return {}
    try:
        return read_json(path)
    except (OSError, ValueError) as error:
        raise UnreadableTokenizer(path, f"cannot be read ({one_line(error)})") from error


def read_tokenizer(directory: Path, settings: Mapping[str, Any]) -> tuple[tokenizers.Tokenizer, int]:
    """Returns the tokenizer in `directory`, which neither cuts texts off nor fills them up, and how many tokens
    were added that only other files than tokenizer.json name: each has the next id, as in transformers.

    `settings`: of tokenizer_config.json and special_tokens_map.json. Raises UnreadableTokenizer.
    """
    path = directory / "tokenizer.json"
    try:
        refuse_pointer(path)
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
        tokenizer.no_truncation()  # the file may hold settings from training
        tokenizer.no_padding()
        tokenizer.encode("")  # fails where the special tokens around a text are not described
    except (KeyboardInterrupt, SystemExit):
        raise
    # tokenizers raises bare Exception, and its panics are not even Exceptions.
    except BaseException as error:
        raise UnreadableTokenizer(path, f"is not a tokenizer ({one_line(error)})") from error
    added = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
    num_own = len(added)
    try:
        for token in _more_tokens(directory, settings):
            added.setdefault(token.content, token)
        tokenizer.add_tokens([*added.values()][num_own:])
    except (TypeError, ValueError, KeyError, OverflowError) as error:
        is_listed = settings.get("added_tokens_decoder") is not None
        path = directory / ("tokenizer_config.json" if is_listed else "added_tokens.json")
        raise UnreadableTokenizer(path, f"names tokens that cannot be added ({one_line(error)})") from error
    return tokenizer, len(added) - num_own


def _more_tokens(directory: Path, settings: Mapping[str, Any]) -> Iterator[tokenizers.AddedToken]:
    """Yields the tokens that the files beside tokenizer.json name, by their ids where they have one, and then
    the special tokens."""
    extra = settings.get("extra_special_tokens") or settings.get("additional_special_tokens")
    more = extra if isinstance(extra, list) else []
    special = [*special_tokens(settings).values(), *filter(None, map(token_text, more))]
    listed = settings.get("added_tokens_decoder")
    if listed is None:  # an older form
        ids = read_object(directory / "added_tokens.json", optional=True)
        for text in sorted(ids, key=lambda text: int(ids[text])):
            yield tokenizers.AddedToken(text, special=text in special, normalized=text not in special)
    elif not isinstance(listed, dict) or not all(isinstance(one, dict) for one in listed.values()):
        raise TypeError("added_tokens_decoder is no object of objects")
    else:
        for token_id in sorted(listed, key=int):
            flags = listed[token_id]
            is_special = flags["content"] in special or bool(flags.get("special"))
            yield tokenizers.AddedToken(**flags | {"special": is_special})
    for text in special:
        yield tokenizers.AddedToken(text, special=True, normalized=False)


def read_settings(directory: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns what tokenizer_config.json says, and the same with special_tokens_map.json, which comes first
    where tokenizer_config.json lists no added tokens, as in transformers. Raises UnreadableTokenizer."""
    settings = read_object(directory / "tokenizer_config.json", optional=True)
    named = read_object(directory / "special_tokens_map.json", optional=True)
    return settings, named | settings if "added_tokens_decoder" in settings else settings | named


def special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Returns the texts of the special tokens that `settings` names, by their names. Those of some models, such
    as image_token, may stand in an object of their own."""
    found = {name: token for name, token in settings.items() if name.endswith(_NAME_END)}
    for name in ("additional_special_tokens", "extra_special_tokens", "model_specific_special_tokens"):
        if isinstance(own := settings.get(name), dict):
            found |= own
    return {name: text for name, token in found.items() if (text := token_text(token))}


def read_templates(directory: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Returns the model's chat templates by name. "tool_use" is for chats with tools, "default" for all others.

    They are files of their own, or else in tokenizer_config.json (`settings`), or else in a processor's
    chat_template.json. Raises UnreadableTokenizer.
    """
    path = directory / "chat_template.jinja"
    try:
        found: dict[str, Any] = {"default": path.read_text(encoding="utf-8")} if path.is_file() else {}
        for path in sorted(directory.glob("additional_chat_templates/*.jinja")):
            found[path.stem] = path.read_text(encoding="utf-8")
        if "default" in found:
            return found
        path, given = directory / "tokenizer_config.json", settings.get("chat_template")
        if given is None:
            path = directory / "chat_template.json"
            given = read_object(path, optional=True).get("chat_template")
        named = {} if given is None else {"default": given}
        if isinstance(given, dict):  # several templates by their names
            named = given
        elif isinstance(given, list):  # the same in another form
            named = {entry["name"]: entry["template"] for entry in given}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UnreadableTokenizer(path, f"holds no chat template ({one_line(error)})") from error
    for template in named.values():
        if not isinstance(template, str):
            raise UnreadableTokenizer(path, f"has a chat template of type {type(template).__name__}")
    return named | found


def read_sampling(path: Path) -> dict[str, Any]:
    """Returns the sampling parameters that the generation_config.json at `path` recommends, by name; none if it
    is missing. Raises UnreadableTokenizer for a value that no request may have."""
    given = read_object(path, optional=True)
    found = {name: given[name] for name in RECOMMENDED if given.get(name) is not None}
    try:
        SamplingParams(**found)
    except InvalidParams as error:
        raise UnreadableTokenizer(path, f"has a wrong value: {error}, or take the field out") from error
    return found


def token_text(token: Any) -> str | None:
    """Returns the text of a special token, which the files hold as a string or within an object."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def sampled_part(text: str, vocab_size: int) -> str:
    """Returns the tokenizer.json `text` without the tokens from `vocab_size` on."""
    content = json.loads(text)
    content["added_tokens"] = [one for one in content.get("added_tokens") or () if one["id"] < vocab_size]
    model = content["model"]
    if isinstance(model.get("vocab"), dict):
        model["vocab"] = {token: one for token, one in model["vocab"].items() if one < vocab_size}
    elif isinstance(model.get("vocab"), list):
        model["vocab"] = model["vocab"][:vocab_size]
    if isinstance(model.get("merges"), list):
        pairs = [one.split(" ", 1) if isinstance(one, str) else one for one in model["merges"]]
        model["merges"] = [pair for pair in pairs if "".join(pair) in model["vocab"]]
    return json.dumps(content, ensure_ascii=False)
