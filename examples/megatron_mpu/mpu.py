"""Which ranks share a layer and which see different data: the object that `deepspeed.initialize(mpu=...)` takes."""
from __future__ import annotations

from typing import Any

from deepspeed import comm


class ModelParallelUnit:
    """Neighbouring ranks share each layer; ranks at the same place of different copies see different data.

    With 4 ranks and `size` 2 the model-parallel groups are [0, 1] and [2, 3], the data-parallel ones [0, 2] and [1, 3].
    The six getters are the whole protocol that DeepSpeed asks of a tensor-parallel job.
    """

    def __init__(self, size: int) -> None:
        world_size, self._rank = comm.get_world_size(), comm.get_rank()
        if world_size % size:
            raise SystemExit(f"--tensor-parallel is {size}, which does not divide the {world_size} ranks of this job.")
        self._size, self._world_size = size, world_size
        self._model_group = self._mine([range(start, start + size) for start in range(0, world_size, size)])
        self._data_group = self._mine([range(place, world_size, size) for place in range(size)])

    def _mine(self, partition: list[range]) -> Any:
        groups = [comm.new_group(list(ranks)) for ranks in partition]  # every rank makes every group, in the same order
        return next(group for group, ranks in zip(groups, partition) if self._rank in ranks)

    def get_model_parallel_group(self) -> Any:
        return self._model_group

    def get_model_parallel_rank(self) -> int:
        return self._rank % self._size

    def get_model_parallel_world_size(self) -> int:
        return self._size

    def get_data_parallel_group(self) -> Any:
        return self._data_group

    def get_data_parallel_rank(self) -> int:
        return self._rank // self._size

    def get_data_parallel_world_size(self) -> int:
        return self._world_size // self._size
