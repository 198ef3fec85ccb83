"""Environment variables that travel from the launching machine to the other nodes."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence

from deepspeed.errors import LauncherError
from deepspeed.launcher.constants import (
    DEEPSPEED_ENVIRONMENT_NAME,
    DEEPSPEED_ENVIRONMENT_PATHS,
    EXPORT_ENVS,
    PER_NODE_ENVS,
)


def exported_environment(environ: Mapping[str, str], accelerator_prefixes: Sequence[str]) -> dict[str, str]:
    """Return the variables to export to every node: those of `environ` by prefix, then the environment files' lines.

    accelerator_prefixes: what the accelerator adds to `EXPORT_ENVS` (NCCL for CUDA).
    Raises: LauncherError for a bad line in an environment file.
    """
    prefixes = (*EXPORT_ENVS, *accelerator_prefixes)
    excluded = {name for marker, names in PER_NODE_ENVS.items() if marker in environ for name in names}
    exports = {name: value for name, value in environ.items() if name.startswith(prefixes) and name not in excluded}
    for folder in DEEPSPEED_ENVIRONMENT_PATHS:
        path = os.path.join(folder, DEEPSPEED_ENVIRONMENT_NAME)
        if os.path.isfile(path):
            with open(path, encoding="utf-8") as lines:
                exports.update(parse_environment_lines(lines, source=path))
    return exports


def parse_environment_lines(lines: Iterable[str], source: str) -> dict[str, str]:
    """Return the variables of `KEY=VALUE` lines; blank lines and lines that start with `#` are skipped.

    source: name of the file, for errors. Raises: LauncherError with the line.
    """
    variables: dict[str, str] = {}
    for number, raw in enumerate(lines, start=1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        name, equals, value = line.partition("=")
        if not equals or not name.isidentifier():
            raise LauncherError(f'{source}, line {number}: "{line}" is not of the form KEY=VALUE; correct the line')
        variables[name] = value
    return variables
