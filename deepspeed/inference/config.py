"""Configuration of the hybrid engine and of weight quantization at load."""

from __future__ import annotations

from pydantic import Field

from deepspeed.runtime.config_utils import Bool, DeepSpeedConfigModel, FreeDict, Int


class HybridEngineConfig(DeepSpeedConfigModel):
    """Engine that switches between training and generation."""

    enabled: Bool = Field(False, description="Selects the hybrid engine.")
    max_out_tokens: Int = Field(512, description="Largest number of tokens of a generation.")
    inference_tp_size: Int = Field(1, description="Degree of tensor parallelism while generating.")
    release_inference_cache: Bool = Field(False, description="Frees buffers after generation.")
    pin_parameters: Bool = Field(True, description="Keeps gathered parameters.")
    tp_gather_partition_size: Int = Field(8, description="Number of layers gathered together.")
    enable_cuda_graph: Bool = Field(False, description="Captures generation graphs.")


class WeightQuantConfig(DeepSpeedConfigModel):
    """Weight quantization while or after loading."""

    enabled: Bool = Field(True, description="Quantizes weights at load.")
    num_bits: Int = Field(8, description="Number of bits per weight.")
    q_type: str = Field("symmetric", description="Kind of quantization, symmetric or asymmetric.")
    q_groups: Int = Field(1, description="Number of scaling groups per weight.")
    quantized_initialization: FreeDict = Field({}, description="Quantize while loading.")
    post_init_quant: FreeDict = Field({}, description="Quantize after loading, keyed by module name.")
