"""Names of checkpoint files and of the keys in them: the one list.

Layout of a checkpoint directory: `latest` holds the tag to load by default; each tag has a folder. `MM` is the rank in the
model-parallel group, `D` the rank in the shard group:

    mp_rank_MM_model_states.pt                        stages 0-2: weights, buffers, counters, schedule (stage 0: optimizer)
    zero_pp_rank_D_mp_rank_MM_model_states.pt         stage 3: the same without weights, and this rank's frozen shards
    [bf16_]zero_pp_rank_D_mp_rank_MM_optim_states.pt  stages 1-3: this rank's fp32 masters and optimizer state
    rng_states.pt                                     random states of every rank
    checkpoint_manifest.json                          sizes and checksums of all the above
"""
from __future__ import annotations

LATEST = "latest"
LATEST_UNIVERSAL = "latest_universal"
MANIFEST = "checkpoint_manifest.json"
RNG_STATES = "rng_states.pt"
ZERO_TO_FP32 = "zero_to_fp32.py"

# Beside upstream's keys, in `optimizer_state_dict` (stages 1-3) or `optimizer` (stage 0): parameter name -> state key ->
# value, for what the flat tensors cannot carry: scalars that differ inside a param group, and state of other shapes.
EXTRA_STATE = "extra_state"
PARAM_NAMES = "param_names"  # in every param group; torch's own name for it

# Keys of a model-states file that belong to the engine and are not part of the client state.
ENGINE_KEYS = ("module", "sparse_tensor_module_names", "csr_tensor_module_names", "skipped_steps", "global_steps",
               "dp_world_size", "mp_world_size", "data_sampler", "random_ltd", "lr_scheduler", "optimizer")
RESERVED_KEYS = ("checkpoint_parallel_dimensions",)


def model_states_name(mp_rank: int) -> str:
    """Return the name of the weights file of stages 0 to 2."""
    return f"mp_rank_{mp_rank:02d}_model_states.pt"


def zero_model_states_name(dp_rank: int, mp_rank: int) -> str:
    """Return the name of a rank's model file at stage 3."""
    return f"zero_pp_rank_{dp_rank}_mp_rank_{mp_rank:02d}_model_states.pt"


def optim_states_name(dp_rank: int, mp_rank: int, is_bf16: bool) -> str:
    """Return the name of a rank's optimizer file at stages 1 to 3."""
    return f"{'bf16_' if is_bf16 else ''}zero_pp_rank_{dp_rank}_mp_rank_{mp_rank:02d}_optim_states.pt"
