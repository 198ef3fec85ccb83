"""Times one training recipe: the same GPT and the same tokens under one of several engines.

    torchrun --nproc-per-node 2 benchmarks/train_gpt.py --engine {ddp,fsdp2,ds} --size 1b --stage 3

Prints one line `RESULT {json}` on rank 0: median ms per optimizer step, tokens/s per rank, model FLOP utilisation, peak
memory, losses. `ds` is whatever `import deepspeed` finds. Runs without a GPU too: `--size tiny --vocab 512 --seq 64`.
Fails (exit code 1) when a loss is not finite or rises, or when ranks hold different parameters afterwards.
"""
from __future__ import annotations

import argparse
import json
import math
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

PEAK_BF16_FLOPS = 989e12  # dense, per second: H100 and H200 SXM, NVIDIA's datasheet
ADAMW = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
CLIP = 1.0
NUM_FIXED_BATCHES = 8  # used in turn, so that the loss must fall


@dataclass(frozen=True)
class Shape:
    """The size of a GPT."""

    layers: int
    hidden: int
    heads: int

    def numel(self, vocab: int, seq: int) -> int:
        """Return the number of parameters, those of the final LayerNorm left out."""
        return self.layers * (12 * self.hidden ** 2 + 13 * self.hidden) + 2 * vocab * self.hidden + seq * self.hidden

    def flops_per_token(self, vocab: int, seq: int) -> int:
        """Forward and backward; causal attention counted at half. Source: Chowdhery et al., "PaLM" (arXiv:2204.02311),
        appendix B."""
        return 6 * self.numel(vocab, seq) + 12 * self.layers * self.hidden * seq // 2


SHAPES = {
    "tiny": Shape(2, 64, 2), "125m": Shape(12, 768, 12), "350m": Shape(24, 1024, 16), "1b": Shape(24, 2048, 16),
    "3b": Shape(32, 2560, 32), "7b": Shape(32, 4096, 32), "13b": Shape(40, 5120, 40),
    "16b": Shape(40, 5632, 44), "17b": Shape(43, 5632, 44), "20b": Shape(44, 6144, 48),
}


class Block(nn.Module):
    """Pre-norm transformer block. Keeps the shape [batch, seq, hidden]."""

    def __init__(self, hidden: int, heads: int):
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.proj = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, hidden = x.shape
        q, k, v = self.qkv(self.attention_norm(x)).view(batch, seq, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(batch, seq, hidden))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x)), approximate="tanh"))


class GPT(nn.Module):
    """Language model with learned positions and an untied head."""

    def __init__(self, shape: Shape, vocab: int, seq: int, recomputes: bool):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, shape.hidden), nn.Embedding(seq, shape.hidden)
        self.blocks = nn.ModuleList(Block(shape.hidden, shape.heads) for _ in range(shape.layers))
        self.norm, self.head = nn.LayerNorm(shape.hidden), nn.Linear(shape.hidden, vocab, bias=False)
        self.recomputes = recomputes

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross entropy, a scalar. ids, targets: int64 [batch, seq]."""
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


# ---- engines: each takes the arguments and the device, and returns the model and a function that trains on one
# micro-batch (ids, targets, whether it ends a step) and returns its loss ----

MicroStep = Callable[[Tensor, Tensor, bool], Tensor]


def build_model(arguments: argparse.Namespace) -> GPT:
    """Return the model on the default device, with the same weights for every engine and rank."""
    torch.manual_seed(0)
    model = GPT(SHAPES[arguments.size], arguments.vocab, arguments.seq, arguments.checkpointing)
    if arguments.compile and arguments.engine != "ds":
        for block in model.blocks:
            block.compile(mode=arguments.compile)
    return model


def make_ds(arguments: argparse.Namespace, device: torch.device) -> tuple[nn.Module, MicroStep]:
    import deepspeed

    deepspeed.init_distributed(dist.get_backend())
    config = ds_config(arguments)
    if arguments.zero_init:
        with deepspeed.zero.Init(config_dict_or_path=config):
            model = build_model(arguments)
    else:
        with device:
            model = build_model(arguments)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    if arguments.compile:
        engine.compile(compile_kwargs={"mode": arguments.compile})

    def micro_step(ids: Tensor, targets: Tensor, ends_step: bool) -> Tensor:
        loss = engine(ids, targets)
        engine.backward(loss)
        engine.step()
        return loss

    return engine, micro_step


def ds_config(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the configuration; `--extra` goes into zero_optimization, `--config` on top of everything."""
    zero: dict[str, Any] = {"stage": arguments.stage}
    if not arguments.stage_only:
        zero |= {"overlap_comm": not arguments.no_overlap, "contiguous_gradients": True,
                 "reduce_bucket_size": 200_000_000, "allgather_bucket_size": 200_000_000}
        if arguments.stage == 3:
            zero |= {"stage3_prefetch_bucket_size": 100_000_000, "stage3_param_persistence_threshold": 100_000}
    if arguments.offload in ("cpu", "param+cpu"):
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if arguments.offload == "nvme":
        zero["offload_optimizer"] = {"device": "nvme", "nvme_path": arguments.nvme_path, "pin_memory": True}
    if arguments.offload == "param+cpu":
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    return {
        "train_micro_batch_size_per_gpu": arguments.mbs, "gradient_accumulation_steps": arguments.gas,
        "bf16": {"enabled": True}, "zero_optimization": zero | json.loads(arguments.extra), "steps_per_print": 10 ** 9,
        "optimizer": {"type": "AdamW", "params": {**ADAMW, "betas": list(ADAMW["betas"])}}, "gradient_clipping": CLIP,
    } | json.loads(arguments.config)


def make_fsdp2(arguments: argparse.Namespace, device: torch.device) -> tuple[nn.Module, MicroStep]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    with device:
        model = build_model(arguments)
    options = {
        "mesh": init_device_mesh(device.type, (dist.get_world_size(),)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
        "reshard_after_forward": arguments.stage == 3}
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)

    def micro_step(ids: Tensor, targets: Tensor, ends_step: bool) -> Tensor:
        model.set_requires_gradient_sync(ends_step)
        loss = model(ids, targets)
        (loss / arguments.gas).backward()
        if ends_step:
            _update(model, optimizer)
        return loss

    return model, micro_step


def make_ddp(arguments: argparse.Namespace, device: torch.device) -> tuple[nn.Module, MicroStep]:
    with device:
        model = build_model(arguments)
    wrapped = nn.parallel.DistributedDataParallel(
        model, device_ids=[device.index] if device.type == "cuda" else None, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)

    def micro_step(ids: Tensor, targets: Tensor, ends_step: bool) -> Tensor:
        wrapped.require_backward_grad_sync = ends_step
        with torch.autocast(device.type, torch.bfloat16):
            loss = wrapped(ids, targets)
        (loss / arguments.gas).backward()
        if ends_step:
            _update(model, optimizer)
        return loss

    return model, micro_step


def _update(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


ENGINES = {"ds": make_ds, "fsdp2": make_fsdp2, "ddp": make_ddp}

# ---- the run ----


@contextmanager
def process_group() -> Iterator[torch.device]:
    """Join the ranks that torchrun started (one rank without it) and yield this rank's device."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}.items():
        os.environ.setdefault(name, value)
    if "MASTER_PORT" not in os.environ:  # alone: any free port will do
        os.environ["MASTER_PORT"] = "0"
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    try:
        yield device
    finally:
        dist.destroy_process_group()


def train(arguments: argparse.Namespace, micro_step: MicroStep,
          device: torch.device) -> tuple[list[float], list[float]]:
    """Return seconds of each timed step and losses of all steps, warm-up included."""
    generator = torch.Generator(device=device).manual_seed(1 + dist.get_rank())
    shape = (NUM_FIXED_BATCHES, arguments.mbs, arguments.seq + 1)
    batches = torch.randint(0, arguments.vocab, shape, device=device, generator=generator)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds, losses = [], []
    for step in range(arguments.warmup + arguments.steps):
        synchronize(device)
        start = time.perf_counter()
        for micro in range(arguments.gas):
            batch = batches[(step * arguments.gas + micro) % NUM_FIXED_BATCHES]
            loss = micro_step(batch[:, :-1], batch[:, 1:], micro == arguments.gas - 1)
        synchronize(device)
        elapsed = time.perf_counter() - start
        if step >= arguments.warmup:
            seconds.append(elapsed)
        losses.append(loss.item())
        if dist.get_rank() == 0:
            print(f"step {step + 1}: {elapsed:.3f} s, loss {losses[-1]:.4f}", file=sys.stderr, flush=True)
    return seconds, losses


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def profile(arguments: argparse.Namespace, micro_step: MicroStep, device: torch.device) -> str:
    """Trace two steps, write rank 0's into `--profile`, return a table of what took longest (on the GPU if any)."""
    is_cuda = device.type == "cuda"
    activities = [torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * is_cuda
    ids = torch.randint(0, arguments.vocab, (arguments.mbs, arguments.seq + 1), device=device)
    with torch.profiler.profile(activities=activities) as profiler:
        for index in range(2 * arguments.gas):
            micro_step(ids[:, :-1], ids[:, 1:], (index + 1) % arguments.gas == 0)
        synchronize(device)
    if dist.get_rank() == 0:
        arguments.profile.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(arguments.profile / f"{label(arguments)}.json.gz"))
    sort_by = "self_device_time_total" if is_cuda else "self_cpu_time_total"
    return profiler.key_averages().table(sort_by=sort_by, row_limit=25, max_name_column_width=60)


def label(arguments: argparse.Namespace) -> str:
    return arguments.label or f"{arguments.engine}-z{arguments.stage}-{arguments.size}"


def find_faults(losses: list[float], model: nn.Module, batch_losses_cycle: int) -> list[str]:
    """Say what shows that the run computed nonsense; empty when nothing does. Collective.

    batch_losses_cycle: steps after which the same batch comes again.
    """
    faults = []
    if not all(math.isfinite(loss) for loss in losses):
        faults.append(f"losses are not finite: {losses}")
    repeats = len(losses) > batch_losses_cycle
    if repeats and not losses[-1] <= losses[-1 - batch_losses_cycle]:  # a bf16 loss may stay within its rounding
        faults.append(f"the loss of a batch that came again rose: {losses}")
    buffers = [parameter.detach() for parameter in model.parameters() if _is_whole(parameter)]
    sums = torch.stack([buffer.double().sum() for buffer in buffers]) if buffers else torch.zeros(0)
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, sums.tolist())
    if any(other != everybody[0] for other in everybody):
        faults.append("parameters differ between data-parallel ranks")
    return faults


def _is_whole(parameter: Tensor) -> bool:
    """This rank holds all of the parameter: neither a DTensor's shard nor one that ZeRO stage 3 released (which is NaN here and
    has no elements elsewhere)."""
    return (type(parameter.data) is Tensor and parameter.numel() > 0
            and not math.isnan(parameter.detach().flatten()[0].item()))


def result(arguments: argparse.Namespace, seconds: list[float], losses: list[float], init_seconds: float,
           device: torch.device) -> dict[str, Any]:
    """Return the numbers of the RESULT line. Collective: the peak memory is the largest of any rank."""
    shape, median = SHAPES[arguments.size], statistics.median(seconds)
    tokens_per_second = arguments.mbs * arguments.gas * arguments.seq / median
    flops = tokens_per_second * shape.flops_per_token(arguments.vocab, arguments.seq)
    peak_bytes = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    peak = torch.tensor(peak_bytes, dtype=torch.float64, device=device)
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    return {
        "label": label(arguments), "world": dist.get_world_size(),
        "params_m": round(shape.numel(arguments.vocab, arguments.seq) / 1e6),
        "ms": round(median * 1e3, 1), "min_ms": round(min(seconds) * 1e3, 1), "max_ms": round(max(seconds) * 1e3, 1),
        "tok_s_gpu": round(tokens_per_second), "mfu": round(flops / PEAK_BF16_FLOPS, 3),
        "peak_gib": round(peak.item() / 2 ** 30, 2), "host_gib": round(_peak_host_bytes() / 2 ** 30, 2),
        "init_s": round(init_seconds, 1),
        "loss": [round(losses[0], 4), round(losses[arguments.warmup], 4), round(losses[-1], 4)]}


def _peak_host_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=list(ENGINES), default="ds")
    parser.add_argument("--size", choices=list(SHAPES), default="1b")
    parser.add_argument("--stage", type=int, choices=range(4), default=1,
                        help="ds: ZeRO stage; fsdp2: 3 reshards after forward")
    parser.add_argument("--mbs", type=int, default=4, help="micro-batch per rank, in sequences")
    parser.add_argument("--gas", type=int, default=1, help="micro-batches per step")
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--vocab", type=int, default=int(os.environ.get("VOCAB", 50304)))
    parser.add_argument("--steps", type=int, default=12, help="timed steps")
    parser.add_argument("--warmup", type=int, default=4, help="untimed steps before them")
    parser.add_argument("--offload", choices=["none", "cpu", "param+cpu", "nvme"], default="none", help="ds only")
    parser.add_argument("--nvme-path", default="/tmp/nvme")
    parser.add_argument("--checkpointing", "--ckpt", action="store_true", help="recompute activations in backward")
    parser.add_argument("--compile", nargs="?", const="default", metavar="MODE",
                        help="compile each block, in a mode of torch.compile, such as reduce-overhead for CUDA graphs")
    parser.add_argument("--no-overlap", action="store_true", help="ds: overlap_comm false")
    parser.add_argument("--stage-only", action="store_true",
                        help="ds: no sizes that are usual for upstream; only what offloads beside the stage")
    parser.add_argument("--zero-init", action="store_true", help="ds: construct the model under zero.Init")
    parser.add_argument("--extra", default="{}", help="ds: JSON merged into zero_optimization")
    parser.add_argument("--config", default="{}", help="ds: JSON merged into the configuration")
    parser.add_argument("--label", default="", help="name of the run in the RESULT line")
    parser.add_argument("--profile", type=Path, help="folder for a trace of two more steps; prints a table")
    arguments = parser.parse_args()
    if min(arguments.steps, arguments.mbs, arguments.gas, arguments.seq) < 1 or arguments.warmup < 0:
        parser.error("--steps, --mbs, --gas and --seq must be at least 1, --warmup at least 0")
    if arguments.no_overlap and arguments.stage_only:
        parser.error("--no-overlap is a key beside the stage, which --stage-only leaves out")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    with process_group() as device:
        start = time.perf_counter()
        model, micro_step = ENGINES[arguments.engine](arguments, device)
        synchronize(device)
        init_seconds = time.perf_counter() - start
        seconds, losses = train(arguments, micro_step, device)
        numbers = result(arguments, seconds, losses, init_seconds, device)
        faults = find_faults(losses, model, NUM_FIXED_BATCHES // math.gcd(NUM_FIXED_BATCHES, arguments.gas))
        table = profile(arguments, micro_step, device) if arguments.profile is not None else ""
        if dist.get_rank() == 0:
            if table:
                print(table)
            print("RESULT " + json.dumps(numbers), flush=True)
    if faults:
        raise SystemExit(f"{numbers['label']}: " + "; ".join(faults))


if __name__ == "__main__":
    main()
