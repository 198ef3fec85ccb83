"""The shape of the package: layers, no cycles, a light import, and collectives in one place.

The layers, from the ground up. A module imports its own layer and those below; so what a part may know can be read off
its place.

    0  errors, utils, accelerator
    1  comm (collectives, topology, wires), ops, and leaf parts that take plain arguments (schedules, loaders, scalers)
    2  the configuration, and the plan that is made from it once
    3  runtime/zero: buckets, reducer, optimizer, coordinator
    4  features: checkpoints, monitors, profilers, ...
    5  the engine and what builds it
    6  the user's entry: deepspeed itself, command-line tools
"""

import ast
import graphlib
import subprocess
import sys

import pytest

from tests.support.imports import PACKAGE, PUBLIC_PATH_MARK, ROOT, Import, imports, imports_of, modules

# By dotted prefix; the longest counts.
LAYERS = {
    "deepspeed": 6,
    "deepspeed.errors": 0,
    "deepspeed.version": 0,
    "deepspeed.accelerator": 0,
    "deepspeed.utils": 0,
    "deepspeed.utils.groups": 1,
    "deepspeed.utils.tensor_fragment": 3,
    "deepspeed.utils.zero_to_fp32": 4,
    "deepspeed.utils.zero_to_torch": 4,
    "deepspeed.comm": 1,
    "deepspeed.ops": 1,
    "deepspeed.runtime.base_optimizer": 1,
    "deepspeed.runtime.comm": 1,
    "deepspeed.runtime.dataloader": 1,
    "deepspeed.runtime.fp16": 1,
    "deepspeed.runtime.grad_squares": 1,
    "deepspeed.runtime.lr_schedules": 1,
    "deepspeed.runtime.lr_tuning": 1,
    "deepspeed.runtime.named_class": 1,
    "deepspeed.runtime.optimizers": 1,
    "deepspeed.runtime.policies": 1,
    "deepspeed.runtime.tensor_parallel": 1,
    "deepspeed.runtime.utils": 1,
    "deepspeed.runtime.plan": 2,
    "deepspeed.runtime.unavailable": 2,
    "deepspeed.runtime.grad_norm": 3,
    "deepspeed.runtime.zero": 3,
    "deepspeed.runtime.swap_tensor": 3,
    "deepspeed.checkpoint": 4,
    "deepspeed.compression": 4,
    "deepspeed.inference": 4,
    "deepspeed.module_inject": 4,
    "deepspeed.moe": 4,
    "deepspeed.monitor": 4,
    "deepspeed.profiling": 4,
    "deepspeed.runtime.activation_checkpointing": 4,
    "deepspeed.runtime.checkpoint_engine": 4,
    "deepspeed.runtime.data_pipeline": 4,
    "deepspeed.runtime.sequence_parallel": 4,
    "deepspeed.sequence": 4,
    "deepspeed.runtime": 5,
    "deepspeed.pipe": 5,
    "deepspeed.runtime.config_cli": 6,
    "deepspeed.runtime.fit_cli": 6,
    "deepspeed.runtime.plan_cli": 6,
    "deepspeed.nvme": 6,
}

# (importer, imported): why a module may import from a layer above its own, inside a function.
ALLOWED_UPWARD: dict[tuple[str, str], str] = {}

# torch.distributed's parts that start processes; and the report, which tells what torch was built with. The rest
# communicates and belongs to deepspeed.comm.
ALLOWED_TORCH_DISTRIBUTED = {
    "deepspeed.env_report": ("torch.distributed",),
    "deepspeed.launcher": ("torch.distributed.elastic", "torch.distributed.launcher", "torch.distributed.run"),
    "deepspeed.elasticity": ("torch.distributed.elastic",),
}

OPTIONAL_PACKAGES = (
    "aim",
    "comet_ml",
    "kvikio",
    "lightning",
    "matplotlib",
    "mpi4py",
    "optuna",
    "pandas",
    "tensorboard",
    "transformers",
    "triton",
    "wandb",
)

MAX_IMPORT_SECONDS = 0.5
MAX_PUBLIC_PATH_LINES = 10


def _starts_with(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def _layer(name: str) -> int:
    """The layer of a module. A section's config is part of the configuration wherever its feature lies."""
    if name in LAYERS:
        return LAYERS[name]
    if modules()[name].is_public_path:
        return max((_layer(found.imported) for found in imports_of(modules()[name]) if _is_ours(found)), default=0)
    last = name.rpartition(".")[2]
    if last.startswith("config") or last.endswith("_config"):
        return 2
    return LAYERS[max((prefix for prefix in LAYERS if _starts_with(name, prefix)), key=len)]


def _is_ours(found: Import) -> bool:
    return _starts_with(found.imported, PACKAGE)


def test_every_layer_entry_names_a_module():
    missing = {prefix for prefix in LAYERS if prefix not in modules()}
    assert not missing, "remove them from LAYERS, or spell them as the modules are called"


def test_imports_go_down():
    upward = [
        f"{found} (layer {_layer(found.importer)} -> {_layer(found.imported)})"
        for found in imports()
        if _is_ours(found)
        and _layer(found.imported) > _layer(found.importer)
        and not (found.is_lazy and (found.importer, found.imported) in ALLOWED_UPWARD)
    ]
    assert not upward, "\n".join(upward)


def test_allowed_exceptions_are_in_use():
    in_use = {(found.importer, found.imported) for found in imports() if found.is_lazy}
    assert set(ALLOWED_UPWARD) <= in_use


def test_no_import_cycles():
    graph: dict[str, set[str]] = {name: set() for name in modules()}
    for found in imports():
        if _is_ours(found) and not found.is_lazy and found.imported != found.importer:
            graph[found.importer].add(found.imported)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


def test_public_paths_only_re_export():
    too_long = []
    for module in modules().values():
        if not module.is_public_path:
            continue
        lines = module.source.splitlines()
        statements = ast.parse(module.source).body
        re_exports = all(
            isinstance(statement, (ast.Import, ast.ImportFrom, ast.Assign, ast.Expr)) for statement in statements
        )
        if len(lines) > MAX_PUBLIC_PATH_LINES or not re_exports:
            too_long.append(str(module.path.relative_to(ROOT)))
    assert not too_long, f"files marked `{PUBLIC_PATH_MARK}` re-export names, in {MAX_PUBLIC_PATH_LINES} lines at most"


def _uses_of_torch_distributed() -> list[tuple[str, int, str]]:
    """(module, line, name) of everything of torch.distributed outside deepspeed.comm that exists at run time."""
    uses = [
        (found.importer, found.line, found.imported)
        for found in imports()
        if _starts_with(found.imported, "torch.distributed")
    ]
    for module in modules().values():
        for node in ast.walk(ast.parse(module.source)):
            if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed":
                uses.append((module.name, node.lineno, "torch.distributed"))
    return [use for use in uses if not _starts_with(use[0], "deepspeed.comm")]


def test_collectives_only_in_comm():
    wrong = []
    for module, line, name in _uses_of_torch_distributed():
        allowed = [ALLOWED_TORCH_DISTRIBUTED[key] for key in ALLOWED_TORCH_DISTRIBUTED if _starts_with(module, key)]
        if not any(_starts_with(name, prefix) for prefixes in allowed for prefix in prefixes):
            wrong.append(f"{module}:{line} uses {name}")
    assert not wrong, "use deepspeed.comm, and import types under TYPE_CHECKING:\n" + "\n".join(wrong)


def test_optional_packages_are_not_imported_at_module_level():
    wrong = [
        str(found)
        for found in imports()
        if not found.is_lazy and any(_starts_with(found.imported, package) for package in OPTIONAL_PACKAGES)
    ]
    assert not wrong, "\n".join(wrong)


IMPORT_SCRIPT = """
import sys, time
import torch
import psutil
process = psutil.Process()
before = set(sys.modules), process.num_threads()
started = time.process_time()
import deepspeed
seconds = time.process_time() - started
if "all" in sys.argv:
    from deepspeed.runtime import engine, initialize
new = {name.split(".")[0] for name in set(sys.modules) - before[0]}
print("RESULT", repr({
    "seconds": seconds,
    "threads": process.num_threads() - before[1],
    "children": len(process.children()),
    "optional": sorted(new & set(OPTIONAL)),
    "cuda": torch.cuda.is_initialized(),
    "group": torch.distributed.is_initialized(),
}))
"""


def _import_in_a_new_process(*arguments: str) -> dict:
    script = f"OPTIONAL = {OPTIONAL_PACKAGES!r}\n{IMPORT_SCRIPT}"
    command = [sys.executable, "-c", script, *arguments]
    completed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert completed.returncode == 0, completed.stderr
    printed, _, result = completed.stdout.partition("RESULT ")
    assert printed == "", "importing prints"
    assert completed.stderr == "", "importing prints"
    return ast.literal_eval(result)


@pytest.mark.parametrize("what", ["package", "all"])
def test_import_is_free_of_side_effects(what):
    result = _import_in_a_new_process(what)
    del result["seconds"]
    assert result == {"threads": 0, "children": 0, "optional": [], "cuda": False, "group": False}


def test_import_is_cheap():
    # Processor time, so that a busy machine does not count; the best of three, so that a cold disk does not.
    seconds = min(_import_in_a_new_process("package")["seconds"] for _ in range(3))
    assert seconds < MAX_IMPORT_SECONDS
