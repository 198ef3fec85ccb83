"""UlyssesSPDataLoaderAdapter: every rank's batches, cut for all ranks."""
from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from deepspeed import comm
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPDataLoaderAdapter
from tests.support.pool import distributed


def batch(start: int, length: int, **more: Any) -> dict[str, Any]:
    tokens = torch.arange(start, start + length)[None]
    return {"input_ids": tokens, "labels": tokens.clone(), **more}


def adapter(batches: list[dict[str, Any]]) -> UlyssesSPDataLoaderAdapter:
    return UlyssesSPDataLoaderAdapter(DataLoader(batches, batch_size=None), comm.get_rank(), comm.get_world_group(),
                                      comm.get_world_size(), torch.device("cpu"))


@distributed(2)
def test_pieces() -> None:
    rank = comm.get_rank()
    more = {"attention_mask": torch.tensor([[True, True, False, False]]), "name": f"of {rank}",
            "count": torch.tensor([7 + rank]), "inputs_embeds": torch.arange(4 * 3, dtype=torch.bfloat16).view(1, 4, 3)}
    loader = adapter([batch(100 * rank, 4, **more), batch(100 * rank + 50, 6)])  # lengths differ between batches
    assert len(loader) == 4 and loader.dl.batch_size is None
    pieces = list(loader)
    own = slice(2 * rank, 2 * rank + 2)
    for source, piece in enumerate(pieces[:2]):
        assert piece["input_ids"].tolist() == [[100 * source + token for token in range(4)[own]]]
        assert piece["position_ids"].tolist() == [list(range(4)[own])] and "labels" not in piece
        assert piece["shift_labels"].tolist() == [[[100 * source + 1, 100 * source + 2, 100 * source + 3, -100][token]
                                                   for token in range(4)[own]]]
        assert piece["attention_mask"].tolist() == [[rank == 0] * 2] and piece["attention_mask"].dtype == torch.bool
        assert piece["name"] == f"of {source}" and piece["count"].item() == 7 + source
        assert torch.equal(piece["inputs_embeds"], more["inputs_embeds"][:, own])
    assert pieces[3]["input_ids"].tolist() == [[150 + token for token in range(6)[3 * rank:3 * rank + 3]]]
    assert len(list(loader)) == 4  # a second epoch


@distributed(2)
def test_batches_of_different_lengths_on_the_ranks() -> None:
    rank = comm.get_rank()
    pieces = list(adapter([batch(0, 4 + 2 * rank)]))
    assert [piece["input_ids"].shape[1] for piece in pieces] == [2, 3]


@distributed(2)
def test_positions_and_shifted_labels_are_kept() -> None:
    given = {"input_ids": torch.arange(4)[None], "position_ids": torch.tensor([[0, 1, 0, 1]]),
             "shift_labels": torch.tensor([[9, -100, 8, -100]])}
    piece = next(iter(adapter([given])))
    own = slice(2 * comm.get_rank(), 2 * comm.get_rank() + 2)
    assert torch.equal(piece["position_ids"], given["position_ids"][:, own])
    assert torch.equal(piece["shift_labels"], given["shift_labels"][:, own])
    directions = {"input_ids": torch.arange(4)[None], "position_ids": torch.arange(12).view(3, 1, 4)}
    assert torch.equal(next(iter(adapter([directions])))["position_ids"], directions["position_ids"][..., own])


@distributed(2)
def test_a_new_loader_of_the_adapter_gets_pieces_too() -> None:
    loader = adapter([batch(100 * comm.get_rank(), 4)])
    assert isinstance(loader.dataset, torch.utils.data.IterableDataset)
    again = DataLoader(loader.dataset, batch_size=loader.batch_size, num_workers=loader.num_workers,
                       collate_fn=loader.collate_fn, drop_last=loader.drop_last)
    assert [piece["input_ids"].shape for piece in again] == [(1, 2), (1, 2)]
    assert copy.copy(loader).sp_world_size == 2


@distributed(2)
def test_refusals_on_every_rank() -> None:
    rank = comm.get_rank()
    with pytest.raises(ValueError, match="rank 1: a batch has sequences of 5 tokens.*pad_to_multiple_of=2"):
        list(adapter([batch(0, 4 + rank)]))
    with pytest.raises(ValueError, match=r"loaders of ranks \[0\]"):
        list(adapter([batch(0, 4)] * (1 + rank)))
    with pytest.raises(ValueError, match="rank 0: .*mask of token pairs"):
        list(adapter([batch(0, 4, **({"attention_mask": torch.ones(1, 1, 4, 4)} if rank == 0 else {}))]))
    with pytest.raises(ValueError, match="a batch is a list"):
        list(adapter([[torch.zeros(1, 4)]]))
    with pytest.raises(ValueError, match="input_ids"):
        list(adapter([{"other": torch.zeros(1, 4)}]))
