"""The batch triangle: train_batch_size = train_micro_batch_size_per_gpu * gradient_accumulation_steps * DP size."""

from __future__ import annotations

from typing import Any

from deepspeed import comm
from deepspeed.errors import DeepSpeedConfigError

BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def derive_batch_sizes(train: int | None, micro: int | None, steps: int | None,
                       data_parallel_size: int) -> tuple[int, int, int]:
    """Returns (train batch size, micro batch size, accumulation steps), deriving those that are None.

    train: samples per optimizer step over all ranks; micro: samples per rank and backward pass; steps: backward passes
    per optimizer step.
    Raises: DeepSpeedConfigError with the three values if they do not fit, or if train and micro are both absent."""
    if train is None and micro is None:
        raise DeepSpeedConfigError("train_batch_size and train_micro_batch_size_per_gpu are both absent; "
                                   "give at least one of them as a number")
    given = (train, micro, steps)
    if train is None:
        steps = steps or 1
        train = micro * steps * data_parallel_size
    elif micro is None:
        steps = steps or 1
        micro = train // data_parallel_size // steps
    elif steps is None:
        steps = train // micro // data_parallel_size
    if min(train, micro, steps) < 1 or train != micro * steps * data_parallel_size:
        raise DeepSpeedConfigError(_mismatch_text(given, (train, micro, steps), data_parallel_size))
    return train, micro, steps


def derive_tensor_parallel_sizes(train: int | None, micro: int | None, steps: int | None, ranks: int,
                                 degree: int) -> tuple[int, int, int]:
    """Returns the same three where `degree` ranks share each sample, and train is what all ranks really train on.

    ranks: data-parallel size as if every rank had samples of its own. Clients, and upstream, multiply with that: sizes
    that fit it are taken so. Sizes that fit ranks / degree are taken as they are.
    Raises: DeepSpeedConfigError if they fit neither, or if `degree` does not divide `ranks`."""
    if degree == 1:
        return derive_batch_sizes(train, micro, steps, ranks)
    if ranks % degree:
        raise DeepSpeedConfigError(f"tensor_parallel.autotp_size is {degree}, which does not divide the {ranks} ranks")
    try:
        _, micro, steps = derive_batch_sizes(train, micro, steps, ranks)
    except DeepSpeedConfigError:
        _, micro, steps = derive_batch_sizes(train, micro, steps, ranks // degree)
    return micro * steps * (ranks // degree), micro, steps


def names_data_parallel_size(mpu: Any, mesh_device: Any) -> bool:
    """Returns whether the client says how many ranks see different samples; else it follows from the other sizes."""
    return hasattr(mpu, "get_data_parallel_world_size") or (mpu is None and mesh_device is not None)


def _mismatch_text(given: tuple[int | None, ...], derived: tuple[int, int, int], data_parallel_size: int) -> str:
    values = ", ".join(f"{key} = {value}{'' if wanted is not None else ' (derived)'}"
                       for key, value, wanted in zip(BATCH_KEYS, derived, given))
    train, micro, steps = derived
    return (f"Check batch related parameters: {values} do not fit data-parallel size {data_parallel_size} "
            f"({train} is not {micro} * {steps} * {data_parallel_size}); change one of them, or leave one out")


def find_data_parallel_size(mpu: Any, mesh_device: Any, sequence_parallel_size: int, world_size: int | None) -> int:
    """Returns the number of ranks that see different samples.

    mpu: object with get_data_parallel_world_size or get_sequence_parallel_world_size, or None. mesh_device: DeviceMesh
    with a dimension "data_parallel", or None. world_size: number of ranks of the job; None asks the process group, and
    counts 1 if there is none.
    Raises: DeepSpeedConfigError if the sequence-parallel size does not divide the world."""
    if hasattr(mpu, "get_data_parallel_world_size"):
        return mpu.get_data_parallel_world_size()
    if mpu is None and mesh_device is not None:
        return _mesh_size(mesh_device)
    if hasattr(mpu, "get_sequence_parallel_world_size"):
        sequence_parallel_size = mpu.get_sequence_parallel_world_size()
    world = world_size if world_size is not None else _process_group_size()
    if world % sequence_parallel_size != 0:
        raise DeepSpeedConfigError(f"sequence_parallel_size is {sequence_parallel_size}, which does not divide the "
                                   f"world size {world}")
    return world // sequence_parallel_size


def _mesh_size(mesh_device: Any) -> int:
    names = mesh_device.mesh_dim_names or ()
    if "data_parallel" not in names:
        raise DeepSpeedConfigError(f'mesh_device has the dimensions {list(names)} and needs one named "data_parallel"')
    return mesh_device.size(names.index("data_parallel"))


def _process_group_size() -> int:
    return comm.get_world_size() if comm.is_initialized() else 1
