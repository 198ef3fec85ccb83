"""Names of the learning-rate schedules and of their parameters, and the command-line flags that set them.

`lr_schedules` offers these names and functions to clients as well.
"""

import argparse
from collections.abc import Mapping

LR_SCHEDULE = "lr_schedule"
LR_RANGE_TEST = "LRRangeTest"
ONE_CYCLE = "OneCycle"
WARMUP_LR = "WarmupLR"
WARMUP_DECAY_LR = "WarmupDecayLR"
WARMUP_COSINE_LR = "WarmupCosineLR"
VALID_LR_SCHEDULES = [LR_RANGE_TEST, ONE_CYCLE, WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR]

LR_RANGE_TEST_MIN_LR = "lr_range_test_min_lr"
LR_RANGE_TEST_STEP_RATE = "lr_range_test_step_rate"
LR_RANGE_TEST_STEP_SIZE = "lr_range_test_step_size"
LR_RANGE_TEST_STAIRCASE = "lr_range_test_staircase"

CYCLE_MIN_LR = "cycle_min_lr"
CYCLE_MAX_LR = "cycle_max_lr"
CYCLE_FIRST_STEP_SIZE = "cycle_first_step_size"
CYCLE_FIRST_STAIR_COUNT = "cycle_first_stair_count"
CYCLE_SECOND_STEP_SIZE = "cycle_second_step_size"
CYCLE_SECOND_STAIR_COUNT = "cycle_second_stair_count"
DECAY_LR_RATE = "decay_lr_rate"
DECAY_STEP_SIZE = "decay_step_size"
CYCLE_MOMENTUM = "cycle_momentum"
CYCLE_MIN_MOM = "cycle_min_mom"
CYCLE_MAX_MOM = "cycle_max_mom"
DECAY_MOM_RATE = "decay_mom_rate"

WARMUP_MIN_LR = "warmup_min_lr"
WARMUP_MAX_LR = "warmup_max_lr"
WARMUP_NUM_STEPS = "warmup_num_steps"
WARMUP_TYPE = "warmup_type"
WARMUP_LOG_RATE = "log"
WARMUP_LINEAR_RATE = "linear"
WARMUP_MIN_RATIO = "warmup_min_ratio"
COS_MIN_RATIO = "cos_min_ratio"
TOTAL_NUM_STEPS = "total_num_steps"

# What each schedule takes from the command line, by flag name.
_TUNING_NAMES = {
    LR_RANGE_TEST: (LR_RANGE_TEST_MIN_LR, LR_RANGE_TEST_STEP_RATE, LR_RANGE_TEST_STEP_SIZE, LR_RANGE_TEST_STAIRCASE),
    ONE_CYCLE: (
        CYCLE_FIRST_STEP_SIZE,
        CYCLE_FIRST_STAIR_COUNT,
        CYCLE_SECOND_STEP_SIZE,
        CYCLE_SECOND_STAIR_COUNT,
        DECAY_STEP_SIZE,
        CYCLE_MIN_LR,
        CYCLE_MAX_LR,
        DECAY_LR_RATE,
        CYCLE_MOMENTUM,
        CYCLE_MIN_MOM,
        CYCLE_MAX_MOM,
        DECAY_MOM_RATE,
    ),
    WARMUP_LR: (WARMUP_MIN_LR, WARMUP_MAX_LR, WARMUP_NUM_STEPS, WARMUP_TYPE),
    WARMUP_DECAY_LR: (WARMUP_MIN_LR, WARMUP_MAX_LR, WARMUP_NUM_STEPS, WARMUP_TYPE),
    WARMUP_COSINE_LR: (WARMUP_MIN_RATIO, WARMUP_NUM_STEPS, COS_MIN_RATIO, WARMUP_TYPE),
}
# Flags whose default -1 means "not given", so that the schedule's own default applies.
_UNSET_IF_NEGATIVE = (CYCLE_FIRST_STAIR_COUNT, CYCLE_SECOND_STEP_SIZE, CYCLE_SECOND_STAIR_COUNT)


def add_tuning_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """`parser` with one more group, "Convergence Tuning": a flag for each parameter of the schedules."""
    group = parser.add_argument_group("Convergence Tuning", "Convergence tuning configurations")
    group.add_argument("--lr_schedule", type=str, default=None, help="LR schedule for training.")
    flags: list[tuple[str, type, float | int | str, str]] = [
        (LR_RANGE_TEST_MIN_LR, float, 0.001, "Starting learning rate of the range test."),
        (LR_RANGE_TEST_STEP_RATE, float, 1.0, "Relative growth of the rate per interval of the range test."),
        (LR_RANGE_TEST_STEP_SIZE, int, 1000, "Steps per interval of the range test."),
        (CYCLE_FIRST_STEP_SIZE, int, 1000, "Steps of the rising half of the cycle."),
        (CYCLE_FIRST_STAIR_COUNT, int, -1, "Stairs in the rising half (-1: continuous)."),
        (CYCLE_SECOND_STEP_SIZE, int, -1, "Steps of the falling half (-1: as the rising half)."),
        (CYCLE_SECOND_STAIR_COUNT, int, -1, "Stairs in the falling half (-1: as the rising half)."),
        (DECAY_STEP_SIZE, int, 1000, "Steps per decay interval after the cycle."),
        (CYCLE_MIN_LR, float, 0.01, "Lowest learning rate of the cycle."),
        (CYCLE_MAX_LR, float, 0.1, "Highest learning rate of the cycle."),
        (DECAY_LR_RATE, float, 0.0, "Decay of the learning rate per interval after the cycle."),
        (CYCLE_MIN_MOM, float, 0.8, "Lowest beta1 of the cycle."),
        (CYCLE_MAX_MOM, float, 0.9, "Highest beta1 of the cycle."),
        (DECAY_MOM_RATE, float, 0.0, "Growth of beta1 per interval after the cycle."),
        (WARMUP_MIN_LR, float, 0, "Learning rate at the start of the warm-up."),
        (WARMUP_MAX_LR, float, 0.001, "Learning rate at the end of the warm-up."),
        (WARMUP_NUM_STEPS, int, 1000, "Steps of the warm-up."),
        (WARMUP_TYPE, str, WARMUP_LOG_RATE, "Shape of the warm-up: log or linear."),
        (WARMUP_MIN_RATIO, float, 0.01, "Fraction of the rate at the start of the cosine schedule's warm-up."),
        (COS_MIN_RATIO, float, 0.01, "Fraction of the rate at the end of the cosine."),
    ]
    for name, value_type, default, text in flags:
        group.add_argument(f"--{name}", type=value_type, default=default, help=text)
    group.add_argument(
        f"--{LR_RANGE_TEST_STAIRCASE}",
        type=_parse_bool,
        default=False,
        help="Raise the rate of the range test in stairs.",
    )
    group.add_argument(f"--{CYCLE_MOMENTUM}", default=False, action="store_true", help="Cycle beta1 with the rate.")
    return parser


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """(known, unknown): the tuning flags of the command line, and what was left."""
    return add_tuning_arguments(argparse.ArgumentParser()).parse_known_args()


def override_lr_range_test_params(args: argparse.Namespace, params: dict[str, object]) -> None:
    """Copy the range test's flags that `args` has into `params`."""
    _override(args, params, LR_RANGE_TEST)


def override_1cycle_params(args: argparse.Namespace, params: dict[str, object]) -> None:
    """Copy the one-cycle flags that `args` has into `params`, leaving out those that hold the -1 of "not given"."""
    _override(args, params, ONE_CYCLE)


def override_warmupLR_params(args: argparse.Namespace, params: dict[str, object]) -> None:
    """Copy the warm-up flags that `args` has into `params`."""
    _override(args, params, WARMUP_LR)


def override_params(args: argparse.Namespace, params: dict[str, object]) -> None:
    """Copy the flags of range test, one-cycle and warm-up that `args` has into `params`."""
    for schedule in (LR_RANGE_TEST, ONE_CYCLE, WARMUP_LR):
        _override(args, params, schedule)


def get_config_from_args(args: argparse.Namespace) -> tuple[dict[str, object] | None, str | None]:
    """(`scheduler` section, None) for the schedule that `args.lr_schedule` names, or (None, what is wrong)."""
    name = getattr(args, LR_SCHEDULE, None)
    if name is None:
        return None, f"--{LR_SCHEDULE} not specified on command line"
    if name not in VALID_LR_SCHEDULES:
        return None, f"{name} is not supported LR schedule (expected one of {', '.join(VALID_LR_SCHEDULES)})"
    params: dict[str, object] = {}
    _override(args, params, name)
    return {"type": name, "params": params}, None


def get_lr_from_config(config: Mapping[str, object]) -> tuple[float | None, str]:
    """(learning rate, "") that a `scheduler` section aims at, or (None, what is wrong).

    It is the minimum of a range test and the maximum of a cycle or warm-up; the cosine schedule has none of its own.
    """
    for key in ("type", "params"):
        if key not in config:
            return None, f"LR schedule {key} not defined in config"
    name, params = config["type"], config["params"]
    if name not in VALID_LR_SCHEDULES:
        return None, f"{name} is not a valid LR schedule"
    key = {LR_RANGE_TEST: LR_RANGE_TEST_MIN_LR, ONE_CYCLE: CYCLE_MAX_LR}.get(name, WARMUP_MAX_LR)
    if key not in params:
        return None, f"LR schedule {name} has no {key} in config"
    return params[key], ""


def _override(args: argparse.Namespace, params: dict[str, object], schedule: str) -> None:
    for name in _TUNING_NAMES[schedule]:
        value = getattr(args, name, None)
        is_unset = value is None or (name in _UNSET_IF_NEGATIVE and value < 0)
        if not is_unset:
            params[name] = value


def _parse_bool(text: str) -> bool:
    """argparse's `type=bool` takes every non-empty text, "False" too, as true."""
    values = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if text.lower() not in values:
        raise argparse.ArgumentTypeError(f"{text!r} is not a boolean (expected true or false)")
    return values[text.lower()]
