"""Other servers' names for fields of a request, which mean the same."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from lightkv.router.sampling_params import InvalidParams

from .extensions import Text, Texts

# The field that each name is another one for.
ALIASES = {
    "max_new_tokens": "max_tokens",
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "min_new_tokens": "min_tokens",
    "stop_sequences": "stop",
    "stop_words": "stop",
    "random_seed": "seed",
    "num_return_sequences": "n",
    "extra_key": "cache_salt",
}


class AliasFields(BaseModel):
    """The other names, of transformers, SGLang, llama.cpp, Ollama and others."""

    model_config = ConfigDict(strict=True, hide_input_in_errors=True)

    max_new_tokens: int | None = Field(None, description="As max_tokens.")
    n_predict: int | None = Field(None, description="As max_tokens.")
    num_predict: int | None = Field(None, description="As max_tokens.")
    min_new_tokens: int | None = Field(None, description="As min_tokens.")
    stop_sequences: Text | Texts | None = Field(None, description="As stop.")
    stop_words: Text | Texts | None = Field(None, description="As stop.")
    random_seed: int | None = Field(None, description="As seed.")
    num_return_sequences: int | None = Field(None, description="As n.")
    extra_key: Text | None = Field(None, max_length=1024, description="As cache_salt.")
    do_sample: bool | None = Field(
        None, description="false: temperature 0, which takes the likeliest tokens."
    )

    num_beams: int | None = Field(None, ge=1, description="Above 1: use_beam_search, with best_of beams.")

    def take_aliases(self) -> None:
        """Sets each field that is given by another name. Raises InvalidParams where both are given, and
        differ. A second call changes nothing."""
        for alias, field in ALIASES.items():
            self._take(alias, field, getattr(self, alias))
        if self.num_beams is not None and self.num_beams > 1:
            self._take("num_beams", "use_beam_search", True)
            self._take("num_beams", "best_of", self.num_beams)
        if self.do_sample is False:
            self._take("do_sample", "temperature", 0)

    def _take(self, alias: str, field: str, value: Any) -> None:
        known = getattr(self, field)
        if value is not None and known is not None and known != value:
            raise InvalidParams(
                alias, getattr(self, alias), f"it without {field}, which is {str(known)[:100]}"
            )
        if value is not None:
            setattr(self, field, value)
