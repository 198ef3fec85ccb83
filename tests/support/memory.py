"""What the parts of an engine hold in memory."""

import torch

import deepspeed


def held_storages(engine: deepspeed.DeepSpeedEngine) -> dict[int, int]:
    """Return the bytes of every storage that the engine's parts and its model hold, by address; empty ones left out."""
    tensors: list[torch.Tensor | None] = [*(p.data for p in engine.module.parameters()), *engine.module.buffers()]
    for bucket in engine._parts.buckets:
        tensors += [bucket.storage.tensor, bucket.shard, bucket._tripwire, bucket._grad_full, bucket._shard_grad,
                    bucket._wire_buffer, *bucket._staging._free]
    tensors += engine.optimizer._masters.values()
    for states in engine.optimizer.element_states().values():
        tensors += states.values()
    storages = [tensor.untyped_storage() for tensor in tensors if tensor is not None]
    return {storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}
