"""The builders by class. Each class without `functions` belongs to an op that this release does not have yet."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace

from deepspeed.ops.native import cpu_optimizers
from deepspeed.ops.op_builder import cpu_functions, torch_functions
from deepspeed.ops.op_builder.builder import CUDAOpBuilder, NativeOpBuilder, OpBuilder, TorchCPUOpBuilder


class _CPUOptimizerBuilder(NativeOpBuilder):
    """An optimizer on host memory. Its class in deepspeed.ops works without the library too, in PyTorch operations."""

    LIBRARY = cpu_optimizers.LIBRARY

    def obstacle(self) -> str | None:
        reason = super().obstacle()
        return None if reason is None else f"torch fallback: {reason}"

    def note(self) -> str:
        return cpu_optimizers.describe()


class CPUAdamBuilder(_CPUOptimizerBuilder):
    """Adam and AdamW on host memory."""

    BUILD_VAR = "DS_BUILD_CPU_ADAM"
    NAME = "cpu_adam"

    def functions(self) -> Mapping[str, Callable]:
        return {function.__name__: function for function in (
            cpu_functions.create_adam, cpu_functions.adam_update, cpu_functions.adam_rollback, cpu_functions.destroy_adam)}


class CPUAdagradBuilder(_CPUOptimizerBuilder):
    """Adagrad on host memory."""

    BUILD_VAR = "DS_BUILD_CPU_ADAGRAD"
    NAME = "cpu_adagrad"

    def functions(self) -> Mapping[str, Callable]:
        return {function.__name__: function for function in (
            cpu_functions.create_adagrad, cpu_functions.adagrad_update, cpu_functions.destroy_adagrad)}


class CPULionBuilder(_CPUOptimizerBuilder):
    """Lion on host memory."""

    BUILD_VAR = "DS_BUILD_CPU_LION"
    NAME = "cpu_lion"

    def functions(self) -> Mapping[str, Callable]:
        return {function.__name__: function for function in (
            cpu_functions.create_lion, cpu_functions.lion_update, cpu_functions.destroy_lion)}


class FusedAdamBuilder(CUDAOpBuilder):
    """Adam and AdamW for many tensors at once, in PyTorch."""

    BUILD_VAR = "DS_BUILD_FUSED_ADAM"
    NAME = "fused_adam"

    def functions(self) -> Mapping[str, Callable]:
        return {"multi_tensor_adam": torch_functions.multi_tensor_adam}


class FusedLionBuilder(CUDAOpBuilder):
    """Lion for many tensors at once."""

    BUILD_VAR = "DS_BUILD_FUSED_LION"
    NAME = "fused_lion"


class FusedLambBuilder(CUDAOpBuilder):
    """Lamb for one tensor, with its trust ratio."""

    BUILD_VAR = "DS_BUILD_FUSED_LAMB"
    NAME = "fused_lamb"


class AsyncIOBuilder(NativeOpBuilder):
    """Asynchronous reads and writes between memory and NVMe: in C++ where the library was built, else in Python."""

    BUILD_VAR = "DS_BUILD_ASYNC_IO"
    NAME = "async_io"
    LIBRARY = "ds_aio"

    def functions(self) -> Mapping[str, Callable]:
        from deepspeed.ops.aio.functions import aio_read, aio_write, deepspeed_memcpy
        from deepspeed.ops.aio.handle import AioHandle

        return {"aio_handle": AioHandle, "aio_read": aio_read, "aio_write": aio_write, "deepspeed_memcpy": deepspeed_memcpy}

    def obstacle(self) -> str | None:
        return None

    def note(self) -> str:
        from deepspeed.ops.aio.engines import describe_engine

        return describe_engine()


class GDSBuilder(CUDAOpBuilder):
    """Reads and writes between device memory and NVMe (GPUDirect Storage), by KvikIO."""

    BUILD_VAR = "DS_BUILD_GDS"
    NAME = "gds"

    def functions(self) -> Mapping[str, Callable]:
        from deepspeed.ops.gds.handle import GdsHandle

        return {"gds_handle": GdsHandle}

    def obstacle(self) -> str | None:
        from deepspeed.ops.gds.handle import obstacle

        return obstacle()

    def is_installed(self) -> bool:
        return self.obstacle() is None


class UtilsBuilder(OpBuilder):
    """Flattening of tensor lists, in PyTorch."""

    BUILD_VAR = "DS_BUILD_UTILS"
    NAME = "utils"

    def functions(self) -> Mapping[str, Callable]:
        return {"flatten": torch_functions.flatten, "unflatten": torch_functions.unflatten}


class QuantizerBuilder(CUDAOpBuilder):
    """Block quantisation to 4 and 8 bits, and quantised reduction."""

    BUILD_VAR = "DS_BUILD_QUANTIZER"
    NAME = "quantizer"


class FPQuantizerBuilder(CUDAOpBuilder):
    """Quantisation to small floating-point formats."""

    BUILD_VAR = "DS_BUILD_FP_QUANTIZER"
    NAME = "fp_quantizer"


class RandomLTDBuilder(CUDAOpBuilder):
    """Token sorting, gathering and scattering for random layerwise token dropping."""

    BUILD_VAR = "DS_BUILD_RANDOM_LTD"
    NAME = "random_ltd"


class SparseAttnBuilder(CUDAOpBuilder):
    """Block-sparse attention."""

    BUILD_VAR = "DS_BUILD_SPARSE_ATTN"
    NAME = "sparse_attn"


class TransformerBuilder(CUDAOpBuilder):
    """The BERT transformer layer."""

    BUILD_VAR = "DS_BUILD_TRANSFORMER"
    NAME = "transformer"


class StochasticTransformerBuilder(CUDAOpBuilder):
    """The BERT transformer layer in its faster, non-deterministic form."""

    BUILD_VAR = "DS_BUILD_STOCHASTIC_TRANSFORMER"
    NAME = "stochastic_transformer"


class PackbitsBuilder(CUDAOpBuilder):
    """Packing and unpacking of sign bits for 1-bit optimizers."""

    BUILD_VAR = "DS_BUILD_PACKBITS"
    NAME = "packbits"


class PinMemoryBuilder(TorchCPUOpBuilder):
    """Page-locked host memory."""

    BUILD_VAR = "DS_BUILD_PIN_MEMORY"
    NAME = "pin_memory"


class InferenceBuilder(CUDAOpBuilder):
    """Kernels of the first inference engine."""

    BUILD_VAR = "DS_BUILD_TRANSFORMER_INFERENCE"
    NAME = "transformer_inference"


class InferenceCoreBuilder(CUDAOpBuilder):
    """Core kernels of the second inference engine."""

    BUILD_VAR = "DS_BUILD_INFERENCE_CORE_OPS"
    NAME = "inference_core_ops"


class InferenceCutlassBuilder(CUDAOpBuilder):
    """Matrix products of the second inference engine."""

    BUILD_VAR = "DS_BUILD_CUTLASS_OPS"
    NAME = "cutlass_ops"


class RaggedOpsBuilder(CUDAOpBuilder):
    """Device kernels for ragged batches."""

    BUILD_VAR = "DS_BUILD_RAGGED_DEVICE_OPS"
    NAME = "ragged_device_ops"


class RaggedUtilsBuilder(CUDAOpBuilder):
    """Host side of ragged batches."""

    BUILD_VAR = "DS_BUILD_RAGGED_OPS"
    NAME = "ragged_ops"


class SpatialInferenceBuilder(CUDAOpBuilder):
    """Kernels for diffusion models."""

    BUILD_VAR = "DS_BUILD_SPATIAL_INFERENCE"
    NAME = "spatial_inference"


class EvoformerAttnBuilder(CUDAOpBuilder):
    """Attention with two biases for protein models."""

    BUILD_VAR = "DS_BUILD_EVOFORMER_ATTN"
    NAME = "evoformer_attn"


class DeepCompileBuilder(CUDAOpBuilder):
    """Run time of compiled ZeRO graphs."""

    BUILD_VAR = "DS_BUILD_DEEP_COMPILE"
    NAME = "dc"


class CCLCommBuilder(TorchCPUOpBuilder):
    """Collectives through oneCCL."""

    BUILD_VAR = "DS_BUILD_CCL_COMM"
    NAME = "deepspeed_ccl_comm"


class ShareMemCommBuilder(TorchCPUOpBuilder):
    """All-reduce between processes of one machine through shared memory."""

    BUILD_VAR = "DS_BUILD_SHM_COMM"
    NAME = "deepspeed_shm_comm"


class NotImplementedBuilder(OpBuilder):
    """Stands for an op that an accelerator does not have: loading it always raises ValueError."""

    BUILD_VAR = "DS_BUILD_NOT_IMPLEMENTED"
    NAME = "deepspeed_not_implemented"

    def load(self, verbose: bool = False) -> SimpleNamespace:
        raise ValueError(
            "this op is not implemented for the accelerator in use; ds_report lists the ops that work here"
        )
