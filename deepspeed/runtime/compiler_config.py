"""Configuration of the compiler passes."""

from __future__ import annotations

from pydantic import Field

from deepspeed.runtime.config_utils import Bool, DeepSpeedConfigModel, Int, TextList


class CompileConfig(DeepSpeedConfigModel):
    """DeepCompile."""

    deepcompile: Bool = Field(False, description="Compiles the model with communication-aware passes.")
    free_activation: Bool = Field(False, description="Frees large activations early.")
    free_activation_threshold: Int = Field(10_485_760, description=(
        "Number of bytes above which an activation is freed early."))
    offload_activation: Bool = Field(False, description="Moves activations to the host.")
    offload_activation_pin_memory: Bool = Field(True, description="Keeps offloaded activations in page-locked memory.")
    offload_opt_states: Bool = Field(False, description="Moves optimizer state to the host around the step.")
    double_buffer: Bool = Field(True, description="Overlaps reduction and copy with two buffers.")
    symmetric_memory: Bool = Field(False, description="Gathers through symmetric memory.")
    debug_log: Bool = Field(False, description="Logs the work of the passes.")
    offload_parameters: Bool = Field(False, description="Moves parameters to the host.")
    sync_before_reduce: Bool = Field(False, description="Synchronizes the device before each reduction.")
    sync_after_reduce: Bool = Field(False, description="Synchronizes the device after each reduction.")
    sync_before_allgather: Bool = Field(False, description="Synchronizes the device before each all-gather.")
    sync_after_allgather: Bool = Field(False, description="Synchronizes the device after each all-gather.")
    keep_int_input_tensors: Bool = Field(True, description="Keeps integer input tensors alive for the whole step.")
    keep_all_input_tensors: Bool = Field(False, description="Keeps all input tensors alive for the whole step.")
    passes: TextList | None = Field(None, description=(
        "Names of the passes to run, from z1, z3, autosp and autotp; null chooses by configuration."))
    autoep_non_moe: Bool = Field(False, description="Also compiles the parts outside mixture-of-experts layers.")
