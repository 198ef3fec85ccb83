"""ZeRO-Inference: text from a model of which each rank holds a share, and its weights streamed to an inference server.

    deepspeed --num_gpus 2 examples/zero_inference/infer.py

The model has random weights, so nothing is downloaded, and the text means nothing: what counts is that every way gives
the same text, and the memory that each takes. On a machine without GPUs the two ranks compute on the CPU.
"""
from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

try:
    from accelerate import Accelerator, DeepSpeedPlugin, PartialState
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
    from transformers.integrations import HfDeepSpeedConfig
except ImportError as error:
    sys.exit(f"This example needs transformers and accelerate: pip install transformers accelerate ({error})")
try:
    from trl.models import unwrap_model_for_generation
except ImportError:
    unwrap_model_for_generation = None

import deepspeed
from memory import PeakMemory
from serve import InferenceServer

HERE = Path(__file__).parent
PROMPTS = (b"import ", b"def main(", b"class Reader:", b"for line in ")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rest", choices=["device", "cpu", "nvme"], default="device", help="where the shares rest")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=12, help="tokens to generate")
    parser.add_argument("--out", type=Path, default=Path("runs/zero_inference"), help="folder of the model")
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
    return parser.parse_args()


class Report:
    """Prints a line for each way, and remembers whether the texts were equal."""

    def __init__(self, rank: int):
        self._rank = rank
        self._first: torch.Tensor | None = None
        self.are_equal = True

    def run(self, name: str, memory: PeakMemory, way: Callable[[], torch.Tensor | None]) -> None:
        """Call `way`, which returns token ids to compare with those of the other ways, or None."""
        start = time.perf_counter()
        with memory:
            ids = way()
        deepspeed.comm.all_gather_object(peaks := [0.0] * deepspeed.comm.get_world_size(), memory.mb)
        self.say(f"{name:62s} {peaks[0]:6.0f} {peaks[-1]:9.0f}  {time.perf_counter() - start:7.1f}")
        if ids is None:
            return
        self._first = ids if self._first is None else self._first
        self.are_equal &= torch.equal(ids, self._first)

    def say(self, text: str) -> None:
        if self._rank == 0:
            print(text, flush=True)


def main() -> int:
    args = parse_args()
    deepspeed.init_distributed()
    rank = deepspeed.comm.get_rank()
    report = Report(rank)
    folder, config = str(args.out / "model"), make_config(args)
    if rank == 0:
        numel = save_model(args, folder)
        report.say(f"{numel / 1e6:.0f} M parameters, {2 * numel / 1e6:.0f} MB in bf16, "
                   f"{2 * numel / 1e6 / deepspeed.comm.get_world_size():.0f} MB for each of {deepspeed.comm.get_world_size()} "
                   "ranks")
    report.say(f"\n{'peak memory in MB, above that of the empty process':60s} {'rank 0':>8s} {'last rank':>9s} {'seconds':>8s}")
    warm_up()
    deepspeed.comm.barrier()

    memory = PeakMemory()
    engines: list[deepspeed.DeepSpeedEngine] = []
    report.run("load: rank 0 reads the file, each rank keeps its share", memory,
               lambda: engines.append(load_engine(folder, config)))
    engine, = engines
    prompt = torch.tensor([list(PROMPTS[rank % len(PROMPTS)])], device=engine.device)
    options = {"max_new_tokens": args.tokens, "do_sample": False, "attention_mask": torch.ones_like(prompt), "pad_token_id": 0}
    report.run("generate(synced_gpus=True): layer by layer, for each token", memory,
               lambda: engine.module.generate(prompt, synced_gpus=True, **options))
    report.run("engine.gathered(): the whole model, once", memory, lambda: generate_gathered(engine, prompt, options))
    missing = "" if unwrap_model_for_generation else " (not installed)"
    report.run(f"trl's unwrap_model_for_generation: the same{missing}", memory,
               lambda: generate_with_trl(engine, prompt, options))

    server = InferenceServer(folder, torch.bfloat16, engine.device) if rank == 0 else None
    memory = PeakMemory()  # from here on, above share and server
    report.run("iter_full_parameters(): weights to the server, by buckets", memory, lambda: stream_weights(engine, server))
    report.run("the server, on its own", memory, lambda: server.generate(prompt, **options) if server else None)
    report.say("\nall ways gave the same text" if report.are_equal else "\nthe texts differ")
    return 0 if report.are_equal else 1


def save_model(args: argparse.Namespace, folder: str) -> int:
    """Write a Llama over bytes with seeded random weights in bf16; return how many it has."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=256, hidden_size=args.width, intermediate_size=3 * args.width, num_hidden_layers=args.layers,
        num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=256)).to(torch.bfloat16)
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def warm_up() -> None:
    """Let libraries load and reserve what they need once, so that it does not count as memory of the model."""
    config = LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
    LlamaForCausalLM(config).to(torch.bfloat16).generate(torch.tensor([[1, 2]]), max_new_tokens=2, pad_token_id=0)


def make_config(args: argparse.Namespace) -> dict[str, Any]:
    """Return the configuration in ds_config.json, with the shares where `--rest` says."""
    config = json.loads((HERE / "ds_config.json").read_text())
    if args.rest != "device":  # max_in_cpu: nothing is kept in memory that the disk has
        config["zero_optimization"]["offload_param"] = {
            "device": args.rest, "nvme_path": str(args.out / "swap"), "max_in_cpu": 0}
    return config


def load_engine(folder: str, config: dict[str, Any]) -> deepspeed.DeepSpeedEngine:
    """Return an engine without an optimizer. Rank 0 reads the file into host memory; no device ever holds the whole model."""
    sharding = HfDeepSpeedConfig(config)  # from_pretrained shards each weight as it is read while this object lives
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    engine, *_ = deepspeed.initialize(model=model, config=config)
    engine.eval()
    del sharding
    return engine


def generate_gathered(engine: deepspeed.DeepSpeedEngine, prompt: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    with engine.gathered() as model:
        return model.generate(prompt, synced_gpus=False, **options)  # inside, ranks need not run the same number of forwards


def generate_with_trl(engine: deepspeed.DeepSpeedEngine, prompt: torch.Tensor, options: dict[str, Any]) -> torch.Tensor | None:
    """Return the text as trl's trainers make it; None where trl is missing."""
    if unwrap_model_for_generation is None:
        return None
    PartialState(cpu=not torch.cuda.is_available())
    accelerator = Accelerator(deepspeed_plugins=DeepSpeedPlugin(hf_ds_config=str(HERE / "ds_config.json")))
    with unwrap_model_for_generation(engine, accelerator) as model:
        return model.generate(prompt, synced_gpus=False, **options)


def stream_weights(engine: deepspeed.DeepSpeedEngine, server: InferenceServer | None) -> None:
    """Give the server every weight, whole, in bounded memory. All ranks take part; rank 0 has the server."""
    weights = engine.iter_full_parameters()
    if server is not None:
        server.load_weights(weights)
        return
    for _ in weights:
        pass


if __name__ == "__main__":
    sys.exit(main())
