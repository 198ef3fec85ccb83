"""Memory that parameters, optimizer states and gradients need under ZeRO stages 2 and 3, before anything is built.

Bytes per parameter under mixed-precision Adam: 2 for the 16-bit weight, 16 for the fp32 master, gradient and two
moments. Source: Rajbhandari et al., "ZeRO" (arXiv:1910.02054), section 3. The `..._all_live` and `..._all_cold`
functions print a table; live ones read the sizes from a model, cold ones take them as numbers.
"""

from torch import nn

GIB = 2**30

# (offload_param, offload_optimizer, zero_init) of the lines of the stage 3 table.
_ZERO3_OPTIONS = [
    (True, True, True),
    (True, True, False),
    (False, True, True),
    (False, True, False),
    (False, False, True),
    (False, False, False),
]


def estimate_zero2_model_states_mem_needs(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int]:
    """(bytes of host memory per node, bytes of memory per GPU) at stage 2; the factor is for buffers on the host."""
    total_gpus = num_nodes * num_gpus_per_node
    if cpu_offload:
        gpu_bytes = 2 * total_params
        cpu_bytes = total_params * max(4 * total_gpus, 16) * additional_buffer_factor
    else:
        gpu_bytes = 2 * total_params + int(18 * total_params / total_gpus)
        cpu_bytes = total_params * 4 * num_gpus_per_node * additional_buffer_factor
    return int(cpu_bytes), gpu_bytes


def estimate_zero3_model_states_mem_needs(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int, int]:
    """(bytes of host memory per node, bytes of memory per GPU, bytes of the largest layer) at stage 3.

    zero_init: the model is built under `zero.Init`, so that no process ever holds all of it on the host.
    """
    total_gpus = num_nodes * num_gpus_per_node
    largest_layer_bytes = 4 * largest_layer_params  # 16-bit weights and gradients
    if not cpu_offload:
        gpu_bytes = largest_layer_bytes + int(18 * total_params / total_gpus)
        params_on_host = largest_layer_params if zero_init else total_params
        cpu_bytes = params_on_host * 4 * num_gpus_per_node * additional_buffer_factor
        return int(cpu_bytes), gpu_bytes, largest_layer_bytes
    gpu_bytes = largest_layer_bytes + (0 if cpu_offload_params else int(2 * total_params / total_gpus))
    state_bytes = (18 if cpu_offload_params else 16) / num_nodes
    bytes_per_param = state_bytes if zero_init else max(4 * num_gpus_per_node, state_bytes)
    return int(total_params * bytes_per_param * additional_buffer_factor), gpu_bytes, largest_layer_bytes


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the stage 2 table for `model`; a shared parameter counts once."""
    estimate_zero2_model_states_mem_needs_all_cold(
        _total_params(model), num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the stage 2 table for a model of `total_params` parameters."""
    lines = []
    for cpu_offload in (True, False):
        cpu_bytes, gpu_bytes = estimate_zero2_model_states_mem_needs(
            total_params, num_gpus_per_node, num_nodes, cpu_offload, additional_buffer_factor
        )
        lines.append(_line(cpu_bytes, gpu_bytes, f"offload_optimizer={_device(cpu_offload)}"))
    _print_table(num_nodes, num_gpus_per_node, f"{_millions(total_params)} total params", lines)


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the stage 3 table for `model`; a shared parameter counts once, a layer is a module's own parameters."""
    largest_layer_params = max(sum(p.numel() for p in module.parameters(recurse=False)) for module in model.modules())
    estimate_zero3_model_states_mem_needs_all_cold(
        _total_params(model), largest_layer_params, num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print the stage 3 table for a model of `total_params` parameters."""
    lines = []
    for offload_param, offload_optimizer, zero_init in _ZERO3_OPTIONS:
        cpu_bytes, gpu_bytes, _ = estimate_zero3_model_states_mem_needs(
            total_params,
            largest_layer_params,
            num_gpus_per_node,
            num_nodes,
            offload_optimizer,
            offload_param,
            zero_init,
            additional_buffer_factor,
        )
        options = (
            f"offload_param={_device(offload_param)}, offload_optimizer={_device(offload_optimizer)}, "
            f"zero_init={int(zero_init)}"
        )
        lines.append(_line(cpu_bytes, gpu_bytes, options))
    model_text = f"{_millions(total_params)} total params, {_millions(largest_layer_params)} largest layer params"
    _print_table(num_nodes, num_gpus_per_node, model_text, lines)


def _total_params(model: nn.Module) -> int:
    return sum(param.numel() for param in model.parameters())


def _device(is_offloaded: bool) -> str:
    return "cpu " if is_offloaded else "none"


def _millions(count: int) -> str:
    return f"{int(count / 1e6)}M"


def _line(cpu_bytes: int, gpu_bytes: int, options: str) -> str:
    return f" {cpu_bytes / GIB:7.2f}GB | {gpu_bytes / GIB:6.2f}GB | {options}"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _print_table(num_nodes: int, num_gpus_per_node: int, model_text: str, lines: list[str]) -> None:
    """The table is the product of a call made for it, so it goes to stdout rather than to the log."""
    print(
        "Estimated memory needed for params, optim states and gradients for a:\n"
        f"HW: Setup with {_counted(num_nodes, 'node')}, {_counted(num_gpus_per_node, 'GPU')} per node.\n"
        f"SW: Model with {model_text}."
    )
    print("  per CPU  |  per GPU |   Options")
    for line in lines:
        print(line)
