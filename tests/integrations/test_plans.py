"""Tests that the table of plans says what the decoder layers of transformers compute."""

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel
from typer.testing import CliRunner

from lightkv.errors import UnsupportedModel
from lightkv.integrations.model.plans.layer_plans import PLANS, norm_form
from lightkv.router.cli.app import app
from lightkv.router.config import EngineConfig
from lightkv.router.model.build import assemble
from lightkv.router.model.info import model_info
from lightkv.router.model.loader import load_model
from lightkv.router.model.model_config import load_supported_config
from tests.support.plan_search import norm_differs, search
from tests.support.tiny_architectures import cases, random_weights, tiny
from tests.support.tiny_wrappers import save_random, tiny_wrapper, wrapper_cases

pytestmark = pytest.mark.usefixtures("one_thread")


def differences(model: PreTrainedModel) -> list[str]:
    """Returns where the plans of the model's layers, or the forms of its norms, differ from what is found."""
    root = cast(nn.Module, model)
    kinds = {type(one): one for one in root.modules() if norm_form(one) is not None}
    wrong = [f"{kind.__name__} is of another form" for kind, norm in kinds.items() if norm_differs(norm)]
    for name, fields in search(model).items():
        if fields and name not in PLANS:
            wrong.append(f"{name} has no plan, and computes {fields}")
            continue
        for field, value in fields.items():
            said = getattr(PLANS[name], field)
            if said != value and not (field == "residual_factor" and value is None):
                wrong.append(f"{name}: {field} is {said!r}, found {value!r}")
    return wrong


@pytest.mark.parametrize("name", ["llama", "gemma2", "glm4_moe", "gpt_oss", "lfm2", "olmo2", "persimmon"])
def test_the_plan_of_a_family_is_what_its_layers_compute(name: str) -> None:
    fields: Any = {"layer_types": ["full_attention"] * 4} if name == "lfm2" else {}
    assert differences(random_weights(tiny(name, fields=fields))) == []


@pytest.mark.parametrize(
    ("fuse", "unfused"), [(True, {"GPT2Block: it has no plan": 4}), (False, {"--no-fuse": 4})]
)
def test_what_runs_transformers_code_is_said(fuse: bool, unfused: dict[str, int], tmp_path: Path) -> None:
    lines: list[str] = []
    config = EngineConfig(str(tmp_path), device="cpu", max_total_tokens=100, max_num_seqs=2, fuse=fuse)
    model = random_weights(tiny("gpt2"))
    _, info = assemble(model, config, lines.append)
    assert info.unfused == unfused
    assert ("unfused: GPT2Block: it has no plan (4 layers)" in lines) == fuse
    model.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    described = model_info(config, tmp_path)
    assert described["unfused"] == unfused
    options = ["--device", "cpu", "--max-total-tokens", "100", *([] if fuse else ["--no-fuse"])]
    printed = CliRunner().invoke(app, ["info", "--model", str(tmp_path), *options]).stdout
    assert f"\nunfused       4 layers, {next(iter(unfused))}\n" in printed


@pytest.mark.slow
def test_the_plans_of_all_families_are_what_their_layers_compute(tmp_path: Path) -> None:
    """Of all that docs/models.md lists as running, on the transformers that is installed."""
    wrong = []
    for name, variant in [*cases(), *((name, "wrapper") for name in wrapper_cases())]:
        is_wrapper, directory = variant == "wrapper", tmp_path / f"{name}-{variant}"
        config = tiny_wrapper(name) if is_wrapper else tiny(name, variant)
        config.save_pretrained(directory)
        for file in ("model.safetensors", "tokenizer.json"):
            (directory / file).touch()
        try:
            load_supported_config(directory)
        except UnsupportedModel:
            continue
        if is_wrapper:
            save_random(config, directory)
            model = load_model(directory, torch.device("cpu"), "auto", lambda line: None)
        else:
            model = random_weights(config)
        wrong += [f"{name} {variant}: {one}" for one in differences(model)]
    assert not wrong, "\n".join(wrong)
