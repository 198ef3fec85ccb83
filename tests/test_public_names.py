"""Every public name is where users look for it, and every command leads to a function."""

import functools
import importlib
import inspect
import sys

import pytest

from tests.public_names import PUBLIC_MEMBERS, PUBLIC_NAMES, PUBLIC_PARAMETERS
from tests.support.imports import ROOT


def _import_or_read(path: str) -> object:
    """The module at a dotted path, or, as for `deepspeed.zero`, the attribute that users reach under it."""
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        parent, _, name = path.rpartition(".")
        if error.name != path or not parent:
            raise
        return getattr(_import_or_read(parent), name)


@pytest.mark.parametrize("path", PUBLIC_NAMES)
def test_names_exist(path):
    module = _import_or_read(path)
    missing = [name for name in PUBLIC_NAMES[path] if not hasattr(module, name)]
    assert not missing


@pytest.mark.parametrize("path", PUBLIC_MEMBERS)
def test_members_exist(path):
    module, name = path.split(":")
    owner = getattr(_import_or_read(module), name)
    missing = [member for member in PUBLIC_MEMBERS[path] if not hasattr(owner, member)]
    assert not missing


@pytest.mark.parametrize("path", PUBLIC_PARAMETERS)
def test_parameters_keep_name_and_order(path):
    module, name = path.split(":")
    function = functools.reduce(getattr, name.split("."), _import_or_read(module))
    parameters = [parameter for parameter in inspect.signature(function).parameters if parameter != "self"]
    expected = PUBLIC_PARAMETERS[path]
    assert tuple(parameters[: len(expected)]) == expected


def _console_scripts() -> dict[str, str]:
    """The commands of pyproject.toml; read by hand where the standard library has no TOML parser."""
    text = (ROOT / "pyproject.toml").read_text()
    if sys.version_info >= (3, 11):
        import tomllib

        return tomllib.loads(text)["project"]["scripts"]
    section = text.split("[project.scripts]\n")[1].split("\n\n")[0]
    pairs = (line.split(" = ") for line in section.splitlines())
    return {name.strip('"'): target.strip('"') for name, target in pairs}


@pytest.mark.parametrize("command", _console_scripts())
def test_commands_lead_to_functions(command):
    module, name = _console_scripts()[command].split(":")
    assert callable(getattr(importlib.import_module(module), name))


def test_version_is_stated_once():
    deepspeed = pytest.importorskip("deepspeed")
    from deepspeed.version import __version__

    assert deepspeed.__version__ == __version__
    parts = (deepspeed.__version_major__, deepspeed.__version_minor__, deepspeed.__version_patch__)
    assert ".".join(map(str, parts)) == ".".join(__version__.split(".")[:3])
