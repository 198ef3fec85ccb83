"""Variables for the other nodes."""

from __future__ import annotations

import pytest

from deepspeed.errors import LauncherError
from deepspeed.launcher import environment
from deepspeed.launcher.environment import exported_environment, parse_environment_lines


@pytest.fixture
def folders(tmp_path, monkeypatch):
    home, here = tmp_path / "home", tmp_path / "here"
    home.mkdir()
    here.mkdir()
    monkeypatch.setattr(environment, "DEEPSPEED_ENVIRONMENT_PATHS", [str(home), str(here)])
    return home, here


def test_prefixes_choose_what_is_exported(folders):
    environ = {
        "PYTHONPATH": "/x",
        "NCCL_DEBUG": "INFO",
        "UCX_TLS": "rc",
        "HOME": "/root",
        "DLTS_JOB_ID": "7",
        "MY_PYTHON": "1",
    }
    assert exported_environment(environ, []) == {"PYTHONPATH": "/x", "UCX_TLS": "rc", "DLTS_JOB_ID": "7"}
    assert "NCCL_DEBUG" in exported_environment(environ, ["NCCL"])


def test_per_node_variables_stay_behind(folders):
    environ = {"NCCL_IB_HCA": "mlx5_0", "UCX_NET_DEVICES": "eth0", "NCCL_DEBUG": "INFO"}
    assert exported_environment(environ, ["NCCL"]) == environ
    assert exported_environment({**environ, "AISC_JOB_NAME": "j"}, ["NCCL"]) == {"NCCL_DEBUG": "INFO"}


def test_files_override_and_the_current_directory_wins(folders):
    home, here = folders
    (home / ".deepspeed_env").write_text("PYTHONPATH=/home\nA=1\n")
    (here / ".deepspeed_env").write_text("# local\n\nA=2=3 4\n")
    assert exported_environment({"PYTHONPATH": "/x"}, []) == {"PYTHONPATH": "/home", "A": "2=3 4"}


@pytest.mark.parametrize("line", ["NO_VALUE", "=x", "A B=1", "export A=1", "1A=2"])
def test_a_bad_line_is_named(folders, line):
    with pytest.raises(LauncherError) as caught:
        parse_environment_lines(["A=1\n", f"{line}\n"], source="/somewhere/.deepspeed_env")
    assert "/somewhere/.deepspeed_env, line 2" in str(caught.value) and f'"{line}"' in str(caught.value)
