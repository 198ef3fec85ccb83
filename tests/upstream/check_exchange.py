"""Check that upstream continues from checkpoints that this package wrote. Run where upstream 0.19.8 is installed, on a
folder that `write_ours.py` filled:

    python tests/upstream/check_exchange.py FOLDER

For each case it loads the checkpoint into a model with other weights, trains on, and compares losses and weights with
`expected.pt`; and it lets upstream's `zero_to_fp32` put the weights together. A table tells the largest differences;
the exit code is 1 if one is out of tolerance or anything was refused. On `fixtures/` it checks upstream against itself.
"""
from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import deepspeed
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from torch import Tensor

from cases import CASES, CLIENT_STATE, STEPS_AFTER, STEPS_BEFORE, UNIVERSAL, Case
from launch import run_ranks
from model import SmallAwkwardModel
from training import RANK, allow_fp16_on_cpu, full_states, full_weights, is_upstream, of_all_ranks, start, train

# What two implementations may differ by: what is stored must be equal; what is trained from it differs by the rounding
# of low precision gradients and weights, at a learning rate of 1e-2 whose updates Adam normalises.
LOSS_TOLERANCES = {"fp32": 1e-5, "fp16": 1e-3, "bf16": 4e-3}
WEIGHT_TOLERANCES = {"fp32": 1e-6, "fp16": 1e-5, "bf16": 1e-3}
# From a universal checkpoint of stage 3 upstream itself goes on differently: it counts steps once per sub-group.
UNIVERSAL_STAGE_3_TOLERANCE = 5e-3
HEADINGS = ("case", "loaded", "states", "buffers", "client", "losses", "trained", "to_fp32", "result")


def difference(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the largest absolute difference; a name or shape that only one side has is an infinite one."""
    if actual.keys() != expected.keys() or any(actual[name].shape != expected[name].shape for name in expected):
        return float("inf")
    return max(((actual[name].double() - expected[name].double()).abs().max().item()
                for name in expected if expected[name].numel()), default=0.0)


def check_training(case: Case, folder: Path, expected: dict, **top: object) -> dict[str, float]:
    """Load, compare what was loaded, train on, compare again. Returns heading -> difference. Collective.

    Universal checkpoints restore neither frozen weights nor buffers: the model has those of the first run. After a
    load, upstream's access to optimizer states works at stage 3 alone; elsewhere the training after it tells."""
    is_universal = folder.name in UNIVERSAL
    engine = start(case, phase=0 if is_universal else 1, **top)
    path, client_state = engine.load_checkpoint(str(folder))
    if path is None:
        raise FileNotFoundError(f"load_checkpoint found nothing in {folder}")
    weights, buffers = full_weights(engine), dict(engine.module.named_buffers())
    is_continued = CLIENT_STATE.items() <= client_state.items() and engine.global_steps == STEPS_BEFORE
    found = {"loaded": difference(weights, expected["saved"]), "client": 0.0 if is_continued else float("inf")}
    if case.stage == 3:
        states = full_states(engine, case, weights)
        found["states"] = max(difference(states[key], expected["saved_states"][key]) for key in states)
    if not is_universal:
        names = expected["saved_buffers"]
        found["buffers"] = difference({name: buffers[name] for name in names}, expected["saved_buffers"])
    losses = of_all_ranks(train(engine, STEPS_BEFORE, STEPS_BEFORE + STEPS_AFTER))
    return found | {"losses": difference({"losses": losses}, {"losses": expected["losses"]}),
                    "trained": difference(full_weights(engine), expected["final"])}


def check_to_fp32(case: Case, folder: Path, expected: dict) -> float:
    """Return how far upstream's consolidated weights are from those that were saved. At stage 1 frozen ones are left
    out, as upstream does."""
    weights = get_fp32_state_dict_from_zero_checkpoint(str(folder))
    trainable = {name for name, parameter in SmallAwkwardModel().named_parameters() if parameter.requires_grad}
    names = [name for name in expected["saved"] if name in trainable or case.stage > 1]
    saved = {name: expected["saved"][name] for name in names}
    return difference({name: weights[name].float() for name in names}, saved)


def check(case: Case, folder: Path, report: Path) -> None:
    """Check one folder and leave the differences as JSON in `report`. Runs on every rank of the case."""
    deepspeed.init_distributed("gloo")
    allow_fp16_on_cpu()
    expected = torch.load(folder / "expected.pt", weights_only=True)
    is_universal = folder.name in UNIVERSAL
    top = {"checkpoint": {"load_universal": True}} if is_universal else {}
    found = check_training(case, folder, expected, **top)
    if case.is_readable_by_zero_to_fp32 and not is_universal:
        found["to_fp32"] = check_to_fp32(case, folder, expected)
    if RANK == 0:
        report.write_text(json.dumps(found))


def wrong_in(found: dict[str, float], case: Case, is_universal: bool) -> list[str]:
    """Return a text per difference that is out of tolerance."""
    limits = {"losses": LOSS_TOLERANCES[case.dtype], "trained": WEIGHT_TOLERANCES[case.dtype]}
    if is_universal and case.stage == 3:
        limits = dict.fromkeys(limits, UNIVERSAL_STAGE_3_TOLERANCE)
    return [f"{what} differs by {value:.3g}" for what, value in found.items() if not value <= limits.get(what, 0.0)]


def row_of(case: Case, folder: Path) -> list[str]:
    """Run the check on the case's ranks and return its row of the table; the last cell is "ok" or what is wrong."""
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch, "report.json")
        error = run_ranks(__file__, case, str(folder), "--report", str(report))
        found = json.loads(report.read_text()) if error is None else {}
    wrong = wrong_in(found, case, folder.name in UNIVERSAL)
    numbers = [f"{found[heading]:.2g}" if heading in found else "-" for heading in HEADINGS[1:-1]]
    return [folder.name, *numbers, error or "; ".join(wrong) or "ok"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="with a folder per case")
    parser.add_argument("--only", default="", help="check the folders whose name contains this text")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--report", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not is_upstream():
        parser.error(f"needs upstream's deepspeed, but {deepspeed.__file__} was imported")
    cases = {case.name: case for case in CASES}
    if arguments.case:
        return check(cases[arguments.case], arguments.folder, arguments.report)
    folders = cases | {name: cases[source] for name, source in UNIVERSAL.items() if (arguments.folder / name).exists()}
    rows = [row_of(case, arguments.folder / name) for name, case in folders.items() if arguments.only in name]
    for row in [HEADINGS, *rows]:
        print(" | ".join(cell.ljust(width) for cell, width in zip(row, (26, *[8] * 7, 0))))
    sys.exit(any(row[-1] != "ok" for row in rows))


if __name__ == "__main__":
    main()
