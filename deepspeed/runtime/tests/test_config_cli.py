"""`ds_config` from the command line."""

import json
from pathlib import Path

import pytest

from deepspeed.runtime.config_cli import config_json_schema, main


@pytest.fixture
def config_file(tmp_path: Path):
    def write(**keys: object) -> str:
        path = tmp_path / "ds_config.json"
        path.write_text(json.dumps({"train_batch_size": 8, **keys}))
        return str(path)

    return write


def test_check_of_a_sound_file(config_file, capsys: pytest.CaptureFixture) -> None:
    assert main(["check", config_file(foreign_key=1, disable_allgather=True), "--world-size", "4"]) == 0
    printed = capsys.readouterr()
    assert "no problems; 8 samples per step = 2 per rank" in printed.out
    assert "note: disable_allgather has no effect: " in printed.err


def test_check_lists_all_problems(config_file, capsys: pytest.CaptureFixture) -> None:
    assert main(["check", config_file(fp16={"enabld": True}, bf16=3)]) == 1
    text = capsys.readouterr().err
    assert "2 problems" in text and "fp16.enabld" in text and "bf16 is 3" in text


def test_check_of_a_missing_feature_or_file(config_file, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["check", config_file(flops_profiler={"enabled": True})]) == 1
    assert "flops_profiler.enabled = true: the flops profiler is not available yet" in capsys.readouterr().err
    assert main(["check", str(tmp_path / "absent.json")]) == 1
    assert "no such file" in capsys.readouterr().err


def test_show_as_json_and_as_table(config_file, capsys: pytest.CaptureFixture) -> None:
    file = config_file(zero_optimization={"stage": 3, "reduce_bucket_size": "auto"}, foreign_key=1,
                       optimizer={"type": "Adam", "params": {"lr": "auto", "eps": 1}})
    assert main(["show", file, "--json", "--world-size", "2"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert rows["zero_optimization.stage"] == {"value": 3, "source": "file"}
    assert rows["zero_optimization.reduce_bucket_size"] == {"value": 500_000_000, "source": "auto"}
    assert rows["zero_optimization.overlap_comm"] == {"value": True, "source": "derived"}
    assert rows["optimizer.params.lr"] == {"value": 0.001, "source": "auto"}
    assert rows["disable_allgather"]["note"].startswith("no effect: ")
    assert rows["fp16.hysteresis"] == {"value": 2, "source": "default"}
    assert rows["train_micro_batch_size_per_gpu"] == {"value": 4, "source": "derived"}
    assert main(["show", file]) == 0
    table = capsys.readouterr().out
    assert "zero_optimization.stage" in table and "fp16.hysteresis" not in table
    assert main(["show", file, "--all"]) == 0
    assert "fp16.hysteresis" in capsys.readouterr().out


def test_schema_describes_every_key(capsys: pytest.CaptureFixture) -> None:
    assert main(["schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert schema == json.loads(json.dumps(config_json_schema()))
    zero = schema["$defs"]["DeepSpeedZeroConfig"]
    size = zero["properties"]["reduce_bucket_size"]
    assert size["default"] == 500_000_000 and size["description"]
    assert size["anyOf"] == [{"minimum": 0, "type": "integer"}, {"const": "auto"}]
    assert zero["properties"]["cpu_offload"]["deprecated"] is True
    assert zero["additionalProperties"] is False
    assert "$schema" in schema["properties"]


@pytest.mark.parametrize("arguments", [[], ["check"], ["check", "file", "--world-size", "0"], ["frobnicate"]])
def test_wrong_arguments_end_with_the_usage(arguments: list[str], capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: ds_config" in capsys.readouterr().err
