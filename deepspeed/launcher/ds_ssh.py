"""The `ds_ssh` command: runs one command on every host of a hostfile through pdsh."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence

from deepspeed.errors import DeepSpeedError, LauncherError
from deepspeed.launcher.constants import DLTS_HOSTFILE, PDSH_MAX_FAN_OUT
from deepspeed.launcher.hostfile import fetch_hostfile


def parse_args(args: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the parsed command line (of the process when `args` is None)."""
    parser = argparse.ArgumentParser(prog="ds_ssh", description="Run a command on every host of a hostfile.")
    parser.add_argument("-f", "--hostfile", default=DLTS_HOSTFILE, help='file with lines "host slots=N"')
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the command and its arguments")
    return parser.parse_args(args)


def pdsh_command(hostfile: str, command: Sequence[str]) -> list[str]:
    """Return the pdsh command line. A single word is a shell command as it stands, several words are quoted.

    Raises: LauncherError when the command or the hostfile is missing, or the hostfile is wrong.
    """
    if not command:
        raise LauncherError("ds_ssh was given no command; write it after the flags")
    if not os.path.isfile(hostfile):
        raise LauncherError(f"ds_ssh needs a hostfile, and {hostfile} does not exist; give one with -f")
    hosts = fetch_hostfile(hostfile) or {}
    text = command[0] if len(command) == 1 else shlex.join(command)
    return ["pdsh", "-R", "ssh", "-f", str(PDSH_MAX_FAN_OUT), "-w", ",".join(hosts), text]


def main(args: Sequence[str] | None = None) -> int:
    """Run the command on all hosts and return pdsh's exit code; 1, with the reason on stderr, when it cannot run."""
    options = parse_args(args)
    try:
        command = pdsh_command(options.hostfile, options.command)
        if shutil.which("pdsh") is None:
            raise LauncherError("ds_ssh needs the program pdsh, which is not on the PATH; install it")
    except DeepSpeedError as error:
        sys.stderr.write(f"ds_ssh: {error}\n")
        return 1
    return subprocess.run(command, env=dict(os.environ), check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
