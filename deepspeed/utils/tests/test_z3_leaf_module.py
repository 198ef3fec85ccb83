"""Leaf marks: set and removed by class, by name and by suffix."""

import pytest
from torch import nn

from deepspeed.utils.z3_leaf_module import (
    get_z3_leaf_modules,
    set_z3_leaf_module,
    set_z3_leaf_modules,
    set_z3_leaf_modules_by_name,
    set_z3_leaf_modules_by_suffix,
    unset_z3_leaf_modules,
    z3_leaf_module,
    z3_leaf_parameter,
)


class Expert(nn.Linear):
    pass


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Linear(2, 2)
        self.experts = Expert(2, 2)


@pytest.fixture
def model() -> nn.Module:
    return nn.Sequential(Layer(), Layer())


@pytest.mark.parametrize("wanted", [[Expert], ["Expert"], [f"{__name__}.Expert"], Expert, "Expert"])
def test_classes_as_types_and_names(model: nn.Module, wanted: object) -> None:
    experts = [model[0].experts, model[1].experts]
    assert set_z3_leaf_modules(model, wanted) == experts
    assert get_z3_leaf_modules(model) == experts
    assert z3_leaf_module(experts[0]) and not z3_leaf_module(model[0].mlp)
    assert unset_z3_leaf_modules(model, wanted) == experts
    assert get_z3_leaf_modules(model) == []


def test_subclasses_match(model: nn.Module) -> None:
    assert set_z3_leaf_modules(model, ["Linear"]) == set_z3_leaf_modules(model, [nn.Linear])
    assert len(get_z3_leaf_modules(model)) == 4


def test_names_and_suffixes(model: nn.Module) -> None:
    assert set_z3_leaf_modules_by_name(model, ["0.mlp", "7.mlp"]) == ([model[0].mlp], ["7.mlp"])
    assert set_z3_leaf_modules_by_suffix(model, ["experts", "router"]) == (
        [model[0].experts, model[1].experts],
        ["router"],
    )
    assert len(get_z3_leaf_modules(model)) == 3
    set_z3_leaf_modules_by_suffix(model, "experts", flag=False)
    assert get_z3_leaf_modules(model) == [model[0].mlp]


def test_single_module(model: nn.Module) -> None:
    set_z3_leaf_module(model[0], True)
    assert get_z3_leaf_modules(model) == [model[0]]
    set_z3_leaf_module(model[0], False)
    assert get_z3_leaf_modules(model) == []


def test_nothing_found(model: nn.Module) -> None:
    with pytest.raises(ValueError, match="no module of Sequential has the class 'Nowhere', Conv2d"):
        set_z3_leaf_modules(model, ["Nowhere", nn.Conv2d])
    with pytest.raises(ValueError, match="has the name 'a'"):
        set_z3_leaf_modules_by_name(model, ["a"])
    with pytest.raises(ValueError, match="has the name suffix 'a'"):
        set_z3_leaf_modules_by_suffix(model, ["a"])
    assert set_z3_leaf_modules(model, ["Nowhere"], raise_if_not_found=False) == []
    assert unset_z3_leaf_modules(model, [], raise_if_not_found=False) == []
    assert set_z3_leaf_modules_by_name(model, ["a"], raise_if_not_found=False) == ([], ["a"])
    with pytest.raises(ValueError, match="a module class is given as 3"):
        set_z3_leaf_modules(model, [3])


def test_parameters_know_their_leaf(model: nn.Module) -> None:
    weight = model[0].experts.weight
    assert not z3_leaf_parameter(weight)
    weight.ds_z3_leaf_module = model[0].experts
    assert z3_leaf_parameter(weight)
