"""The documents tell the truth: their examples run, and the files and functions that they name exist."""

import ast
import json
import os
import re
from pathlib import Path

import pytest

from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.unavailable import UNAVAILABLE
from tests.support.pool import distributed

ROOT = Path(__file__).parent.parent
PAGES = ("README.md", *sorted(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")))
DOCUMENTS = (*PAGES, "ARCHITECTURE.md", "CONTRIBUTING.md", "deepspeed/runtime/zero/README.md",
             *sorted(str(page.relative_to(ROOT)) for folder in ("docs/clients/*.md", "examples/*/README.md")
                     for page in ROOT.glob(folder)))
JSON_WORLD_SIZE = 8  # ranks that the configurations in the documents are checked for


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


def run_python_blocks(page: str, folder: Path) -> dict[str, object]:
    """Run the page's Python blocks in `folder` and in one namespace, as a reader would who types them in in turn."""
    os.chdir(folder)
    namespace: dict[str, object] = {"__name__": "__example__"}
    for block in blocks(page, "python"):
        line = (ROOT / page).read_text().split(block)[0].count("\n")
        exec(compile("\n" * line + block, page, "exec"), namespace)
    return namespace


@distributed(world_size=1)
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")])
def test_examples_run(page, tmp_path):
    run_python_blocks(page, tmp_path)


@distributed(world_size=2)
@pytest.mark.parametrize("page", ["docs/training-loop.md", "docs/zero.md", "docs/migration.md", "docs/checkpointing.md",
                                  "docs/tensor_parallelism.md",
                                  "docs/sequence_parallelism.md"])
def test_examples_run_on_two_ranks(page, tmp_path):
    run_python_blocks(page, tmp_path)


@distributed(world_size=2)
def test_first_example_learns_on_two_ranks(tmp_path):
    losses = run_python_blocks("README.md", tmp_path)["losses"]
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "json")])
def test_configurations_are_sound(page):
    for block in blocks(page, "json"):
        DeepSpeedConfig(json.loads(block), world_size=JSON_WORLD_SIZE).check_available()


def defined_names(path: Path) -> set[str]:
    """Functions and classes of a file, methods as Class.method."""
    names: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ClassDef):
            names.add(node.name)
            names.update(f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef))
    return names


ANSWERS = re.findall(r"`([\w/]+\.py): ([\w.]+)`", (ROOT / "ARCHITECTURE.md").read_text())


def test_there_are_answers():
    assert len(ANSWERS) > 30


@pytest.mark.parametrize("path, name", sorted(set(ANSWERS)), ids=lambda part: str(part))
def test_answer_exists(path, name):
    assert name in defined_names(ROOT / "deepspeed" / path)


@pytest.mark.parametrize("page", DOCUMENTS)
def test_links_lead_somewhere(page):
    targets = re.findall(r"\]\((?!https?:|#)([^)#]+)", (ROOT / page).read_text())
    assert [target for target in targets if not ((ROOT / page).parent / target).exists()] == []


def test_missing_features_are_named():
    section = (ROOT / "README.md").read_text().split("## Not available yet")[1].split("\n## ")[0]
    status = " ".join(section.split())
    assert [row.feature for row in UNAVAILABLE if row.path != "optimizer.type" and row.feature not in status] == []
