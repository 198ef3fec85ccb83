"""`ds_ckpt`: what it says about checkpoints of this package, of upstream, and about broken ones."""
from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from contextlib import redirect_stdout
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from deepspeed.checkpoint import folder, inspection
from deepspeed.checkpoint.cli import age, main
from deepspeed.checkpoint.format import LATEST, MANIFEST, RNG_STATES
from deepspeed.checkpoint.tests.runs import start, train
from deepspeed.checkpoint.tests.test_export import random_rank as export_rank
from deepspeed.checkpoint.tests.written_by_hand import ModelRank, write_checkpoint
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from tests import upstream
from tests.support.pool import distributed

FIXTURES = Path(upstream.__file__).parent / "fixtures"
OPTIM = "bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt"


def random_rank() -> ModelRank:
    """What a run of Adam holds."""
    rank = export_rank()
    trained = {name: tensor for group in rank.groups for name, tensor in group.items()}
    rank.state = {key: {name: tensor * factor for name, tensor in trained.items()}
                  for key, factor in (("exp_avg", 0.5), ("exp_avg_sq", 0.25))}
    rank.scalars = [{"step": torch.tensor(2.0)} for _ in rank.groups]
    return rank


def save(directory: Path, tag: str, stage: int = 2, world_size: int = 2, **model_keys: Any) -> Path:
    """Write a checkpoint with a manifest, as `save_checkpoint` leaves it; return its folder."""
    partial = write_checkpoint(folder.partial_folder(directory, tag), stage, world_size, [random_rank()], **model_keys)
    entries = {path.name: {"bytes": path.stat().st_size, "crc32": folder.file_crc32(path)} for path in partial.iterdir()}
    folder.commit(directory, tag, entries, {"stage": stage, "world_size": world_size, "global_steps": int(tag[4:])})
    folder.write_text(directory / LATEST, tag)
    return directory / tag


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Tags step1 (stage 3) and step2 (stage 2, the latest), two ranks each."""
    save(tmp_path / "run", "step1", stage=3)
    save(tmp_path / "run", "step2", epoch=7, note=torch.ones(3))
    for position, tag in enumerate(("step1", "step2")):
        os.utime(tmp_path / "run" / tag, (1e9 + position, 1e9 + position))
    return tmp_path / "run"


class Run:
    """One call of the command: exit code, standard output and error."""

    def __init__(self, capsys: pytest.CaptureFixture[str], *arguments: object):
        try:
            self.code = main([str(argument) for argument in arguments])
        except SystemExit as error:
            self.code = error.code
        self.out, self.err = capsys.readouterr()

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def ds_ckpt(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "200")
    return lambda *arguments: Run(capsys, *arguments)


# ---- ls --------------------------------------------------------------------------------------------------------------


def test_ls_tells_tags_from_what_a_killed_save_left(directory: Path, ds_ckpt):
    write_checkpoint(folder.partial_folder(directory, "step3"), 2, 2, [random_rank()])
    write_checkpoint(directory / "foreign", 1, 3, [random_rank()])
    (directory / "step1").rename(folder.replaced_folder(directory, "step1"))
    (directory / "logs").mkdir()
    found = ds_ckpt("ls", directory, "--json")
    assert found.code == 0 and found.json["latest"] == "step2" and found.json["latest_universal"] is None
    rows = {row["tag"]: row for row in found.json["checkpoints"]}
    assert list(rows) == ["step1", "step2", "step3", "foreign"]
    assert {tag: row["status"] for tag, row in rows.items()} == {
        "step1": "set aside", "step2": "complete", "step3": "half-written", "foreign": "no manifest"}
    assert {tag: (row["global_steps"], row["stage"], row["ranks"]) for tag, row in rows.items()} == {
        "step1": (None, None, None), "step2": (2, 2, 2), "step3": (None, None, None), "foreign": (2, 1, 3)}
    assert {tag for tag, row in rows.items() if row["pointers"] == ["latest"]} == {"step2"}
    in_folder = list((directory / "step2").iterdir())
    assert rows["step2"]["num_files"] == len(in_folder)
    assert rows["step2"]["num_bytes"] == sum(path.stat().st_size for path in in_folder)


def test_ls_table(directory: Path, ds_ckpt):
    (directory / LATEST).write_text("step9")
    found = ds_ckpt("ls", directory)
    rows = [re.split(r"\s*│\s*", line.strip("│ \n")) for line in found.out.splitlines() if line.startswith("│")]
    assert [row[0] for row in rows] == ["step1", "step2"] and [row[2:5] for row in rows] == [["1", "3", "2"], ["2", "2", "2"]]
    assert "latest names step9, which is not there." in found.out


def test_latest_is_found_where_a_save_was_cut_short(directory: Path, ds_ckpt):
    (directory / "step2").rename(folder.replaced_folder(directory, "step2"))
    rows = ds_ckpt("ls", directory, "--json").json["checkpoints"]
    assert [(row["tag"], row["pointers"]) for row in rows if row["pointers"]] == [("step2", ["latest"])]
    assert ds_ckpt("show", directory, "--json").json["counters"]["global_steps"] == 2


def test_ls_sees_files_that_are_missing_or_too_short(directory: Path, ds_ckpt):
    os.truncate(directory / "step2" / OPTIM.format(1), 100)
    (directory / "step1" / OPTIM.format(0)).unlink()
    rows = ds_ckpt("ls", directory, "--json").json["checkpoints"]
    assert [row["status"] for row in rows] == ["damaged", "damaged"]
    problems = {row["tag"]: row["problem"] for row in rows}
    assert problems["step1"] == f"{OPTIM.format(0)} is missing"
    assert re.fullmatch(rf"{OPTIM.format(1)} has 100 bytes instead of \d+", problems["step2"])


def test_ls_of_an_empty_directory(tmp_path: Path, ds_ckpt):
    found = ds_ckpt("ls", tmp_path)
    assert found.code == 0 and "has no checkpoints" in found.out


def test_age():
    assert [age(0, now) for now in (0, 59.9, 60, 7199, 7200, 86400, 8e6, -5)] == [
        "0 s", "59 s", "1 min", "1 h", "2 h", "1 d", "92 d", "0 s"]


# ---- show ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tag, stage", [("step1", 3), ("step2", 2)])
def test_show_tells_what_was_written(tag: str, stage: int, directory: Path, ds_ckpt):
    rank = random_rank()
    facts = ds_ckpt("show", directory, tag, "--json").json
    assert facts == ds_ckpt("show", directory / tag, "--json").json
    assert facts["status"] == "complete" and facts["counters"] == {
        "global_steps": 2, "global_samples": 8, "skipped_steps": 0}
    assert facts["layout"] == {"format": "ZeRO", "stage": stage, "data_parallel": 2, "model_parallel": 1, "shard_size": 2,
                               "version": "0.19.8"}
    assert facts["loss_scale"]["cur_scale"] == 8.0 and facts["lr_scheduler"] is None
    trained = {name: (index, tensor) for index, group in enumerate(rank.groups) for name, tensor in group.items()}
    rows = {row["name"]: row for row in facts["parameters"]}
    assert rows.keys() == trained.keys() | rank.frozen.keys()
    for name, (group, tensor) in trained.items():
        assert rows[name]["group"] == group and rows[name]["shape"] == list(tensor.shape)
        assert rows[name]["dtype"] == ("float32" if stage == 3 else "bfloat16")
        assert rows[name]["state"] == list(rank.state)
    assert all(rows[name]["group"] is None and rows[name]["dtype"] == "bfloat16" for name in rank.frozen)
    assert [group["parameters"] for group in facts["groups"]] == [len(group) for group in rank.groups]
    assert [group["elements"] for group in facts["groups"]] == [sum(map(torch.numel, group.values())) for group in rank.groups]
    assert all(group["settings"] == {"lr": 0.1} for group in facts["groups"])
    assert facts["client_state"] == (["epoch", "note"] if tag == "step2" else [])
    files = {row["name"]: row["bytes"] for row in facts["files"]}
    assert files == {path.name: path.stat().st_size for path in (directory / tag).iterdir() if path.name != MANIFEST}
    assert facts["totals"]["elements"] == sum(map(torch.numel, (*(tensor for _, tensor in trained.values()),
                                                                *rank.frozen.values())))


def test_show_prints_parameters_only_when_asked(directory: Path, ds_ckpt):
    name = next(iter(random_rank().groups[0]))
    short, long = ds_ckpt("show", directory), ds_ckpt("show", directory, "--params")
    assert short.code == long.code == 0 and name not in short.out and name in long.out
    assert "lr 0.1" in short.out and "epoch, note" in short.out and OPTIM.format(1) in short.out


def test_show_says_what_nameless_files_do_not_tell(ds_ckpt):
    found = ds_ckpt("show", FIXTURES / "stage0_fp32_adamw_w1")
    assert found.code == 0 and "do not say whose optimizer state" in found.out and "? of them trained" in found.out
    facts = ds_ckpt("show", FIXTURES / "stage0_fp32_adamw_w1", "--json").json
    assert facts["totals"]["trained_elements"] is None and facts["groups"][0]["settings"]["lr"] > 0


@pytest.mark.parametrize("name", sorted(path.name for path in FIXTURES.iterdir() if path.is_dir()))
def test_upstream_checkpoints(name: str, tmp_path: Path, ds_ckpt):
    found = ds_ckpt("show", FIXTURES / name, "--json", "--html", tmp_path / "page.html")
    assert found.code == 0 and found.json["status"] == "no manifest" and found.json["client_state"] == ["epoch", "note"]
    assert found.json["totals"]["parameters"] == 12 and found.json["counters"]["global_steps"] == 2
    assert read_page(tmp_path / "page.html").bars
    checked = ds_ckpt("verify", FIXTURES / name)
    assert checked.code == 0 and "no checksums to compare" in checked.out


# ---- the page --------------------------------------------------------------------------------------------------------

VOID = {"meta"}


class Page(HTMLParser):
    """bars: (tooltip, width in percent) of every piece; cells: texts of table cells. Fails on tags that do not match."""

    def __init__(self) -> None:
        super().__init__()
        self.bars: list[tuple[str, float]] = []
        self.cells: list[str] = []
        self._open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        assert not {"src", "href"} & values.keys(), "the page needs something else"
        if tag not in VOID:
            self._open.append(tag)
        if "title" in values:
            self.bars.append((values["title"], float(re.search(r"width:([\d.]+)%", values["style"])[1])))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] == "td":
            self.cells.append(data)


def read_page(path: Path) -> Page:
    text = path.read_text()
    assert "http" not in text and "url(" not in text and "@import" not in text
    page = Page()
    page.feed(text)
    page.close()
    assert page._open == []
    return page


def test_page_has_a_bar_per_rank(directory: Path, ds_ckpt):
    found = ds_ckpt("show", directory, "--html", directory / "page.html")
    assert found.code == 0 and str(directory / "page.html") in found.out
    page = read_page(directory / "page.html")
    assert {"rank 0, model-parallel 0", "rank 1, model-parallel 0", "embedding.weight = head.weight"} <= set(page.cells)
    widths: dict[tuple[str, str], float] = {}
    for tooltip, width in page.bars:
        name, part = re.fullmatch(r"(\S+): ([a-z ]+?) [\d.]+ \w+", tooltip).groups()
        widths[name, part] = width
    assert widths[OPTIM.format(0), "masters"] > 0 and widths["mp_rank_00_model_states.pt", "weights"] > 0
    rank_0 = sum(width for (name, _), width in widths.items() if name != OPTIM.format(1))
    assert rank_0 == pytest.approx(100, abs=0.01)  # it holds the model file as well, so it is the longest


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_parts_of_files_are_their_bytes(stage: int, tmp_path: Path):
    rank = random_rank()
    path = write_checkpoint(tmp_path / "t", stage, 1, [rank])
    parts = {part: sum(content.parts.get(part, 0) for content in inspection.file_contents(path)) for part in inspection.PARTS}
    trained = sum(tensor.numel() for group in rank.groups for tensor in group.values())
    padding = 2 * len(rank.groups)
    assert trained * 4 <= parts["masters"] <= (trained + padding) * 4
    states = len(rank.state) * 4
    assert trained * states <= parts["optimizer state"] <= (trained + padding) * states + 64
    frozen = sum(tensor.numel() for tensor in rank.frozen.values())
    buffers = sum(tensor.nbytes for tensor in rank.buffers.values())
    copies = 1 if stage == 3 else 2  # below stage 3 written by hand as two tensors, in the module and as fragments
    assert parts["weights"] == (0 if stage == 3 else trained * 2) + copies * frozen * 2 + buffers
    assert sum(parts.values()) == sum(file.stat().st_size for file in path.iterdir())


def test_page_escapes_names(directory: Path, ds_ckpt):
    path = save(directory, "step3", **{"<script>": 1})
    manifest = folder.read_manifest(path)
    manifest["files"]["<b>"] = {"bytes": 0, "crc32": 0}
    (path / MANIFEST).write_text(json.dumps(manifest))
    ds_ckpt("show", directory, "--html", directory / "page.html")
    text = (directory / "page.html").read_text()
    assert "&lt;script&gt;" in text and "&lt;b&gt; is missing" in text and "<script>" not in text and "<b>" not in text


# ---- verify ----------------------------------------------------------------------------------------------------------


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_verify_names_every_file_that_is_not_as_written(directory: Path, ds_ckpt):
    assert ds_ckpt("verify", directory, "--all").code == 0
    flip_a_bit(directory / "step2" / OPTIM.format(0))
    os.truncate(directory / "step2" / OPTIM.format(1), 50)
    (directory / "step2" / "mp_rank_00_model_states.pt").unlink()
    found = ds_ckpt("verify", directory)
    assert found.code == 1 and "3 of 3 files" in found.out
    assert f"{OPTIM.format(0)} is damaged" in found.out and f"{OPTIM.format(1)} has 50 bytes" in found.out
    assert "mp_rank_00_model_states.pt is missing" in found.out
    assert ds_ckpt("verify", directory, "step1").code == 0
    of_all = ds_ckpt("verify", directory, "--all")
    assert of_all.code == 1 and f"{directory / 'step1'}: complete" in of_all.out


@pytest.mark.parametrize("text", ["{", "[]", '{"files": {"a": {"bytes": "x", "crc32": null}}}', '{"files": {"a": 3}}'])
def test_a_damaged_manifest_is_a_finding(text: str, directory: Path, ds_ckpt):
    (directory / "step2" / MANIFEST).write_text(text)
    found = ds_ckpt("verify", directory)
    assert found.code == 1 and "step2" in found.out and found.err == ""
    assert ds_ckpt("ls", directory).code == 0


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_verify_without_manifest(stage: int, tmp_path: Path, ds_ckpt):
    path = write_checkpoint(tmp_path / "t", stage, 2, [random_rank()])
    found = ds_ckpt("verify", path)
    assert found.code == 0 and "no checksums to compare" in found.out
    lost = path / OPTIM.format(1)
    os.truncate(lost, lost.stat().st_size - 30)
    found = ds_ckpt("verify", path)
    assert found.code == 1 and lost.name in found.out
    lost.unlink()
    found = ds_ckpt("verify", path)
    assert found.code == 1 and f"lacks {lost.name} (found 1 of 2)" in found.out


def test_verify_without_manifest_finds_files_of_another_model(tmp_path: Path, ds_ckpt):
    path = write_checkpoint(tmp_path / "t", 2, 2, [random_rank()])
    content = torch.load(path / OPTIM.format(1), weights_only=False)
    groups = content["optimizer_state_dict"]["single_partition_of_fp32_groups"]
    groups[0] = groups[0][:1].clone()
    torch.save(content, path / OPTIM.format(1))
    found = ds_ckpt("verify", path)
    assert found.code == 1 and OPTIM.format(1) in found.out and "has 1 elements" in found.out


# ---- export ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tag", ["step1", "step2"])
def test_export_equals_zero_to_fp32(tag: str, directory: Path, tmp_path: Path, ds_ckpt):
    expected = get_fp32_state_dict_from_zero_checkpoint(directory, tag)
    frozen = random_rank().frozen
    assert ds_ckpt("export", directory, tag, "--to", "torch", "--out", tmp_path / "t", "--exclude-frozen").code == 0
    found = torch.load(tmp_path / "t" / "pytorch_model.bin", weights_only=True)
    assert found.keys() == expected.keys() - frozen.keys()
    assert all(torch.equal(found[name].float(), expected[name].float()) for name in found)
    run = ds_ckpt("export", directory, tag, "--to", "safetensors", "--out", tmp_path / "s", "--dtype", "bf16")
    assert run.out.split() == [str(tmp_path / "s" / "model.safetensors")]
    halves = load_file(tmp_path / "s" / "model.safetensors")
    trained = random_rank().groups[0]
    assert all(torch.equal(halves[name], expected[name].bfloat16()) for name in trained)


def test_export_in_shards(directory: Path, tmp_path: Path, ds_ckpt):
    run = ds_ckpt("export", directory, "--to", "safetensors", "--out", tmp_path / "s", "--max-shard-size", "200B")
    names = [Path(line).name for line in run.out.split()]
    assert run.code == 0 and names[-1] == "model.safetensors.index.json" and len(names) > 3


def test_export_to_universal(directory: Path, tmp_path: Path, ds_ckpt):
    assert ds_ckpt("export", directory, "--to", "universal", "--out", tmp_path / "u" / "step2").code == 0
    facts = ds_ckpt("show", tmp_path / "u", "--json").json
    assert facts["layout"]["format"] == "universal" and facts["status"] == "complete"
    assert ds_ckpt("verify", tmp_path / "u").code == 0
    ds_ckpt("show", tmp_path / "u", "--html", tmp_path / "page.html")
    assert "all ranks (universal)" in read_page(tmp_path / "page.html").cells


# ---- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [
    ("ls", "nowhere"), ("ls", "run/step1"), ("show", "nowhere"), ("show", "run", "step9"), ("show", "run/step1/" + MANIFEST),
    ("show", "empty"), ("verify", "empty"), ("verify", "empty", "--all"), ("show", "run", "--html", "nowhere/page.html"),
    ("show", "garbage"), ("export", "garbage", "--to", "torch", "--out", "out"), ("show", "bad_pointer"),
    ("export", "run", "--to", "universal", "--out", "run/step2"), ("export", "run", "--to", "torch", "--out", "run/latest"),
])
def test_errors_are_one_line(arguments: tuple[str, ...], directory: Path, ds_ckpt, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(directory.parent)
    Path("empty").mkdir()
    Path("garbage").mkdir()
    Path("garbage/mp_rank_00_model_states.pt").write_bytes(bytes(range(256)) * 9)
    Path("bad_pointer").mkdir()
    Path("bad_pointer/latest").write_bytes(b"\xff\x00")
    found = ds_ckpt(*arguments)
    assert found.code == 1 and re.fullmatch(r"ds_ckpt: [^\n]+\n", found.err), found.err


@pytest.mark.parametrize("arguments", [
    (), ("look",), ("ls",), ("export", "run", "--to", "torch"), ("export", "run", "--to", "onnx", "--out", "out"),
    ("export", "run", "--to", "torch", "--out", "out", "--max-shard-size", "much"),
    ("export", "run", "--to", "universal", "--out", "out", "--dtype", "bf16"), ("verify", "run", "step1", "--all"),
])
def test_usage_errors(arguments: tuple[str, ...], ds_ckpt):
    found = ds_ckpt(*arguments)
    assert found.code == 2 and "usage: ds_ckpt" in found.err and "Traceback" not in found.err


def test_runs_as_a_module_into_a_closed_pipe(directory: Path):
    command = f"{sys.executable} -m deepspeed.checkpoint.cli show {directory} --json; echo code $? >&2"
    process = subprocess.Popen(["bash", "-c", command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               cwd=Path(__file__).parents[3])
    process.stdout.close()
    assert process.stderr.read() == "code 1\n"
    process.stderr.close()
    process.wait()


# ---- a run of this package -------------------------------------------------------------------------------------------


def printed(*arguments: object) -> str:
    with redirect_stdout(io.StringIO()) as out:
        main([str(argument) for argument in arguments])
    return out.getvalue()


@distributed(world_size=2)
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_run_that_was_saved(stage: int, tmp_path: Path):
    engine = start(stage, "bf16")
    train(engine, 0, 2)
    engine.save_checkpoint(tmp_path / "run", client_state={"epoch": 3})
    if engine.global_rank == 0:
        (row,) = json.loads(printed("ls", tmp_path / "run", "--json"))["checkpoints"]
        assert (row["tag"], row["status"], row["stage"], row["ranks"]) == ("global_step2", "complete", stage, 2)
        assert row["global_steps"] == 2 and row["pointers"] == ["latest"]
        facts = json.loads(printed("show", tmp_path / "run", "--json"))
        assert facts["client_state"] == ["epoch"] and facts["lr_scheduler"] is not None
        names = {name for parameter, name in engine.param_names.items() if parameter.requires_grad and parameter.numel()}
        assert {row["name"] for row in facts["parameters"] if row["group"] is not None} >= names
        assert [group["settings"]["lr"] for group in facts["groups"]] == engine.get_lr()
        assert RNG_STATES in {file["name"] for file in facts["files"]}
        assert "complete" in printed("verify", tmp_path / "run")
        flip_a_bit(tmp_path / "run" / "global_step2" / RNG_STATES)
        assert f"{RNG_STATES} is damaged" in printed("verify", tmp_path / "run")
    engine.destroy()
