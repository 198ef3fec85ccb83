"""The `deepspeed` command: finds the devices of a job and starts its ranks, on this machine or on several."""

from __future__ import annotations

import argparse
import logging
import os
import shlex
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence

import psutil

from deepspeed.accelerator import get_accelerator
from deepspeed.errors import DeepSpeedError, FeatureNotAvailableError, LauncherError
from deepspeed.launcher import launch
from deepspeed.launcher.constants import (
    DEEPSPEED_ENVIRONMENT_NAME,
    DLTS_HOSTFILE,
    EXPORT_ENVS,
    PDSH_LAUNCHER,
    SLURM_LAUNCHER,
    TORCH_DISTRIBUTED_DEFAULT_PORT,
)
from deepspeed.launcher.environment import exported_environment
from deepspeed.launcher.hostfile import (
    Slot,
    _parse_hostfile,
    encode_world_info,
    fetch_hostfile,
    parse_inclusion_exclusion,
    parse_resource_filter,
    take_first,
)
from deepspeed.launcher.multinode_runner import RUNNERS, MultiNodeRunner, node_script_flags
from deepspeed.launcher.supervisor import STOP_AFTER_TERMINATION_SECONDS
from deepspeed.utils.logging import set_log_level_from_string

__all__ = [
    "DEEPSPEED_ENVIRONMENT_NAME",
    "DLTS_HOSTFILE",
    "EXPORT_ENVS",
    "_parse_hostfile",
    "encode_world_info",
    "fetch_hostfile",
    "main",
    "parse_args",
    "parse_inclusion_exclusion",
    "parse_resource_filter",
]

# By name, since this module's own is "__main__" under `python -m`.
logger = logging.getLogger("deepspeed.launcher.runner")

Resources = dict[str, list[Slot]]

LOCALHOST = "localhost"
LOOPBACK = "127.0.0.1"
LAST_PORT = 65535
SSH_SECONDS = 30
# More than the nodes' own launchers give their ranks to end after SIGTERM.
STOP_SECONDS = STOP_AFTER_TERMINATION_SECONDS + 15


class _MasterPort(argparse.Action):
    """Stores the port and that it was asked for: only a default port may be replaced by a free one."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: int, *_: str | None
    ) -> None:
        if not 1 <= values <= LAST_PORT:
            raise argparse.ArgumentError(self, f"expected a port from 1 to {LAST_PORT}, got {values}")
        namespace.master_port = values
        namespace.is_port_given = True


def parse_args(args: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the parsed command line (of the process when `args` is None)."""
    parser = argparse.ArgumentParser(
        prog="deepspeed", description="Start a training script with one process per device, on one machine or several."
    )
    hosts = parser.add_argument_group("devices")
    hosts.add_argument("-H", "--hostfile", default=DLTS_HOSTFILE, help='file with lines "host slots=N"')
    hosts.add_argument("-i", "--include", default="", help="use only NODE[:SLOT,SLOT...][@NODE...]")
    hosts.add_argument("-e", "--exclude", default="", help="use all but NODE[:SLOT,SLOT...][@NODE...]")
    hosts.add_argument("--num_nodes", type=int, default=-1, help="use the first N hosts")
    hosts.add_argument("--num_gpus", "--num_accelerators", type=int, default=-1, help="use slots 0..N-1 of each host")
    hosts.add_argument("--min_elastic_nodes", type=int, default=-1, help="fewest nodes of an elastic job")
    hosts.add_argument("--max_elastic_nodes", type=int, default=-1, help="most nodes of an elastic job")
    hosts.add_argument("--elastic_training", action="store_true", help="restart with the nodes that are left")
    nodes = parser.add_argument_group("several machines")
    nodes.add_argument(
        "--master_port", type=int, action=_MasterPort, default=TORCH_DISTRIBUTED_DEFAULT_PORT, help="port of rank 0"
    )
    nodes.add_argument("--master_addr", default="", help="address of rank 0's machine; the first host's by default")
    nodes.add_argument("--node_rank", type=int, default=-1, help="index of this machine among the hosts, with --no_ssh")
    nodes.add_argument("--no_ssh", action="store_true", help="start this machine's ranks only; run me on every machine")
    nodes.add_argument("--no_ssh_check", action="store_true", help="do not try ssh before the start")
    nodes.add_argument("--ssh_port", type=int, default=None, help="port of the ssh servers")
    nodes.add_argument("--force_multi", action="store_true", help="use the multi-machine launcher for one machine too")
    nodes.add_argument(
        "--launcher", default=PDSH_LAUNCHER, help=f"what starts the ranks elsewhere: {', '.join(RUNNERS)}"
    )
    nodes.add_argument("--launcher_args", default="", help="further arguments for that launcher, in one string")
    nodes.add_argument("--venv_script", default=None, help="script that each machine sources first (pdsh)")
    script = parser.add_argument_group("script")
    launch.add_script_arguments(script)
    script.add_argument(
        "--save_pid", action="store_true", help="write the launcher's process id to /tmp/<pid>.deepspeed"
    )
    script.add_argument("--autotuning", default="", choices=["tune", "run"], help="look for a fast configuration")
    script.add_argument("-q", "--quiet", action="store_true", help="log errors only")
    parser.add_argument("user_script", help="script, module or program that every rank runs")
    parser.add_argument("user_args", nargs=argparse.REMAINDER, help="its arguments")
    parser.set_defaults(is_port_given=False, job_id=uuid.uuid4().hex)
    options = parser.parse_args(args)
    if options.quiet:
        options.log_level = "error"
    return options


def main(args: Sequence[str] | None = None) -> int:
    """Run a job and return its exit code.

    args: the command line; None takes the process's own, and then errors are printed rather than raised.
    Raises: LauncherError (a ValueError and RuntimeError) when the job cannot start, FeatureNotAvailableError.
    """
    if args is not None:
        return run_job(parse_args(args))
    try:
        return run_job(parse_args())
    except DeepSpeedError as error:
        sys.stderr.write(f"deepspeed: {type(error).__name__}: {error}\n")
        return 1


def run_job(args: argparse.Namespace) -> int:
    """Run the job that a parsed command line describes and return its exit code. Raises: as `main`."""
    set_log_level_from_string(args.log_level)
    check_arguments(args)
    pool = fetch_hostfile(args.hostfile)
    active = active_resources(args, pool)
    if args.no_ssh:
        return run_node(args, active, has_hostfile=pool is not None)
    if is_this_machine(active) and not args.force_multi:
        return run_local(args, active)
    return run_everywhere(args, pool or {host: len(slots) for host, slots in active.items()}, active)


def check_arguments(args: argparse.Namespace) -> None:
    """Raise LauncherError or FeatureNotAvailableError for flags that cannot be honoured, alone or together."""
    if args.autotuning:
        raise FeatureNotAvailableError(
            f"--autotuning {args.autotuning}: the autotuner is not available yet; leave the flag out"
        )
    if args.elastic_training or args.min_elastic_nodes != -1 or args.max_elastic_nodes != -1:
        raise FeatureNotAvailableError(
            "--elastic_training, --min_elastic_nodes, --max_elastic_nodes: elastic jobs are not available yet; "
            "leave them out"
        )
    launch.check_script_form(args)
    counts = args.num_nodes != -1 or args.num_gpus != -1
    if counts and (args.include or args.exclude):
        raise LauncherError("--num_nodes and --num_gpus cannot be combined with --include and --exclude; give one kind")
    if args.launcher.lower() not in RUNNERS:
        raise FeatureNotAvailableError(f'--launcher is "{args.launcher}" (expected one of {", ".join(RUNNERS)})')


def active_resources(args: argparse.Namespace, pool: Mapping[str, int] | None) -> Resources:
    """Return the hosts and slots that the job uses. pool: the hostfile's, None without one."""
    if pool is None:
        return _active_resources_here(args)
    return take_first(parse_inclusion_exclusion(pool, args.include, args.exclude), args.num_nodes, args.num_gpus)


def _active_resources_here(args: argparse.Namespace) -> Resources:
    """Return the slots of this machine that the job uses, or, for --no_ssh, those of --num_nodes machines like it."""
    has_filter = bool(args.include or args.exclude)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").strip()
    if get_accelerator().device_name() == "cpu":
        slots = _cpu_slots(args)
    elif visible and not has_filter:
        slots = [int(name) if name.isdigit() else name for name in visible.replace(" ", "").split(",")]
        logger.info("CUDA_VISIBLE_DEVICES gives the devices %s", visible)
    else:
        slots = _all_slots(visible)
    if not slots:
        raise LauncherError("this machine has no devices to run on; check nvidia-smi, or set DS_ACCELERATOR=cpu")
    num_nodes = max(args.num_nodes, 1) if args.no_ssh else 1
    hosts = [LOCALHOST] if num_nodes == 1 else [f"node{index}" for index in range(num_nodes)]
    active = parse_resource_filter({host: slots for host in hosts}, args.include, args.exclude)
    return take_first(active, args.num_nodes, args.num_gpus)


def _cpu_slots(args: argparse.Namespace) -> list[Slot]:
    """Return one slot per rank: on a CPU any number of ranks can run, so --num_gpus decides."""
    count = args.num_gpus if args.num_gpus > 0 else get_accelerator().device_count()
    if args.num_gpus == -1:
        logger.info("no accelerator here: starting %d rank(s) on the CPU; --num_gpus N starts N", count)
    return list(range(count))


def _all_slots(visible: str) -> list[Slot]:
    """Return all devices of this machine; `visible` is CUDA_VISIBLE_DEVICES, which the filters override."""
    if visible:
        logger.warning("--include and --exclude name physical devices: ignoring CUDA_VISIBLE_DEVICES=%s", visible)
        # Devices are counted under the variable, and the ranks get one of their own.
        del os.environ["CUDA_VISIBLE_DEVICES"]
    return list(range(get_accelerator().device_count()))


def is_this_machine(active: Mapping[str, Sequence[Slot]]) -> bool:
    """Return whether all of the job's hosts are names of this machine.

    Raises: LauncherError when several are, since each of them would claim the same devices.
    """
    if not all(is_local_host(host) for host in active):
        return False
    if len(active) > 1:
        raise LauncherError(
            f"the hosts {', '.join(active)} are all names of this machine; keep one of them in the hostfile"
        )
    return True


def is_local_host(host: str) -> bool:
    """Return whether `host` (a name or address, or user@ one) is this machine."""
    name = host.rpartition("@")[2]
    own = socket.gethostname()
    if name in (LOCALHOST, "::1", own, own.partition(".")[0]) or name.startswith("127."):
        return True
    return any(name == address.address for addresses in psutil.net_if_addrs().values() for address in addresses)


def run_local(args: argparse.Namespace, active: Resources) -> int:
    """Run all ranks on this machine and return the job's exit code."""
    port = args.master_port if args.is_port_given else free_port(args.master_port)
    return _run_node_launcher(args, active, node_rank=0, master_addr=args.master_addr or LOOPBACK, master_port=port)


def run_node(args: argparse.Namespace, active: Resources, has_hostfile: bool) -> int:
    """Run this machine's ranks of a job of which every machine starts its own part; return their exit code.

    Node 0's address is its name in the hostfile unless --master_addr is given.
    """
    if not 0 <= args.node_rank < len(active):
        raise LauncherError(
            f"--no_ssh needs --node_rank in 0..{len(active) - 1} for {len(active)} node(s), got {args.node_rank}"
        )
    if not args.master_addr and len(active) > 1 and not has_hostfile:
        raise LauncherError("--no_ssh without a hostfile needs --master_addr, the address of node 0")
    master_addr = args.master_addr or next(iter(active)).rpartition("@")[2]
    return _run_node_launcher(args, active, args.node_rank, master_addr, args.master_port)


def _run_node_launcher(
    args: argparse.Namespace, active: Resources, node_rank: int, master_addr: str, master_port: int
) -> int:
    flags = [
        f"--world_info={encode_world_info(active)}",
        f"--node_rank={node_rank}",
        f"--master_addr={master_addr}",
        f"--master_port={master_port}",
        *node_script_flags(args),
    ]
    return launch.main([*flags, args.user_script, *args.user_args])


def free_port(wanted: int) -> int:
    """Return `wanted` if it can be bound on this machine, else a port that can, with a log line."""
    with socket.socket(socket.AF_INET) as probe:
        # Connections that have just ended do not make a port busy, neither here nor for the store that will bind it.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", wanted))
        except OSError:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
            logger.warning("port %d is busy: using %d; --master_port chooses another", wanted, port)
            return port
    return wanted


def run_everywhere(args: argparse.Namespace, pool: Mapping[str, int], active: Resources) -> int:
    """Run the job on all its hosts through --launcher and return its exit code."""
    first = next(iter(active))
    if not args.no_ssh_check and args.launcher.lower() == PDSH_LAUNCHER and not is_local_host(first):
        _ssh(args, first, "true", remedy="set up ssh without a password, or skip this check with --no_ssh_check")
    if not args.master_addr and args.launcher.lower() != SLURM_LAUNCHER:
        args.master_addr = host_address(args, first)
    runner = RUNNERS[args.launcher.lower()](args, encode_world_info(active), pool)
    if not runner.backend_exists():
        raise LauncherError(
            f"--launcher {runner.name} needs the program {runner.backend_program}, which is not on the PATH; "
            "install it, choose another --launcher, or start each machine with --no_ssh"
        )
    for key, value in exported_environment(os.environ, get_accelerator().export_envs()).items():
        runner.add_export(key, value)
    environment = dict(os.environ)
    command = runner.get_cmd(environment, active)
    logger.info("running %s", shlex.join(command))
    return _run_command(runner, command, environment, active)


def host_address(args: argparse.Namespace, host: str) -> str:
    """Return the first address of `host` as its own `hostname -I` tells it, through ssh unless it is this machine."""
    if is_local_host(host):
        answer = subprocess.run(["hostname", "-I"], capture_output=True, text=True, check=False).stdout
    else:
        answer = _ssh(args, host, "hostname -I", remedy="give the address with --master_addr")
    if not answer.split():
        raise LauncherError(f'"hostname -I" on {host} gives no address; give one with --master_addr')
    return answer.split()[0]


def _ssh(args: argparse.Namespace, host: str, command: str, remedy: str) -> str:
    """Return what `command` prints on `host`. Raises: LauncherError, which ends in `remedy`."""
    port = [] if args.ssh_port is None else ["-p", str(args.ssh_port)]
    words = ["ssh", "-o", "BatchMode=yes", *port, host, command]
    try:
        return subprocess.run(words, capture_output=True, text=True, check=True, timeout=SSH_SECONDS).stdout
    except FileNotFoundError as error:
        raise LauncherError(f'"{shlex.join(words)}": there is no ssh on this machine; {remedy}') from error
    except subprocess.TimeoutExpired as error:
        raise LauncherError(f'"{shlex.join(words)}" gave no answer in {SSH_SECONDS} s; {remedy}') from error
    except subprocess.CalledProcessError as error:
        raise LauncherError(f'"{shlex.join(words)}" failed: {error.stderr.strip()}; {remedy}') from error


def _run_command(runner: MultiNodeRunner, command: list[str], environment: dict[str, str], active: Resources) -> int:
    """Run the start command to its end and return its exit code.

    SIGINT or SIGTERM (number s) stop the job on all hosts; the exit code is 128+s then.
    """

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt(number)

    earlier = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        code = process.wait()
        return code if code >= 0 else 128 - code
    except KeyboardInterrupt as interruption:
        number = signal.Signals(interruption.args[0])
        logger.warning("got %s: stopping the job on %s", number.name, ", ".join(active))
        stop = runner.get_stop_cmd(active)
        if stop is not None:
            subprocess.run(stop, env=environment, check=False, timeout=STOP_SECONDS)
        else:
            process.send_signal(number)
        return 128 + number
    finally:
        _end(process)
        for number, handler in earlier.items():
            signal.signal(number, handler)


def _end(process: subprocess.Popen) -> None:
    """Wait for the process, at most STOP_SECONDS, then kill it."""
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


if __name__ == "__main__":
    sys.exit(main())
