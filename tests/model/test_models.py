"""Tests which of transformers' causal language models run, and why the others are refused (docs/models.md).

`python tests/model/test_models.py` writes that page.
"""

import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers

from lightkv.errors import UnsupportedModel
from lightkv.router import LLM, EngineConfig
from lightkv.router.model.build import build_runner
from lightkv.router.model.info import model_info
from lightkv.router.model_files import resolve
from tests.support.combinations import slow
from tests.support.served import starting
from tests.support.tiny_architectures import (
    answers,
    architecture,
    cases,
    outcome,
    own_answers,
    prompts,
    random_weights,
    tiny,
)
from tests.support.tiny_wrappers import FAMILIES, wrapper_cases, wrapper_name, wrapper_outcome

pytestmark = pytest.mark.usefixtures("one_thread")

Outcomes = dict[tuple[str, str], str | None]  # why a model type, in a variant, is refused; None if it runs
VERSION = transformers.__version__
PAGE = Path(__file__).parents[2] / "docs" / "models.md"
HEAD = f"""# Models

This page lists the causal language models of transformers {VERSION} that run on lightkv, the models of several
modalities whose text runs, and those that are refused. `make test-all` checks it. A tiny random model of each
architecture either gives the same greedy answers on lightkv as with transformers' own `generate`, or is
refused, for the reason given, before its weights and tokenizer are read. The prompts have several lengths, run
side by side in chunks, and two share a prefix. `python tests/model/test_models.py` writes this page.

Brackets name the field of the configuration that makes the difference. A model may run with one configuration
and be refused with another: layer types, windows and shared layers are read from its config.json.

Beside layers that see everything, layers with a window or a chunk hold what their next tokens see and 64
tokens more ([layer groups](memory.md#layer-groups)). Where no layer sees everything, all layers hold all
tokens. Layers that read the K/V of another layer (Gemma-3n, Gemma-4) hold none. Models with recurrent layers
(Qwen3.5, Nemotron-H and others) need the extra `hybrid` on a GPU; LFM2, which has convolutions only, does not.

The models here are tiny and random. The released checkpoints of two families need more than these:

- **gpt-oss** stores its experts in MXFP4, in which they run (see below). lightkv has not been run on the
  released checkpoints, but on random weights of the shape and format of 20b.
- **Llama-4** is released as a model of text and images (`model_type` llama4), whose text runs (see below).
  transformers computes every expert for every token, and Scout's 218 GB in bfloat16 take several GPUs.

**Weights in 8 and 4 bits.** Linear layers and experts run as a checkpoint stores them in these formats of its
`quantization_config`:

- **fp8 in blocks of 128 x 128** (`fp8`: DeepSeek, Qwen, GLM; compressed-tensors `float-quantized` by
  `block`), and **fp8 with a scale for each output or each layer** (`float-quantized` by `channel` or `tensor`,
  or both as `naive-quantized`, `fp8` without blocks, modelopt `FP8`). Hopper GPUs multiply up to 64 tokens by
  kernels of lightkv, and more by torch's `_scaled_mm`; several tokens are in fp8, too, where the checkpoint
  says that its inputs are, by dynamic scales.
- **4 bits in groups of 32, 64 or 128 inputs** (compressed-tensors `pack-quantized`, AWQ `gemm`, GPTQ without
  act order), **nvfp4** (compressed-tensors `nvfp4-pack-quantized`, modelopt `NVFP4`), and the experts of
  **MXFP4** (gpt-oss). Inputs stay in 16 bits, also where the checkpoint says that they are in fewer.

On a GPU, weights of 4 bits and experts in all these formats are multiplied by humming-kernels (the extra
`quantised`). On Hopper GPUs a kernel of lightkv multiplies up to 8 tokens with integers of 4 bits. Where the
library is missing, such models are refused, with what to install.

Everything else is multiplied with the dense weight, which is made for each product: on a CPU, and fp8 on other
GPUs. `--dequantise` makes it once, while the model is loaded. Layers without scales in the files are plain.
Several ranks divide linear layers and experts in whole blocks and groups; those in MXFP4 by whole experts.

Refused before weights are read: act order, groups of other sizes, a scale of 4-bit integers for each output,
other bits (integers of 8 bits), linear layers in MXFP4, several formats in one checkpoint, weights stored
without their zeros (a `sparsity_config`), and tensors that are missing or have another shape or type than
their format says. Embeddings have to be plain.

**Adapted models.** The engine changes models that it has loaded whose attention modules compute scores
themselves, attend twice a layer, or are not handed keyword arguments: BigBird, Bloom, CodeGen, DiffLlama,
Falcon, GPT (the first), GPT-J, GPT-Neo, GPT-NeoX-Japanese, Megatron-BERT, MPT, MVP, Nemotron, RemBERT,
RoFormer, StableLM and XGLM. These modules are handed the step
(`lightkv/integrations/model/adapters/adapt.py`), or get a forward pass of lightkv's, which is first compared
with their own. A model that you loaded yourself stays as it was: `LightKVCache` and `CachedModel` refuse it.

- The slopes of ALiBi are read, to the bit, from the bias that the model makes itself. For MPT, transformers
  reads neither `alibi` nor `alibi_bias_max` of the configuration, and so lightkv does not.
- Long texts may differ where lightkv computes more exactly than transformers, which rounds the bias of Bloom,
  slope times position, to the model's type, and that of Falcon to bfloat16 in every type. lightkv rounds only
  Falcon's slopes, as transformers does.
- The longest request is the context that the configuration names (`seq_length` of Bloom's checkpoints,
  `max_seq_len` of MPT's), although ALiBi itself has no limit. A Bloom that names none needs `--max-model-len`.
- In these layers, the residual is not fused with the norms. Rotary positions are fused with the writing of K/V.
- DiffLlama subtracts two attentions that share K. They are computed as one over heads of V twice as wide, so a
  token takes 1.5 times the K/V of a Llama with its heads.

**Positions.** RoBERTa and its kin (CamemBERT, Data2Vec, XLM-RoBERTa) give the first token of a text the
position after the padding token's id, and so does lightkv, whose context is shorter by that. transformers'
`generate` gives them positions from 0, which their own forward pass does not. Here it is given the right ones,
and `LightKVCache` refuses these models. A padding token within a text counts as any other. The decoders of BART
and its kin run alone where config.json names the class (`BartForCausalLM`): they attend to their own text, and
to no encoder.
"""
ENCODER_DECODERS = """## Encoder-decoders

Encoder-decoders are refused by `LLM` and the service, and below. They run in transformers' own `generate` with
`LightKVCache` ([memory.md](memory.md#encoder-decoders)), which holds the encoder's K/V once for all beams
of a request. `tests/integrations/test_encoder_decoder.py` compares tiny random models with transformers' own
cache, token by token.

| model | in `generate` | attention |
|---|---|---|
| T5ForConditionalGeneration | greedy, sampled, beams, padding, assisted | its own, with its position bias |
| BartForConditionalGeneration | greedy, sampled, beams, padding | its own |
| WhisperForConditionalGeneration | greedy, sampled, beams; Whisper's own `generate` | its own |

Others run if their decoder caches K/V of its text and of the encoder's output once in each layer, all in one
shape; `LightKVCache` runs the decoder once to find out, and raises UnsupportedModel otherwise. The same file
compares the greedy and beam texts of Blenderbot, LED, LongT5, M2M100, Marian, MBart, mT5, Pegasus, ProphetNet
and UMT5. T5Gemma is refused: its `generate` replaces the cache of the encoder's output by one of its own.
"""


WRAPPERS = """## Texts on models of several modalities

A wrapper joins a text model with a vision or an audio tower. Its text runs: transformers' class of the wrapper
computes it, and what no text needs (towers, projectors) is neither read nor held. `lightkv info` names what is
left out of a model and the bytes that this saves (`left_out` in `info --json` and `/server_info`). The check of
the memory, which precedes loading, counts what is read.

- The wrapper's own tokenizer and chat template are used, also where a processor brings them
  (`chat_template.json`). A template that takes a content only as a list of parts gets one.
- A request with an image, audio, a video or a file is refused with status 400, which names its kind.
- A text has ordinary positions. M-RoPE (Qwen-VL, GLM-4.xV) has three equal parts then, and runs.
- A tower whose package is not installed (`timm`) is left out like any other.
- In bfloat16, of a checkpoint with the published sizes of Gemma-3-4B 7.76 GB are read and 0.87 GB left out, of
  Qwen2.5-VL-7B 15.23 GB and 1.35 GB (`lightkv info`, on files without numbers).
- transformers' own `generate` gives the answers that are compared, here for text halves that are saved and
  loaded; `tests/model/test_text_half.py` compares whole wrappers of {num} families, with towers.
"""


def page(outcomes: Outcomes, wrappers: Outcomes) -> str:
    """Returns docs/models.md. Of each case, and of each wrapper: why it is refused, or None if it runs."""
    runs, refused = _listed(outcomes, architecture)
    texts, refused_texts = _listed(wrappers, wrapper_name)
    num_run, num_texts = (len({shown.partition(" (")[0] for shown in found}) for found in (runs, texts))
    return "\n".join(
        [
            HEAD,
            ENCODER_DECODERS,
            f"## {num_run} architectures run, in {len(runs)} configurations",
            "",
            ", ".join(sorted(runs)),
            "",
            WRAPPERS.format(num=len(FAMILIES)),
            f"### The text of {num_texts} wrappers runs, in {len(texts)} configurations",
            "",
            ", ".join(sorted(texts)),
            "",
            f"## {len(outcomes) - len(runs)} configurations are refused",
            "",
            *_table(refused),
            "",
            f"### {len(wrappers) - len(texts)} configurations of several modalities are refused",
            "",
            *_table(refused_texts),
            "",
        ]
    )


def _listed(outcomes: Outcomes, class_name: Callable[[str], str]) -> tuple[list[str], dict[str, list[str]]]:
    """Returns what runs, by the name of its class, and what is refused, by the reason."""
    refused: dict[str, list[str]] = defaultdict(list)
    runs = []
    shared = Counter(class_name(name) for name in {name for name, _ in outcomes})
    for (name, variant), reason in outcomes.items():
        shown = class_name(name)
        own = variant or (f"model_type {name}" if shared[shown] > 1 else "")
        shown = f"{shown} ({own})" if own else shown
        (runs if reason is None else refused[reason]).append(shown)
    return runs, refused


def _table(refused: dict[str, list[str]]) -> list[str]:
    rows = sorted(refused.items(), key=lambda item: (-len(item[1]), item[0]))
    lines = [f"| {reason} | {', '.join(sorted(names))} |" for reason, names in rows]
    return ["| reason | architectures |", "|---|---|", *lines]


def outcomes(directory: Path) -> Outcomes:
    return {case: outcome(*case, directory / "-".join(case)) for case in cases()}


def wrapper_outcomes(directory: Path) -> Outcomes:
    return {(name, ""): wrapper_outcome(name, directory / f"{name}-wrapper") for name in wrapper_cases()}


def test_the_page_has_the_texts_of_this_file() -> None:
    """A change of the page alone would be lost when this file writes it anew."""
    written = PAGE.read_text(encoding="utf-8")
    assert all(text in written for text in (HEAD, ENCODER_DECODERS, WRAPPERS.format(num=len(FAMILIES))))


@pytest.mark.slow
def test_the_page_lists_what_runs(tmp_path: Path) -> None:
    assert PAGE.read_text(encoding="utf-8") == page(outcomes(tmp_path), wrapper_outcomes(tmp_path))


@pytest.mark.parametrize(
    "name",
    [
        *slow("gemma3_text", "gpt_oss", "llama4_text"),  # test_windowed_families.py runs them
        *slow("glm4", "granite", "starcoder2"),
        "glm4_moe",
        "olmo2",
        "opt",
        "qwen3_moe",
        "whisper",
    ],
)
def test_runs(name: str, tmp_path: Path) -> None:
    assert outcome(name, "", tmp_path) is None


@pytest.mark.parametrize("name", ["gpt_oss", "llama4_text"])
def test_sinks_and_chunks_run_without_fused_layers(name: str) -> None:
    expected = own_answers(random_weights(tiny(name)), prompts())
    assert answers(random_weights(tiny(name)), prompts(), prefill_chunk=16, fuse=False) == expected


@pytest.mark.parametrize(
    "order", [(True, False, True), *slow((False, True))], ids=["fused-first", "fused-last"]
)
def test_engines_of_one_model_with_fused_layers_and_without_give_the_same_texts(order: tuple[bool]) -> None:
    model = random_weights(tiny("llama"))
    found = [answers(model, prompts(), prefill_chunk=16, fuse=fuse) for fuse in order]
    assert found == [own_answers(random_weights(tiny("llama")), prompts())] * len(order)


REFUSED = {
    ("bert", ""): "encoder",
    ("big_bird", "is_decoder"): "attention is over blocks",
    ("cpmant", ""): "AttentionInterface",
    ("deepseek_v3", ""): "latent",
    ("doge", ""): "a bias by key",
    ("mamba", ""): "Mamba-1",
    ("musicgen", ""): "encoder-decoder",
    ("roberta", ""): "encoder",
    ("rwkv", ""): "RWKV",
    ("trocr", ""): "AttentionInterface",
    ("xmod", "is_decoder"): "adapters of its language",
}


@pytest.mark.parametrize(("case", "reason"), REFUSED.items(), ids=["-".join(case) for case in REFUSED])
def test_is_refused_before_weights_and_tokenizer_are_read(
    case: tuple[str, str], reason: str, tmp_path: Path
) -> None:
    config = tiny(*case)
    config.save_pretrained(tmp_path)
    refuses(tmp_path, config, reason)


@pytest.mark.parametrize("name", ["mamba", "cpmant", "doge"])
def test_is_refused_for_its_architecture_before_its_missing_files(name: str, tmp_path: Path) -> None:
    tiny(name).save_pretrained(tmp_path)
    config = EngineConfig(str(tmp_path), device="cpu")
    for read in (
        lambda: LLM(config),
        lambda: build_runner(config, lambda line: None),
        lambda: model_info(config, resolve(config.model, lambda line: None)),
    ):
        with pytest.raises(UnsupportedModel, match=REFUSED[name, ""]):
            read()


def test_an_encoder_decoder_is_refused(tmp_path: Path) -> None:
    config = transformers.T5Config(architectures=["T5ForConditionalGeneration"])
    config.save_pretrained(tmp_path)
    refuses(tmp_path, config, "encoder-decoder")


def refuses(directory: Path, config: Any, reason: str) -> None:
    for name in ("model.safetensors", "tokenizer.json"):
        (directory / name).write_text("neither weights nor a tokenizer")
    with pytest.raises(UnsupportedModel, match=reason) as raised:
        LLM(str(directory))
    assert raised.value.architecture == config.architectures[0]
    assert "\n" not in str(raised.value)
    assert "Error" not in str(raised.value)


@pytest.mark.slow
def test_a_model_that_cannot_run_is_refused_before_its_tokenizer(tmp_path: Path) -> None:
    """The API process reads the tokenizer while the worker checks the model."""
    transformers.CpmAntConfig(architectures=["CpmAntForCausalLM"]).save_pretrained(tmp_path / "cpmant")
    for name in ("tokenizer.json", "model.safetensors"):
        (tmp_path / "cpmant" / name).write_text("neither a tokenizer nor weights")
    with starting(tmp_path / "cpmant", tmp_path / "log", tmp_path / "s") as begin:
        served = begin()
        assert served.wait(60) == 1
        log = served.log.read_text()
    assert "CpmAntForCausalLM cannot run on lightkv" in log
    assert "tokenizer" not in log
    assert "Traceback" not in log


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        found = page(outcomes(Path(scratch)), wrapper_outcomes(Path(scratch)))
        PAGE.write_text(found, encoding="utf-8")
