"""The batch triangle and the data-parallel size behind it."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.errors import DeepSpeedConfigError
from deepspeed.runtime.batch_config import derive_batch_sizes, find_data_parallel_size
from deepspeed.runtime.config import DeepSpeedConfig

KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
sizes = st.integers(min_value=1, max_value=512)


def triple(config: dict, world_size: int) -> tuple[int, int, int]:
    parsed = DeepSpeedConfig(config, world_size=world_size)
    return tuple(getattr(parsed, key) for key in KEYS)


@pytest.mark.parametrize("given_values, expected", [
    ((32, None, None), (32, 16, 1)),
    ((None, 4, 2), (16, 4, 2)),
    ((32, 4, None), (32, 4, 4)),
    ((32, None, 4), (32, 4, 4)),
    ((None, 4, None), (8, 4, 1)),
    ((32, 4, 4), (32, 4, 4)),
])
def test_missing_member_is_derived_at_two_ranks(given_values: tuple, expected: tuple) -> None:
    config = {key: value for key, value in zip(KEYS, given_values) if value is not None}
    assert triple(config, world_size=2) == expected
    assert triple(dict(zip(KEYS, given_values)) | {key: "auto" for key in KEYS if key not in config},
                  world_size=2) == expected


def test_indivisible_batch_names_the_values() -> None:
    with pytest.raises(DeepSpeedConfigError, match="Check batch related parameters") as caught:
        triple({"train_batch_size": 30, "train_micro_batch_size_per_gpu": 4}, world_size=2)
    assert isinstance(caught.value, AssertionError)
    for shown in ("train_batch_size = 30", "train_micro_batch_size_per_gpu = 4", "size 2", "(derived)"):
        assert shown in str(caught.value)


@pytest.mark.parametrize("config", [{}, {"gradient_accumulation_steps": 2}, {"train_batch_size": "auto"},
                                    {"train_batch_size": None}])
def test_neither_batch_size_is_an_error(config: dict) -> None:
    with pytest.raises(DeepSpeedConfigError, match="both absent"):
        triple(config, world_size=2)


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("value", [0, -1, 1.5, "8", True, []])
def test_impossible_sizes_are_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(DeepSpeedConfigError, match=f"{key} is "):
        triple({"train_batch_size": 8, key: value}, world_size=1)


def test_fewer_samples_than_ranks_is_an_error() -> None:
    with pytest.raises(DeepSpeedConfigError, match="train_batch_size = 2"):
        triple({"train_batch_size": 2}, world_size=4)


@given(sizes, sizes, sizes)
def test_any_two_values_fix_the_third(micro: int, steps: int, ranks: int) -> None:
    train = micro * steps * ranks
    full = (train, micro, steps)
    assert derive_batch_sizes(*full, ranks) == full
    for absent in range(3):
        values = [None if place == absent else value for place, value in enumerate(full)]
        assert derive_batch_sizes(*values, ranks) == full


@given(st.one_of(st.none(), sizes), st.one_of(st.none(), sizes), st.one_of(st.none(), sizes), sizes)
def test_result_keeps_what_was_given_and_the_product(train: int | None, micro: int | None, steps: int | None,
                                                     ranks: int) -> None:
    try:
        result = derive_batch_sizes(train, micro, steps, ranks)
    except DeepSpeedConfigError:
        return
    assert result[0] == result[1] * result[2] * ranks
    assert min(result) >= 1
    assert all(before in (None, after) for before, after in zip((train, micro, steps), result))


def test_data_parallel_size_comes_from_the_first_that_knows_it() -> None:
    data_parallel = SimpleNamespace(get_data_parallel_world_size=lambda: 3, get_sequence_parallel_world_size=lambda: 2)
    sequence_parallel = SimpleNamespace(get_sequence_parallel_world_size=lambda: 2)
    mesh = SimpleNamespace(mesh_dim_names=("data_parallel", "sequence_parallel"), size=lambda place: (5, 2)[place])
    assert find_data_parallel_size(data_parallel, mesh, 1, 8) == 3
    assert find_data_parallel_size(sequence_parallel, None, 1, 8) == 4
    assert find_data_parallel_size(None, mesh, 4, 8) == 5
    assert find_data_parallel_size(None, None, 4, 8) == 2
    assert find_data_parallel_size(None, None, 1, None) == 1


def test_sequence_parallel_size_must_divide_the_world() -> None:
    with pytest.raises(DeepSpeedConfigError, match="sequence_parallel_size is 3"):
        triple({"train_batch_size": 8, "sequence_parallel_size": 3}, world_size=8)


def test_mesh_without_the_dimension_is_named() -> None:
    mesh = SimpleNamespace(mesh_dim_names=("dp",), size=lambda place: 1)
    with pytest.raises(DeepSpeedConfigError, match="data_parallel"):
        find_data_parallel_size(None, mesh, 1, None)
