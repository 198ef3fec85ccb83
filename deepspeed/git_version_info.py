"""What this installation is made of: commit, operators, and the torch beside it. Worked out when a name is read.

`version`, `git_hash` and `git_branch` are texts ("unknown" outside a checkout); `installed_ops`, `compatible_ops` map
operator names to bool, and `torch_info` holds versions as texts ("0.0" for what torch was built without).
"""

from pathlib import Path

import torch

from deepspeed.version import __version__ as version  # noqa: F401

UNKNOWN = "unknown"
SHORT_HASH_LENGTH = 8


def _git_directory() -> Path:
    return Path(__file__).parents[1] / ".git"


def _head() -> tuple[str, str]:
    """Return (commit, branch) of the checkout that holds this file, read from git's own files."""
    try:
        head = (_git_directory() / "HEAD").read_text().strip()
    except OSError:
        return UNKNOWN, UNKNOWN
    if not head.startswith("ref: "):
        return head[:SHORT_HASH_LENGTH], "HEAD"
    reference = head.removeprefix("ref: ")
    return _commit_of(reference)[:SHORT_HASH_LENGTH], reference.removeprefix("refs/heads/")


def _commit_of(reference: str) -> str:
    loose = _git_directory() / reference
    if loose.is_file():
        return loose.read_text().strip()
    packed = _git_directory() / "packed-refs"
    for line in packed.read_text().splitlines() if packed.is_file() else ():
        if line.endswith(f" {reference}"):
            return line.split()[0]
    return UNKNOWN


def _installed_ops() -> dict[str, bool]:
    from deepspeed.ops.op_builder import ALL_OPS

    return {name: builder.is_installed() for name, builder in ALL_OPS.items()}


def _compatible_ops() -> dict[str, bool]:
    from deepspeed.ops.op_builder import ALL_OPS

    return {name: builder.is_compatible() for name, builder in ALL_OPS.items()}


def _torch_info() -> dict[str, str]:
    def major_minor(text: str | None) -> str:
        return ".".join((text or "0.0").split("+")[0].split(".")[:2])

    return {
        "version": major_minor(torch.__version__),
        "cuda_version": major_minor(torch.version.cuda),
        "hip_version": major_minor(torch.version.hip),
    }


_READERS = {
    "git_hash": lambda: _head()[0],
    "git_branch": lambda: _head()[1],
    "installed_ops": _installed_ops,
    "compatible_ops": _compatible_ops,
    "torch_info": _torch_info,
}


def __getattr__(name: str) -> object:
    reader = _READERS.get(name)
    if reader is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return reader()
