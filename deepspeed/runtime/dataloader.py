"""Data loaders: one that gives every rank its share of a dataset, and one that starts over at the end."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized

from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler
from torch.utils.data.distributed import DistributedSampler

from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.errors import FeatureNotAvailableError, UsageError
from deepspeed.utils.timer import ThroughputTimer

ACCELERATOR_WORKERS = 2


class RepeatingLoader:
    """An endless iterator over `loader`, which is started anew whenever it ends.

    Before each new pass the loader, or else its sampler, is told the pass number through `set_epoch` if it has that
    method, so that a shuffling DistributedSampler gives another order. `len` is that of the loader.
    """

    def __init__(self, loader: Iterable) -> None:
        self.loader = loader
        self.data_iter = iter(loader)
        self._epoch = 0

    def __iter__(self) -> "RepeatingLoader":
        return self

    def __next__(self) -> object:
        """The next item. Raises: UsageError when a whole pass over the loader yields nothing."""
        try:
            return next(self.data_iter)
        except StopIteration:
            pass
        self._restart()
        try:
            return next(self.data_iter)
        except StopIteration:
            raise UsageError(
                "RepeatingLoader: the loader yields no items when it is started anew. It is empty (a batch "
                "larger than the dataset with drop_last?) or an iterator that can run only once."
            ) from None

    def __len__(self) -> int:
        return len(self.loader)

    def _restart(self) -> None:
        self._epoch = self.loader.next_epoch if isinstance(self.loader, DeepSpeedDataLoader) else self._epoch + 1
        # The loader may be anybody's: only what it offers can tell.
        for owner in (self.loader, getattr(self.loader, "sampler", None)):
            set_epoch = getattr(owner, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(self._epoch)
                break
        self.data_iter = iter(self.loader)


class DeepSpeedDataLoader:
    """Batches of this rank's share of `dataset`; every `iter()` is a new pass.

    batch_size: samples per batch of one rank (the micro batch).
    pin_memory: page-locked batches; without effect on the CPU accelerator, which has no copies to speed up.
    local_rank: kept for callers; the share follows from the data-parallel rank.
    tput_timer: started when a batch is asked for.
    num_local_io_workers: worker processes. None means 2 where batches must reach an accelerator and 0 on the CPU
        accelerator, where starting processes costs more than reading small data sets.
    data_sampler: order of the samples. None shuffles with a DistributedSampler over data_parallel_world_size and _rank
        (None: all ranks), in another order on every pass; an IterableDataset has no sampler and shares itself out.
    dataloader_drop_last: leave out the last batch when it is smaller than the others.
    deepspeed_dataloader_config: curriculum settings; not available yet.

    `post_process_func(batch, state)`, if set, replaces each batch by what it returns; state is {"epoch": pass number}.
    Raises: FeatureNotAvailableError for curriculum settings.
    """

    def __init__(
        self,
        dataset: Dataset,
        batch_size: int,
        pin_memory: bool,
        local_rank: int,
        tput_timer: ThroughputTimer | None,
        collate_fn: Callable | None = None,
        num_local_io_workers: int | None = None,
        data_sampler: Sampler | None = None,
        data_parallel_world_size: int | None = None,
        data_parallel_rank: int | None = None,
        dataloader_drop_last: bool = False,
        deepspeed_dataloader_config: Mapping[str, object] | None = None,
    ) -> None:
        if deepspeed_dataloader_config:
            raise FeatureNotAvailableError(
                f"deepspeed_dataloader_config has {', '.join(deepspeed_dataloader_config)}: curriculum "
                "learning in the data loader is not available yet. Leave it empty."
            )
        has_accelerator = get_accelerator().device_name() != "cpu"
        self.dataset = dataset
        self.batch_size = batch_size
        self.pin_memory = pin_memory and has_accelerator
        self.local_rank = local_rank
        self.tput_timer = tput_timer
        self.collate_fn = collate_fn
        default_workers = ACCELERATOR_WORKERS if has_accelerator else 0
        self.num_local_io_workers = default_workers if num_local_io_workers is None else num_local_io_workers
        self.dataloader_drop_last = dataloader_drop_last
        self.post_process_func: Callable[[object, dict[str, int]], object] | None = None
        self._owns_sampler = data_sampler is None and not isinstance(dataset, IterableDataset)
        self.data_sampler = data_sampler
        if self._owns_sampler:
            self.data_sampler = _shuffling_sampler(dataset, data_parallel_world_size, data_parallel_rank)
        self._world_size = data_parallel_world_size or (dist.get_world_size() if dist.is_initialized() else 1)
        self._next_epoch = 0
        self._samples_to_skip = 0  # of this rank, at the beginning of the next pass
        self._samples_taken: int | None = None  # of this rank, in the pass before `_next_epoch`; None: that is not running

    def __iter__(self) -> Iterator:
        """A new pass; the default sampler's order follows the number of the pass, which begins with the first batch."""
        epoch = self._next_epoch
        self._next_epoch += 1
        skipped, self._samples_to_skip = self._samples_to_skip, 0
        self._samples_taken = skipped
        if self._owns_sampler:
            self.data_sampler.set_epoch(epoch)
        batches = iter(self._new_dataloader(skipped))
        if self.data_sampler is None:  # an IterableDataset has no places to go to
            batches = itertools.islice(batches, skipped // self.batch_size, None)
        yield from self._batches(batches, epoch)

    @property
    def next_epoch(self) -> int:
        """The number of the next pass."""
        return self._next_epoch

    def state_dict(self) -> dict[str, int]:
        """Return where the run stands in the data: the pass, and the samples that all ranks took of it together."""
        if self._samples_taken is None:
            return {"epoch": self._next_epoch, "consumed_samples": self._samples_to_skip * self._world_size}
        return {"epoch": self._next_epoch - 1, "consumed_samples": self._samples_taken * self._world_size}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Make the next pass go on where `state_dict` of a run on any number of ranks stood."""
        self._next_epoch = state["epoch"]
        self._samples_to_skip = state["consumed_samples"] // self._world_size
        self._samples_taken = None

    def __len__(self) -> int:
        """Batches per pass. Raises: TypeError for an IterableDataset without a length."""
        samples: Sized = self.dataset if self.data_sampler is None else self.data_sampler
        batches = len(samples) / self.batch_size
        return math.floor(batches) if self.dataloader_drop_last else math.ceil(batches)

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass number `epoch`, for the sampler too if it wants to know."""
        if epoch != self._next_epoch:
            self._samples_to_skip = 0  # they were taken of another pass
        self._next_epoch = epoch
        set_epoch = getattr(self.data_sampler, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)

    def _new_dataloader(self, skipped: int) -> DataLoader:
        sampler = self.data_sampler
        return DataLoader(
            self.dataset,
            batch_size=self.batch_size,
            sampler=_Rest(sampler, skipped) if skipped and sampler is not None else sampler,
            pin_memory=self.pin_memory,
            collate_fn=self.collate_fn,
            num_workers=self.num_local_io_workers,
            drop_last=self.dataloader_drop_last,
        )

    def _batches(self, batches: Iterator, epoch: int) -> Iterator:
        while True:
            if self.tput_timer is not None:
                self.tput_timer.start()
            try:
                batch = next(batches)
            except StopIteration:
                return
            self._samples_taken += self.batch_size
            yield batch if self.post_process_func is None else self.post_process_func(batch, {"epoch": epoch})


class _Rest(Sampler):
    """The samples of `sampler` from position `start` on."""

    def __init__(self, sampler: Sampler, start: int) -> None:
        self.sampler, self.start = sampler, start

    def __iter__(self) -> Iterator:
        return itertools.islice(iter(self.sampler), self.start, None)

    def __len__(self) -> int:
        return max(len(self.sampler) - self.start, 0)


def _shuffling_sampler(dataset: Dataset, world_size: int | None, rank: int | None) -> DistributedSampler:
    is_communicating = dist.is_initialized()
    if world_size is None:
        world_size = dist.get_world_size() if is_communicating else 1
    if rank is None:
        rank = dist.get_rank() if is_communicating else 0
    return DistributedSampler(dataset, num_replicas=world_size, rank=rank)
