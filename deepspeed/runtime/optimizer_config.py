"""Configuration of the optimizer that the engine builds, and the parameters of each built-in optimizer."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from deepspeed.runtime.config_utils import Bool, Count, DeepSpeedConfigModel, Float, FreeDict, advice

Betas = Annotated[list[Float], Field(min_length=2, max_length=2)]


class OptimizerConfig(DeepSpeedConfigModel):
    """Optimizer built from the model parameters."""

    type: str | None = Field(None, description=(
        "Name of the optimizer: a built-in one in any case, or the exact name of a class of torch.optim."))
    params: FreeDict = Field({}, description="Keyword arguments handed to the optimizer constructor.")
    legacy_fusion: Bool = Field(False, description=(
        "Selects the older fused stepping path of the fp16 wrapper; accepted without numerical effect."))


class OptimizerParams(DeepSpeedConfigModel):
    """Constructor arguments; those declared here are checked, others are left to the constructor."""

    model_config = ConfigDict(extra="allow")


class _AdaptiveParams(OptimizerParams):
    """Parameters that the Adam and LAMB families share."""

    lr: Float = Field(1e-3, description="Base learning rate.", json_schema_extra=advice(minimum=0))
    betas: Betas = Field([0.9, 0.999], description="Two decay rates for the first and second moment averages.")
    eps: Float = Field(1e-8, json_schema_extra=advice(minimum=0), description=(
        "Constant added to the denominator of the update."))
    weight_decay: Float = Field(0.0, json_schema_extra=advice(minimum=0), description="Decay coefficient.")
    bias_correction: Bool = Field(True, description="Divides the moments by 1 - beta^t.")
    amsgrad: Bool = Field(False, description="Keeps the largest second moment; only with torch_adam.")


class AdamParams(_AdaptiveParams):
    """Parameters of Adam and AdamW."""

    torch_adam: Bool = Field(False, description="Builds torch.optim.Adam or AdamW instead of the fused or CPU class.")
    adam_w_mode: Bool = Field(True, description=(
        "True applies decoupled weight decay (AdamW); false adds weight_decay * p to the gradient (classic L2)."))
    set_grad_none: Bool = Field(True, description="`zero_grad` drops gradients instead of zeroing them.")
    fp32_optimizer_states: Bool = Field(True, description=(
        "Keeps moments in fp32 on the CPU; false stores them in the parameter dtype."))


class AdagradParams(OptimizerParams):
    """Parameters of Adagrad."""

    lr: Float = Field(1e-2, description="Base learning rate.", json_schema_extra=advice(minimum=0))
    eps: Float = Field(1e-10, json_schema_extra=advice(minimum=0), description=(
        "Constant added to the denominator of the update."))
    weight_decay: Float = Field(0.0, json_schema_extra=advice(minimum=0), description="Decay coefficient.")
    amsgrad: Bool = Field(False, description="Must stay false.")
    fp32_optimizer_states: Bool = Field(True, description=(
        "Keeps state in fp32 on the CPU; false stores it in the parameter dtype."))


class LionParams(OptimizerParams):
    """Parameters of Lion."""

    lr: Float = Field(1e-3, description="Base learning rate.", json_schema_extra=advice(minimum=0))
    betas: Betas = Field([0.9, 0.999], description="Two decay rates of the momentum.")
    weight_decay: Float = Field(0.0, json_schema_extra=advice(minimum=0), description="Decay coefficient.")
    set_grad_none: Bool = Field(True, description="`zero_grad` drops gradients instead of zeroing them.")
    fp32_optimizer_states: Bool = Field(True, description=(
        "Keeps momentum in fp32 on the CPU; false stores it in the parameter dtype."))


class MuonParams(OptimizerParams):
    """Parameters of Muon and of its auxiliary Adam group."""

    lr: Float = Field(0.02, description="Base learning rate.", json_schema_extra=advice(minimum=0))
    weight_decay: Float = Field(0.0, json_schema_extra=advice(minimum=0), description="Decay coefficient.")
    momentum: Float = Field(0.95, json_schema_extra=advice(minimum=0, maximum=1), description=(
        "Momentum of the orthogonalised update."))
    muon_lr: Float | None = Field(None, description="Overrides `lr` for the Muon parameter group.")
    adam_lr: Float | None = Field(None, description="Overrides `lr` for the auxiliary Adam group.")
    ns_method: Literal["gram", "standard"] = Field("gram", description="Form of the Newton-Schulz iteration.")


class LambParams(_AdaptiveParams):
    """Parameters of Lamb."""

    max_coeff: Float = Field(10.0, description="Upper bound of the trust coefficient.")
    min_coeff: Float = Field(0.01, description="Lower bound of the trust coefficient.")
    eps_inside_sqrt: Bool = Field(False, description="Adds eps inside the square root of the denominator.")


class _CompressedParams(_AdaptiveParams):
    """Parameters that all optimizers with compressed communication share."""

    eps_inside_sqrt: Bool = Field(False, description="Adds eps inside the square root of the denominator.")
    cuda_aware: Bool = Field(False, description="States that the MPI library can take device pointers directly.")
    comm_backend_name: str = Field(
        "nccl", json_schema_extra=advice(choices=("nccl", "mpi", "hccl", "compressed")), description=(
            "Backend that carries the compressed all-reduce."))


class OneBitAdamParams(_CompressedParams):
    """Parameters of OneBitAdam."""

    freeze_step: Count = Field(100_000, json_schema_extra=advice(minimum=1), description=(
        "Number of steps with full-precision averaging before compressed communication starts."))


class OneBitLambParams(OneBitAdamParams):
    """Parameters of OneBitLamb."""

    max_coeff: Float = Field(10.0, description="Upper bound of the trust coefficient.")
    min_coeff: Float = Field(0.01, description="Lower bound of the trust coefficient.")
    coeff_beta: Float = Field(0.9, json_schema_extra=advice(minimum=0, maximum=1), description=(
        "Decay of the running average of the trust coefficients during warm-up."))
    factor_max: Float = Field(4.0, description="Upper bound of the factor on the frozen coefficient.")
    factor_min: Float = Field(0.5, description="Lower bound of that factor.")
    factor_threshold: Float = Field(0.1, description="Largest relative change of that factor between two steps.")


class ZeroOneAdamParams(_CompressedParams):
    """Parameters of ZeroOneAdam."""

    var_freeze_step: Count = Field(100_000, json_schema_extra=advice(minimum=1), description=(
        "Last step at which the variance may be updated."))
    var_update_scaler: Count = Field(16, json_schema_extra=advice(minimum=1), description=(
        "Number of variance updates after which the interval between them doubles."))
    local_step_scaler: Count = Field(32678, json_schema_extra=advice(minimum=1), description=(
        "Number of steps after which the interval between synchronisations doubles."))
    local_step_clipper: Count = Field(16, json_schema_extra=advice(minimum=1), description=(
        "Largest number of local steps between two synchronisations."))


# Built-in optimizers, matched in any case, and the parameters that are known of each.
BUILT_IN_OPTIMIZERS: dict[str, type[OptimizerParams]] = {
    "Adam": AdamParams,
    "AdamW": AdamParams,
    "Adagrad": AdagradParams,
    "Lamb": LambParams,
    "OneBitAdam": OneBitAdamParams,
    "OneBitLamb": OneBitLambParams,
    "ZeroOneAdam": ZeroOneAdamParams,
    "Lion": LionParams,
    "Muon": MuonParams,
    "MuAdam": OptimizerParams,
    "MuAdamW": OptimizerParams,
    "MuSGD": OptimizerParams,
}


def built_in_optimizer(name: str | None) -> str | None:
    """Returns the built-in optimizer's name as listed, whatever the case of `name`; None if it is no built-in one."""
    by_lower_case = {known.lower(): known for known in BUILT_IN_OPTIMIZERS}
    return by_lower_case.get(name.lower()) if name is not None else None
