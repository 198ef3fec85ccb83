"""Named random-number states: dropout that differs between model-parallel ranks beside dropout that is equal on them."""
from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from deepspeed.accelerator import get_accelerator
from deepspeed.errors import UsageError

MODEL_PARALLEL_RNG = "model-parallel-rng"


class CudaRNGStatesTracker:
    """Keeps states of the device's generator by name; `fork` runs code on one of them.

    The device is the accelerator's, so on a machine without GPUs the states are those of the CPU generator.
    """

    def __init__(self) -> None:
        self._states: dict[str, torch.Tensor] = {}
        self._seeds: set[int] = set()

    def reset(self) -> None:
        """Forget all names and seeds."""
        self._states, self._seeds = {}, set()

    def get_states(self) -> dict[str, torch.Tensor]:
        """Return the states by name, in a dict of its own: uint8 tensors that `fork` replaces and never changes."""
        return dict(self._states)

    def set_states(self, states: Mapping[str, torch.Tensor]) -> None:
        """Take states that `get_states` gave."""
        self._states = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Keep a state that starts from `seed` under `name`. The generator itself is left as it is.

        Raises: UsageError for a name or a seed that was added before.
        """
        if name in self._states:
            raise UsageError(f"random state {name!r} is added a second time. Choose another name, or reset() the "
                             "tracker first.")
        if seed in self._seeds:
            raise UsageError(f"random state {name!r} gets seed {seed}, which another state has, so both would give the same "
                             "numbers. Choose another seed, or reset() the tracker first.")
        accelerator = get_accelerator()
        outer = accelerator.get_rng_state()
        accelerator.manual_seed(seed)
        self._states[name] = accelerator.get_rng_state()
        self._seeds.add(seed)
        accelerator.set_rng_state(outer)

    @contextmanager
    def fork(self, name: str = MODEL_PARALLEL_RNG) -> Iterator[None]:
        """Run the body on the state kept under `name`, which moves on; the state outside stays where it was.

        Raises: UsageError for a name that was never added.
        """
        if name not in self._states:
            raise UsageError(f"random state {name!r} was never added (there are: {sorted(self._states) or 'none'}). Call "
                             "model_parallel_cuda_manual_seed(seed), or add(name, seed), first.")
        accelerator = get_accelerator()
        outer = accelerator.get_rng_state()
        accelerator.set_rng_state(self._states[name])
        try:
            yield
        finally:
            self._states[name] = accelerator.get_rng_state()
            accelerator.set_rng_state(outer)


_tracker = CudaRNGStatesTracker()


def get_cuda_rng_tracker() -> CudaRNGStatesTracker:
    """Return the tracker of this process."""
    return _tracker
