"""A stand-in for an inference server: a model of its own, which takes weights one after another."""
from __future__ import annotations

from collections.abc import Iterable

import torch
from transformers import LlamaConfig, LlamaForCausalLM


class InferenceServer:
    """Holds a whole model in `dtype` on `device`; its weights are random until `load_weights` brings others."""

    def __init__(self, folder: str, dtype: torch.dtype, device: torch.device):
        # The constructor itself, because from_config would shard the model over all ranks while a stage 3 configuration
        # is in force, and this one belongs to one rank.
        self._model = LlamaForCausalLM(LlamaConfig.from_pretrained(folder)).to(device, dtype).eval()

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> int:
        """Copy (name, full tensor) pairs into the model as they come; return how many came."""
        own = self._model.state_dict()
        count = 0
        for name, value in weights:
            own[name].copy_(value)
            count += 1
        return count

    def generate(self, ids: torch.Tensor, **options: object) -> torch.Tensor:
        """Return prompts (BT, int64) with their continuations."""
        # transformers would wait for other ranks otherwise while a stage 3 configuration is in force
        return self._model.generate(ids, synced_gpus=False, **options)
