"""Loaders: shares of ranks, orders of passes, restarts."""

import math

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, SequentialSampler

from deepspeed.errors import FeatureNotAvailableError, UsageError
from deepspeed.runtime.dataloader import DeepSpeedDataLoader, RepeatingLoader


class Numbers(Dataset):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(5))


class CountingTimer:
    def __init__(self) -> None:
        self.starts = 0

    def start(self) -> None:
        self.starts += 1


def make_loader(dataset: Dataset, batch_size: int = 2, **options: object) -> DeepSpeedDataLoader:
    arguments = {"pin_memory": True, "local_rank": 0, "tput_timer": None, **options}
    return DeepSpeedDataLoader(dataset, batch_size, **arguments)


def flatten(batches: object) -> list[int]:
    return torch.cat(list(batches)).tolist()


@pytest.mark.parametrize(
    ("count", "batch_size", "drop_last"), [(7, 2, False), (7, 2, True), (8, 2, True), (3, 5, False), (3, 5, True)]
)
def test_length_is_the_number_of_batches(count: int, batch_size: int, drop_last: bool) -> None:
    loader = make_loader(Numbers(count), batch_size, dataloader_drop_last=drop_last)
    assert len(loader) == len(list(loader)) == (count // batch_size if drop_last else math.ceil(count / batch_size))


def test_ranks_share_the_samples() -> None:
    shares = [
        flatten(make_loader(Numbers(10), data_parallel_world_size=2, data_parallel_rank=rank)) for rank in range(2)
    ]
    assert sorted(shares[0] + shares[1]) == list(range(10))
    assert sorted(shares[0]) != shares[0]  # shuffled


def test_every_pass_has_its_own_order() -> None:
    loader = make_loader(Numbers(50), 7)
    passes = [flatten(loader) for _ in range(3)]
    assert passes[0] != passes[1] != passes[2] != passes[0]
    assert all(sorted(order) == list(range(50)) for order in passes)
    loader.set_epoch(1)
    assert flatten(loader) == passes[1]
    assert flatten(loader) == passes[2]


def test_repeating_gives_the_orders_of_the_passes() -> None:
    expected = make_loader(Numbers(20), 5)
    orders = flatten(expected) + flatten(expected) + flatten(expected)
    repeating = RepeatingLoader(make_loader(Numbers(20), 5))
    assert len(repeating) == 4
    assert flatten(next(repeating) for _ in range(12)) == orders
    assert iter(repeating) is repeating


def test_repeating_tells_the_sampler_of_a_torch_loader() -> None:
    dataset = Numbers(20)
    repeating = RepeatingLoader(DataLoader(dataset, batch_size=20, sampler=DistributedSampler(dataset, 1, 0)))
    first, second = next(repeating), next(repeating)
    assert first.tolist() != second.tolist()
    assert sorted(second.tolist()) == list(range(20))


def test_repeating_restarts_a_list() -> None:
    repeating = RepeatingLoader([1, 2])
    assert [next(repeating) for _ in range(5)] == [1, 2, 1, 2, 1]


@pytest.mark.parametrize("loader", [[], iter([])])
def test_repeating_an_empty_loader_is_an_error(loader: object) -> None:
    with pytest.raises(UsageError, match="yields no items"):
        next(RepeatingLoader(loader))


def test_repeating_an_iterator_is_an_error_at_its_end() -> None:
    repeating = RepeatingLoader(iter([1]))
    assert next(repeating) == 1
    with pytest.raises(UsageError, match="only once"):
        next(repeating)


def test_given_sampler_and_collate_function_are_used() -> None:
    dataset = Numbers(5)
    loader = make_loader(dataset, data_sampler=SequentialSampler(dataset), collate_fn=lambda items: items)
    assert list(loader) == [[0, 1], [2, 3], [4]]
    assert list(loader) == [[0, 1], [2, 3], [4]]
    loader.set_epoch(3)


def test_a_given_samplers_epoch_is_the_callers() -> None:
    dataset = Numbers(30)
    sampler = DistributedSampler(dataset, 1, 0)
    loader = make_loader(dataset, data_sampler=sampler)
    assert flatten(loader) == flatten(loader)
    loader.set_epoch(1)
    assert sampler.epoch == 1


def test_iterable_dataset() -> None:
    loader = make_loader(Stream())
    assert flatten(loader) == [0, 1, 2, 3, 4]
    with pytest.raises(TypeError):
        len(loader)


def test_post_process_and_timer() -> None:
    timer = CountingTimer()
    dataset = Numbers(4)
    loader = make_loader(dataset, tput_timer=timer, data_sampler=SequentialSampler(dataset))
    loader.post_process_func = lambda batch, state: (batch.tolist(), state)
    assert list(loader) == [([0, 1], {"epoch": 0}), ([2, 3], {"epoch": 0})]
    assert next(iter(loader)) == ([0, 1], {"epoch": 1})
    assert timer.starts >= 3


def test_workers() -> None:
    assert make_loader(Numbers(4)).num_local_io_workers == 0
    assert make_loader(Numbers(4), num_local_io_workers=3).num_local_io_workers == 3
    assert sorted(flatten(make_loader(Numbers(4), num_local_io_workers=1))) == [0, 1, 2, 3]


def test_curriculum_is_refused_by_name() -> None:
    with pytest.raises(FeatureNotAvailableError, match="curriculum_learning"):
        make_loader(Numbers(4), deepspeed_dataloader_config={"curriculum_learning": {"enabled": True}})
    make_loader(Numbers(4), deepspeed_dataloader_config={})
