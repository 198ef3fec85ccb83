from deepspeed.module_inject.gather import GatherReplacedLayerParams  # public path
from deepspeed.runtime.tensor_parallel.layers import ColumnParallelLinear as LinearLayer  # public path
from deepspeed.runtime.tensor_parallel.layers import RowParallelLinear as LinearAllreduce  # public path

__all__ = ["GatherReplacedLayerParams", "LinearAllreduce", "LinearLayer"]
