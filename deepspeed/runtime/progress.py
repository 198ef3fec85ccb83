"""What a run says about itself: the decisions at start, a line every few steps, timers and the library's log level."""
from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.memory_plan import plan_memory
from deepspeed.runtime.memory_sizes import gib
from deepspeed.utils.logging import set_log_level_from_string, write_report

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine

logger = logging.getLogger(__name__)

FORWARD, BACKWARD, STEP = "fwd", "bwd", "step"


def configure_logging(config: DeepSpeedConfig) -> None:
    """Apply `log_level`, and warn about a vocabulary that wastes matrix units."""
    if config.log_level is not None:
        set_log_level_from_string(config.log_level)
    if config.vocabulary_size is not None and config.vocabulary_size % 8 != 0:
        logger.warning("vocabulary_size is %d, not a multiple of 8: matrix units run slower. Pad the vocabulary.",
                       config.vocabulary_size)


def announce_plan(engine: DeepSpeedEngine) -> None:
    """Log the precision policy and the sharding once, as a table on rank 0, and every attribute with `dump_state`."""
    if engine.global_rank != 0:
        return
    rows = [*engine.plan.describe(), *_memory_rows(engine)]
    width = max(len(name) for name, _ in rows)
    write_report("training plan\n" + "\n".join(f"  {name.ljust(width)}  {value}" for name, value in rows))
    if engine._config.dump_state:
        for name, value in sorted(vars(engine).items()):
            write_report(f"  {name} = {value!r:.200}")


def _memory_rows(engine: DeepSpeedEngine) -> list[tuple[str, str]]:
    buckets = engine._parts.buckets
    if not buckets:
        return []
    memory = plan_memory(engine.plan, [bucket.spec for bucket in buckets], engine.basic_optimizer, engine.module,
                         rank=buckets[0].pair.shard.rank, is_gpu=engine.device.type == "cuda")
    rows = [("memory per rank", f"{gib(memory.kept.total())} between steps; at most {gib(memory.peak.total)} and the "
                                f"activations, in the {memory.peak.name}")]
    if memory.host.total():
        more = f", and while it is free {gib(memory.second_copies)} for second copies" if memory.second_copies else ""
        rows.append(("host memory per rank", gib(memory.host.total()) + more))
    return rows


def print_step(engine: DeepSpeedEngine) -> None:
    """Print the progress line of the step that is being finished, on rank 0."""
    if engine.global_rank == 0:
        write_report(f"step={engine.global_steps + 1}, skipped={engine.skipped_steps}, lr={engine.get_lr()}, "
                     f"mom={engine.get_mom()}")


def log_timers(engine: DeepSpeedEngine, is_boundary: bool) -> None:
    """With `wall_clock_breakdown`, log the times of the last micro-step, every `steps_per_print` updates."""
    if engine._config.wall_clock_breakdown and is_boundary:
        engine.timers.log([FORWARD, BACKWARD, STEP])
