"""Sequence parallelism under its public path."""  # public path
from deepspeed.runtime.sequence_parallel.attention import UlyssesSPAttentionHF
from deepspeed.runtime.sequence_parallel.data import UlyssesSPDataLoaderAdapter
from deepspeed.runtime.sequence_parallel.tiling import (SequenceTiledCompute, TiledFusedLogitsLoss, TiledMLP,
                                                        sequence_tiled_compute)

__all__ = ["SequenceTiledCompute", "TiledFusedLogitsLoss", "TiledMLP", "UlyssesSPAttentionHF",
           "UlyssesSPDataLoaderAdapter", "sequence_tiled_compute"]
