"""The quick start example, made tiny: it runs from end to end, its resume is exact, and its verdict is honest."""

import csv
import math
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "gpt"
TINY = "--layers 2 --heads 2 --width 32 --context 32 --steps 6 --sample-bytes 8".split()


@pytest.fixture
def data(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLE))
    import data

    return data


def test_example_runs(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    run = subprocess.run([sys.executable, str(EXAMPLE / "train.py"), *TINY, "--out", str(tmp_path)], env=environment,
                         capture_output=True, text=True, timeout=300)
    assert "at most 0.0e+00 bits per byte" in run.stdout, run.stdout + run.stderr
    assert "unigram entropy" in run.stdout
    assert run.returncode == 1  # six steps learn nothing, and it says so
    with open(tmp_path / "loss.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == [1, 2, 3, 4, 5, 6]
    assert (tmp_path / "loss.png").stat().st_size > 1000
    assert (tmp_path / "checkpoint" / "latest").read_text() == "global_step3"


def test_batches_follow_from_their_number(data):
    text = torch.arange(1000).to(torch.uint8)
    first, again, other = (data.random_batch(text, 4, 16, number, torch.device("cpu")) for number in (5, 5, 6))
    assert torch.equal(first[0], again[0]) and not torch.equal(first[0], other[0])
    assert torch.equal(first[0][:, 1:], first[1][:, :-1])


def test_validation_is_shared_out(data):
    text = torch.arange(256).repeat(8).to(torch.uint8)
    ranks = [data.validation_batches(text, 2, 8, 3, rank, 2, torch.device("cpu")) for rank in (0, 1)]
    rows = torch.cat([ids for batches in ranks for ids, _ in batches])
    whole = torch.cat([ids for ids, _ in data.validation_batches(text, 4, 8, 3, 0, 1, torch.device("cpu"))])
    assert Counter(map(tuple, rows.tolist())) == Counter(map(tuple, whole.tolist()))


def test_unigram_entropy(data):
    text = torch.tensor([0, 0, 1, 2], dtype=torch.uint8)
    assert math.isclose(data.unigram_entropy_bits(text), 1.5)
