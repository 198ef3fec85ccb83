"""Several tensors in one reduce-scatter."""

import pytest
import torch

from deepspeed import comm
from deepspeed.errors import UsageError
from deepspeed.runtime.comm.coalesced_collectives import reduce_scatter_coalesced
from tests.support.pool import distributed


@distributed(world_size=[1, 2, 3])
def test_chunks_of_the_mean(world_size):
    rank = comm.get_rank()
    shapes = [(2, 3), (1,), (5,), (0,), (4,)]
    tensors = [torch.arange(torch.Size(shape).numel()).view(shape) + 6.0 * rank for shape in shapes]
    before = [tensor.clone() for tensor in tensors]
    parts = reduce_scatter_coalesced(tensors)
    for part, shape in zip(parts, shapes, strict=True):
        numel = torch.Size(shape).numel()
        chunk = -(-numel // world_size)
        mean = torch.arange(numel) + 6.0 * (world_size - 1) / 2
        torch.testing.assert_close(part, mean[rank * chunk : (rank + 1) * chunk])
    assert all(tensor.equal(old) for tensor, old in zip(tensors, before)), "the inputs stay"


@distributed(world_size=2)
def test_half_precision_sums_do_not_overflow():
    [part] = reduce_scatter_coalesced([torch.full((4,), 60000.0, dtype=torch.float16)])
    assert part.tolist() == [60000.0, 60000.0]


@distributed(world_size=2)
def test_one_dtype_and_no_tensors():
    assert reduce_scatter_coalesced([]) == []
    with pytest.raises(UsageError, match="float16 on cpu, torch.float32 on cpu"):
        reduce_scatter_coalesced([torch.ones(1), torch.ones(1, dtype=torch.float16)])
