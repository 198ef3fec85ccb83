"""The package's import graph, read from its source without importing it."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = "deepspeed"
PUBLIC_PATH_MARK = "# public path"
MARK_LINES = 3


@dataclass(frozen=True)
class Import:
    """One name that a module imports at run time.

    imported: the module where it is one of the package, else the dotted name as written, `from a import b` being "a.b".
    is_lazy: inside a function, so executed when that is called.
    """

    importer: str
    imported: str
    line: int
    is_lazy: bool

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.imported}"


@dataclass(frozen=True)
class Module:
    """One source file of the package, tests left out."""

    name: str
    path: Path
    is_package: bool

    @property
    def source(self) -> str:
        return self.path.read_text()

    @property
    def is_public_path(self) -> bool:
        """The file says, in its first lines, that it only offers names of other modules where users look for them."""
        return any(PUBLIC_PATH_MARK in line for line in self.source.splitlines()[:MARK_LINES])


@cache
def modules() -> dict[str, Module]:
    """All modules of the package by dotted name."""
    found = {}
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if "tests" in parts:
            continue
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        found[name] = Module(name, path, is_package)
    return found


@cache
def imports() -> tuple[Import, ...]:
    """All imports that run, those under `if TYPE_CHECKING:` left out."""
    return tuple(found for module in modules().values() for found in imports_of(module))


def imports_of(module: Module) -> Iterator[Import]:
    """The imports of one module."""
    for node, is_lazy in _import_nodes(ast.parse(module.source), is_lazy=False):
        for imported in _names(node, module):
            yield Import(module.name, imported, node.lineno, is_lazy)


def _import_nodes(tree: ast.AST, is_lazy: bool) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node, is_lazy
        elif isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            for otherwise in node.orelse:
                yield from _import_nodes(otherwise, is_lazy)
        else:
            is_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            yield from _import_nodes(node, is_lazy or is_function)


def _names(node: ast.Import | ast.ImportFrom, module: Module) -> Iterator[str]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield _module_of(alias.name)
        return
    base = node.module or ""
    if node.level:
        parts = module.name.split(".")
        parents = parts[: len(parts) - node.level + module.is_package]
        base = ".".join([*parents, base] if base else parents)
    yield from dict.fromkeys(_module_of(f"{base}.{alias.name}") for alias in node.names)


def _module_of(name: str) -> str:
    """The package's module that `name` is or lies in; other names as they are."""
    if name.split(".")[0] != PACKAGE:
        return name
    while name not in modules() and "." in name:
        name = name.rpartition(".")[0]
    return name
