"""ds_report."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import torch

from deepspeed import env_report
from deepspeed.ops.native import cpu_optimizers
from deepspeed.ops.op_builder import ALL_OPS
from deepspeed.version import __version__


def report(capsys, *flags: str) -> str:
    assert env_report.cli_main(list(flags)) == 0
    return capsys.readouterr().out


def test_full_report(capsys):
    text = report(capsys)
    assert all(name in text for name in ALL_OPS)
    assert "not available yet" in text
    row = next(line for line in text.splitlines() if "fused_adam" in line)
    assert row.count("YES") == 2 and "NO" not in row
    (row,) = (line for line in text.splitlines() if "cpu_adam " in line)
    assert cpu_optimizers.describe() in row
    for fact in (__version__, torch.__version__, sys.executable, "gloo", "/dev/shm", "cores"):
        assert fact in text


def table_of(text: str) -> dict[str, list[str]]:
    """Return the table of operators: name -> the other cells, without the blanks at which lines are broken."""
    rows, name = {}, ""
    for line in text[:text.find("DeepSpeed environment")].splitlines():
        if line.startswith("│"):
            first, *cells = ["".join(cell.split()) for cell in line.strip("│").split("│")]
            name = first or name  # a note may go on in the next line
            rows[name] = [above + cell for above, cell in zip(rows.get(name, [""] * len(cells)), cells)]
    return rows


def test_every_operator_has_a_row_that_says_what_its_builder_says(capsys):
    rows, short = table_of(report(capsys)), table_of(report(capsys, "--hide_errors_and_warnings"))
    assert list(rows) == list(short) == sorted(ALL_OPS) and len(rows) > 20
    for name, builder in ALL_OPS.items():
        reason = builder.obstacle()
        words = ["YES" if builder.is_installed() else "NO", "NO" if reason else "YES"]
        assert rows[name] == [*words, "".join((reason or builder.note()).split())]
        assert short[name] == words
        assert bool(reason) == (words[1] == "NO") and (not reason or rows[name][2])
    assert rows["fused_adam"][:2] == rows["utils"][:2] == ["YES", "YES"]
    assert rows["transformer"] == ["NO", "NO", "notavailableyetinthisrelease"]


def test_flags_hide_parts(capsys):
    without_ops = report(capsys, "--hide_operator_status")
    assert "fused_adam" not in without_ops and torch.__version__ in without_ops
    without_reasons = report(capsys, "--hide_errors_and_warnings")
    assert "fused_adam" in without_reasons and "not available yet" not in without_reasons


def test_small_shared_memory_is_pointed_out(monkeypatch):
    for size, is_small in ((64 * 2**20, True), (8 * 2**30, False)):
        monkeypatch.setattr(
            env_report.shutil, "disk_usage", lambda path, size=size: SimpleNamespace(total=size, free=size)
        )
        assert ("--shm-size" in env_report.shared_memory()) == is_small


def test_nvcc_version(tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert env_report.nvcc_version().startswith("not found")
    program = tmp_path / "bin" / "nvcc"
    program.write_text("#!/bin/sh\necho Cuda compilation tools, release 12.8, V12.8.93\n")
    program.chmod(0o755)
    assert env_report.nvcc_version() == "12.8"
