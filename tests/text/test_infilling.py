"""Tests of prompts with a suffix, for the tokens of each family."""

from pathlib import Path

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Tokens

from lightkv.router.model_files import DEFAULT_MODEL, resolve
from lightkv.router.sampling_params import InvalidParams
from lightkv.router.text.infilling import infilling_ids
from lightkv.router.text.tokenizer import Tokenizer
from tests.support.fake_router import COMPLETIONS, ids_of, service

PREFIX, SUFFIX = "def f(x):\n    ", "\n    return y\n"
FORMS = {
    "Qwen2.5-Coder": ("<|fim_prefix|>", PREFIX, "<|fim_suffix|>", SUFFIX, "<|fim_middle|>"),
    "StarCoder": ("<fim_prefix>", PREFIX, "<fim_suffix>", SUFFIX, "<fim_middle>"),
    "DeepSeek-Coder": ("<｜fim▁begin｜>", PREFIX, "<｜fim▁hole｜>", SUFFIX, "<｜fim▁end｜>"),
    "Codestral": ("[SUFFIX]", SUFFIX, "[PREFIX]", PREFIX, ""),
}


def tokenizer_with(directory: Path, tokens: list[str]) -> Tokenizer:
    source = resolve(DEFAULT_MODEL, lambda line: None)
    for name in ("config.json", "tokenizer_config.json"):
        (directory / name).write_bytes((source / name).read_bytes())
    made = Tokens.from_file(str(source / "tokenizer.json"))
    made.add_special_tokens([AddedToken(token, special=True) for token in tokens])
    made.save(str(directory / "tokenizer.json"))
    return Tokenizer(directory)


@pytest.mark.parametrize("family", FORMS)
def test_a_prompt_has_the_form_of_its_family(tmp_path: Path, family: str) -> None:
    before, first, between, second, after = FORMS[family]
    tokenizer = tokenizer_with(tmp_path, [token for token in (before, between, after) if token])
    ids = infilling_ids(tokenizer, PREFIX, SUFFIX).tolist()
    expected = [tokenizer.token_id(before), *tokenizer.encode(first).tolist()]
    expected += [tokenizer.token_id(between), *tokenizer.encode(second).tolist()]
    assert ids == expected + ([tokenizer.token_id(after)] if after else [])
    assert None not in ids
    assert tokenizer.decode(infilling_ids(tokenizer, "", ""), False) == before + between + after


def test_a_tokenizer_without_such_tokens_is_refused() -> None:
    tokenizer = Tokenizer(resolve(DEFAULT_MODEL, lambda line: None))
    with pytest.raises(InvalidParams, match="mark a prefix"):
        infilling_ids(tokenizer, PREFIX, SUFFIX)


def test_a_suffix_over_http(tmp_path: Path) -> None:
    under_test = service(tmp_path)
    body = {"prompt": PREFIX, "suffix": SUFFIX, "max_tokens": 1}
    (tmp_path / "tokens").mkdir()
    with under_test.running() as api:
        for wrong in (body, {**body, "prompt": [5, 6]}):
            assert api.post(COMPLETIONS, wrong, 400)["error"]["param"] == "suffix"
        assert api.post(COMPLETIONS, {**body, "suffix": ""})
    (tmp_path / "second").mkdir()
    under_test = service(tmp_path / "second")
    under_test.tokenizer = tokenizer_with(
        tmp_path / "tokens", ["<fim_prefix>", "<fim_suffix>", "<fim_middle>"]
    )
    with under_test.running() as api:
        api.post(COMPLETIONS, body)
        assert ids_of(api.router.submits[0]) == infilling_ids(api.tokenizer, PREFIX, SUFFIX).tolist()
