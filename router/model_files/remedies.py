"""Says how to make a file that a model's directory lacks from the files in it: some models are published in
forms that lightkv does not read."""

from collections.abc import Sequence
from pathlib import Path


def remedy_for(directory: Path, missing: Sequence[str]) -> str | None:
    """Returns what to do where `directory` lacks the files `missing`; None where a whole copy alone helps."""
    if "config.json" in missing:
        return _for_config(directory)
    found = [
        remedy(directory)
        for name, remedy in (("tokenizer.json", _for_tokenizer), ("model.safetensors", _for_weights))
        if name in missing
    ]
    return "; ".join(filter(None, found)) or None


def _for_config(directory: Path) -> str | None:
    if (directory / "adapter_config.json").is_file():
        return "it is an adapter: merge it into its base model and give that"
    if (directory / "params.json").is_file():
        return (
            "params.json is Mistral's own form: give config.json and model*.safetensors, published beside it"
        )
    if (directory / "snapshots").is_dir():
        return "it is a folder of the Hugging Face cache: give the model's id, or a folder of its snapshots"
    return _for_gguf(directory)


def _for_tokenizer(directory: Path) -> str | None:
    def has(*names: str) -> bool:
        return all((directory / name).is_file() for name in names)

    here = str(directory)
    if has("tekken.json"):
        make = "from transformers.integrations.mistral import convert_tekken_tokenizer as make; make"
        code = f"{make}({str(directory / 'tekken.json')!r}).save_pretrained({here!r})"
        return _makes("tekken.json is Mistral's own form", "mistral-common", code)
    code = (
        f"from transformers import AutoTokenizer as T; T.from_pretrained({here!r}).save_pretrained({here!r})"
    )
    if has("tokenizer.model"):
        return _makes("tokenizer.model is sentencepiece", "sentencepiece protobuf", code)
    if has("vocab.json", "merges.txt"):
        return _makes("vocab.json and merges.txt are an older form", "", code)
    return None


def _makes(form: str, packages: str, code: str) -> str:
    install = f"pip install {packages} && " if packages else ""
    return f'{form}, of which transformers makes a tokenizer.json: {install}python -c "{code}"'


def _for_weights(directory: Path) -> str | None:
    others = sorted(path.name for path in directory.glob("*.safetensors"))
    if any(name.startswith("consolidated") for name in others):
        return f"{others[0]} is Mistral's own form: give model*.safetensors, published beside it"
    if others:
        return f"it holds {others[0]}: give that the name model.safetensors, or add the index of its shards"
    if any(directory.glob("*.bin")):
        here = str(directory)
        load = f"from transformers import AutoModelForCausalLM as M; M.from_pretrained({here!r})"
        return (
            "its *.bin weights are pickle, which lightkv never loads: save the model again as safetensors "
            f'(python -c "{load}.save_pretrained({here!r})")'
        )
    if any(directory.glob("*.pth")):
        return "its *.pth weights are pickle, which lightkv never loads: give a copy in safetensors"
    return _for_gguf(directory)


def _for_gguf(directory: Path) -> str | None:
    if any(directory.glob("*.gguf")):
        return "no .gguf file can be given: give the safetensors of which it was made"
    return None
