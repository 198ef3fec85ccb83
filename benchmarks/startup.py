"""Times what `deepspeed.initialize` does, phase by phase, beside FSDP2, for the GPT of train_gpt.py.

    torchrun --nproc-per-node 2 benchmarks/startup.py --size 7b --stage 3       # GPUs
    python benchmarks/startup.py --size 125m --layers 24 --hidden 1024          # two CPU ranks

Every round builds the model anew, in one process: the first round pays for imports, communicators and the first use of
kernels, later rounds only for what scales with the model. Phases inside others are indented; times are rank 0's, with the
device waited for at the ends of a phase (so phases that overlapped are told apart). Prints a table and `RESULT {json}`.
"""
from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_START = time.perf_counter()

import torch  # noqa: E402  (its import is a phase)
import torch.distributed as dist  # noqa: E402

from ranks import describe_machine, run_on_ranks  # noqa: E402
from train_gpt import ADAMW, SHAPES, GPT, Shape, process_group, synchronize  # noqa: E402

_IMPORTED = time.perf_counter() - _START

# (phase, module, attribute as a path, depth): functions that are timed where they are called from
PHASES = (
    ("process group", "deepspeed.comm", "init_distributed", 1),
    ("groups", "deepspeed.runtime.engine", "Topology.build", 1),
    ("place model", "deepspeed.runtime.engine", "place_model", 1),
    ("choose optimizer", "deepspeed.runtime.engine", "choose_optimizer", 1),
    ("build parts", "deepspeed.runtime.engine", "build_parts", 1),
    ("plan buckets", "deepspeed.runtime.parts", "plan_buckets", 2),
    ("ranks agree", "deepspeed.comm.consistency", "RankConsistency.agree", 2),
    ("second communicator", "deepspeed.comm.group", "Group.duplicate", 2),
    ("adopt parameters", "deepspeed.runtime.zero.bucket", "ParamBucket.adopt", 2),
    ("broadcast", "deepspeed.runtime.parts", "_broadcast", 3),
    ("masters", "deepspeed.runtime.zero.bucket", "ParamBucket.take_master", 2),
    ("hooks", "deepspeed.runtime.parts", "ZeroHooks", 2),
    ("views", "deepspeed.runtime.parts", "install_views", 2),
    ("broadcast the rest", "deepspeed.runtime.engine", "broadcast_unmanaged", 1),
)


class Stopwatch:
    """Sums the seconds of named phases of one round."""

    def __init__(self, device: torch.device):
        self._device = device
        self.seconds: dict[str, float] = {}

    def run(self, phase: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the function as part of `phase`."""
        synchronize(self._device)
        start = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            synchronize(self._device)
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start

    def watch(self) -> None:
        """Let every function of PHASES that this version of the package has report to the stopwatch of the round."""
        for phase, module, path, _ in PHASES:
            owner: Any = importlib.import_module(module)
            *outer, name = path.split(".")
            for part in outer:
                owner = getattr(owner, part)
            original = getattr(owner, name)
            setattr(owner, name, self._watched(phase, original))

    def _watched(self, phase: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            return self.run(phase, original, *args, **kwargs)

        return watched


def rounds_of_ds(arguments: argparse.Namespace, device: torch.device) -> list[dict[str, float]]:
    """Return the seconds of each phase for every round."""
    watch, rounds = Stopwatch(device), []
    deepspeed = watch.run("import deepspeed", importlib.import_module, "deepspeed")
    watch.run("import deepspeed", importlib.import_module, "deepspeed.runtime.engine")
    watch.watch()
    config = {
        "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "steps_per_print": None,
        "optimizer": {"type": "AdamW", "params": {**ADAMW, "betas": list(ADAMW["betas"])}}, "gradient_clipping": 1.0,
        "zero_optimization": {"stage": arguments.stage}}

    def build() -> Any:
        if not arguments.zero_init:
            return build_model(arguments, device)
        with deepspeed.zero.Init(config_dict_or_path=config):
            return build_model(arguments, None)

    for _ in range(arguments.rounds):
        dist.barrier()
        model = watch.run("build model", build)
        dist.barrier()
        engine = watch.run("initialize", deepspeed.initialize, model=model, config=config)[0]
        if arguments.first_step:
            watch.run("first step", train_step, engine, arguments, device)
        rounds.append(dict(watch.seconds))
        watch.seconds.clear()
        engine.destroy()
        del engine, model
        gc.collect()  # what refers to itself, before the next model needs the memory
    dist.barrier()
    return rounds


def rounds_of_fsdp2(arguments: argparse.Namespace, device: torch.device) -> list[dict[str, float]]:
    """Return the seconds of building and sharding for every round: what `initialize` is compared with."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    def shard(model: GPT) -> torch.optim.Optimizer:
        options = {"mesh": init_device_mesh(device.type, (dist.get_world_size(),)),
                   "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)}
        for block in model.blocks:
            fully_shard(block, **options)
        fully_shard(model, **options)
        return torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)

    watch, rounds = Stopwatch(device), []
    for _ in range(arguments.rounds):
        dist.barrier()
        model = watch.run("build model", build_model, arguments, device)
        watch.run("initialize", shard, model)
        rounds.append(dict(watch.seconds))
        watch.seconds.clear()
        del model
    return rounds


def shape_of(arguments: argparse.Namespace) -> Shape:
    """Return the size asked for, with heads of 64 elements where the width is another than the table's."""
    shape = SHAPES[arguments.size]
    heads = arguments.hidden // 64 if arguments.hidden else shape.heads
    return Shape(arguments.layers or shape.layers, arguments.hidden or shape.hidden, heads)


def build_model(arguments: argparse.Namespace, device: torch.device | None) -> GPT:
    """Return the model on `device` (None: where `zero.Init` puts it). On a CPU it holds ones, which is quicker."""
    shape = shape_of(arguments)
    if device is None or device.type == "cuda":
        with device or torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            return GPT(shape, arguments.vocab, arguments.seq, recomputes=False)
    with torch.device("meta"):
        model = GPT(shape, arguments.vocab, arguments.seq, recomputes=False)
    model.to_empty(device=device)
    for parameter in model.parameters():
        torch.nn.init.ones_(parameter)
    return model


def train_step(engine: Any, arguments: argparse.Namespace, device: torch.device) -> None:
    ids = torch.zeros(1, min(arguments.seq, 16), dtype=torch.long, device=device)
    engine.backward(engine(ids, ids))
    engine.step()


def report(arguments: argparse.Namespace, rounds: list[dict[str, float]], numel: float) -> None:
    depth = {phase: depth for phase, _, _, depth in PHASES}
    order = ["import deepspeed", "build model", "initialize", *depth, "first step"]
    print(f"{arguments.engine}, stage {arguments.stage}, {numel / 1e6:.0f} M parameters, {dist.get_world_size()} ranks; "
          f"seconds in rounds 1 to {len(rounds)} (import torch: {_IMPORTED:.2f})")
    for phase in order:
        if any(phase in seconds for seconds in rounds):
            print(f"{'  ' * depth.get(phase, 0) + phase:28}" + "".join(f"{seconds.get(phase, 0):9.3f}" for seconds in rounds))
    print("RESULT " + json.dumps({
        "label": arguments.label, "engine": arguments.engine, "stage": arguments.stage, "params_m": round(numel / 1e6),
        "rounds": [{phase: round(value, 4) for phase, value in seconds.items()} for seconds in rounds],
        "machine": describe_machine()}), flush=True)


def run(arguments: argparse.Namespace) -> None:
    """Time the rounds on this rank, which has joined a process group."""
    is_cuda = torch.cuda.is_available() and dist.get_backend() != "gloo"
    device = torch.device("cuda", torch.cuda.current_device()) if is_cuda else torch.device("cpu")
    rounds = (rounds_of_ds if arguments.engine == "ds" else rounds_of_fsdp2)(arguments, device)
    if dist.get_rank() == 0:
        report(arguments, rounds, shape_of(arguments).numel(arguments.vocab, arguments.seq))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("ds", "fsdp2"), default="ds")
    parser.add_argument("--size", choices=list(SHAPES), default="125m")
    parser.add_argument("--layers", type=int, help="instead of the size's")
    parser.add_argument("--hidden", type=int, help="instead of the size's; a multiple of 64")
    parser.add_argument("--vocab", type=int, default=50304)
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--stage", type=int, choices=range(4), default=3)
    parser.add_argument("--zero-init", action="store_true", help="construct the model under zero.Init")
    parser.add_argument("--first-step", action="store_true", help="ds: also time a step on one short sequence")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--label", default="", help="name of the run in the RESULT line")
    parser.add_argument("--ranks", type=int, default=2, help="CPU ranks, where no launcher started any")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    if "RANK" in os.environ:
        with process_group():
            run(arguments)
    else:
        run_on_ranks(run, arguments.ranks, arguments)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
