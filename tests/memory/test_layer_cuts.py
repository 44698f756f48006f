"""How the layers of models are cut into groups: the lanes of a slot, and the slots of a token in each class."""

import pytest
import torch

from lightkv import KVSpec
from lightkv.layer_groups import FULL, LayerGroups, Lifetime


def window(size: int) -> Lifetime:
    return Lifetime("window", size)


MODELS = {
    "Gemma-3-270M": ([*[window(512)] * 5, FULL] * 3, 3, (1, 5)),
    "Gemma-3-12B": ([*[window(1024)] * 5, FULL] * 8, 8, (1, 5)),
    "gpt-oss-20b": ([window(128), FULL] * 12, 12, (1, 1)),
    "Llama 4": ([*[Lifetime("chunk", 8192)] * 3, FULL] * 12, 12, (1, 3)),
    "Cohere 2": ([*[window(4096)] * 3, FULL] * 8, 8, (1, 3)),
    "a full layer alone": ([*[window(512)] * 3, FULL], 1, (1, 3)),
    "three classes": ([FULL] * 2 + [window(64)] * 4 + [window(256)] * 6, 2, (1, 2, 3)),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_cut_without_a_rest_wastes_nothing(name: str) -> None:
    lifetimes, num_lanes, widths = MODELS[name]
    groups = LayerGroups.of(lifetimes)
    assert (groups.num_lanes, groups.widths, groups.waste()) == (num_lanes, widths, 0)
    check_cut(groups, lifetimes)


@pytest.mark.parametrize("num_windowed", range(1, 60, 7))
@pytest.mark.parametrize("num_full", [1, 5, 12])
def test_every_cut_has_each_layer_once_and_little_waste(num_full: int, num_windowed: int) -> None:
    lifetimes = [FULL] * num_full + [window(128)] * num_windowed
    groups = LayerGroups.of(lifetimes)
    check_cut(groups, lifetimes)
    assert groups.waste() < 0.12


def check_cut(groups: LayerGroups, lifetimes: list[Lifetime]) -> None:
    assert sorted(layer for one in groups.classes for layer in one.layers) == list(range(len(lifetimes)))
    for one in groups.classes:
        assert {lifetimes[layer] for layer in one.layers} == {one.lifetime}
        assert max(map(len, one.groups)) <= groups.num_lanes
    assert groups.classes[0].lifetime == FULL
    for layer, (group, lane) in groups.places.items():
        assert groups.groups[group][lane] == (layer,)


@pytest.mark.parametrize("lifetimes", [[FULL] * 4, [window(8)] * 4, [window(8), window(9)]])
def test_layers_of_one_lifetime_or_without_a_full_one_are_one_group(lifetimes: list[Lifetime]) -> None:
    groups = LayerGroups.of(lifetimes)
    assert groups.is_uniform
    assert (groups.num_lanes, groups.widths) == (len(lifetimes), (1,))


@pytest.mark.parametrize(
    ("lifetimes", "error", "said"),
    [
        ([Lifetime("window", 8)], ValueError, "1 lifetimes for 2 layers"),
        ([Lifetime(), "full"], TypeError, "Lifetime"),
        ([Lifetime("window", 0), Lifetime()], ValueError, "size"),
        ([Lifetime("full", 8), Lifetime()], ValueError, "no size"),
        ([Lifetime("past", 8), Lifetime()], ValueError, "'past'"),  # type: ignore[arg-type]
    ],
)
def test_a_spec_refuses_lifetimes_that_are_none(lifetimes: list[Lifetime], error: type, said: str) -> None:
    with pytest.raises(error, match=said):
        KVSpec(2, 1, 8, 8, torch.float32, lifetimes=lifetimes)


def test_classes_are_told_in_words() -> None:
    groups = LayerGroups.of([window(1024)] * 3 + [FULL])
    assert list(map(str, groups.classes)) == [
        "1 layer sees all tokens (1 slot a token)",
        "3 layers see the last 1,024 tokens (3 slots a token)",
    ]
