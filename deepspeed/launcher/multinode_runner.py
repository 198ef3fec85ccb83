"""Command lines that start a job on several nodes: pdsh, Open MPI, MPICH, Intel MPI, MVAPICH and Slurm.

pdsh starts this package's node launcher once per node. The others start every rank of the script themselves.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, MutableMapping, Sequence

from deepspeed.accelerator import get_accelerator
from deepspeed.errors import LauncherError
from deepspeed.launcher.constants import (
    IMPI_LAUNCHER,
    MPICH_LAUNCHER,
    MVAPICH_LAUNCHER,
    OPENMPI_LAUNCHER,
    PDSH_LAUNCHER,
    PDSH_MAX_FAN_OUT,
    SLURM_LAUNCHER,
)
from deepspeed.launcher.hostfile import Slot

NODE_LAUNCHER = ["-u", "-m", "deepspeed.launcher.launch"]


class MultiNodeRunner(ABC):
    """Builds the command that starts a job on several nodes.

    args: the runner's parsed command line; world_info_base64: the active resources, encoded; resource_pool: host ->
    slots as in the hostfile. `exports` are variables for every rank.
    """

    backend_program: str
    backend_name: str

    def __init__(
        self, args: argparse.Namespace, world_info_base64: str, resource_pool: Mapping[str, int] | None = None
    ) -> None:
        self.args = args
        self.world_info_base64 = world_info_base64
        self.resource_pool = dict(resource_pool or {})
        self.exports: dict[str, str] = {}
        self.user_script = args.user_script
        self.user_arguments = self.parse_user_args()
        self.validate_args()

    @property
    def name(self) -> str:
        """The value of --launcher that chooses this runner."""
        return self.backend_name

    def backend_exists(self) -> bool:
        """Return whether the program that this runner calls is on the PATH."""
        return shutil.which(self.backend_program) is not None

    def add_export(self, key: str, var: str) -> None:
        """Set a variable for every rank; surrounding blanks are dropped."""
        self.exports[key.strip()] = var.strip()

    def parse_user_args(self) -> list[str]:
        """Return the script's arguments."""
        return list(self.args.user_args)

    def validate_args(self) -> None:
        """Raise LauncherError (a ValueError) for flags that this runner cannot honour."""
        if self.args.module and self.args.no_python:
            raise LauncherError("--module and --no_python exclude each other; a module needs python")

    @abstractmethod
    def get_cmd(
        self, environment: MutableMapping[str, str], active_resources: Mapping[str, Sequence[Slot]]
    ) -> list[str]:
        """Return the command; what it needs in its own environment is set in `environment`."""

    def get_stop_cmd(self, active_resources: Mapping[str, Sequence[Slot]]) -> list[str] | None:
        """Return a command that stops the job on all nodes, or None when the start command passes signals on."""
        return None

    def _launcher_args(self) -> list[str]:
        return shlex.split(self.args.launcher_args)

    def _script(self) -> list[str]:
        """Return the command line of a rank that is started without the node launcher."""
        python = [] if self.args.no_python else [sys.executable, "-u"]
        module = ["-m"] if self.args.module else []
        return [*python, *module, self.user_script, *self.user_arguments]

    def _master(self) -> dict[str, str]:
        """Return the variables by which ranks find each other, where a rank's own number comes from the backend."""
        return {"MASTER_ADDR": self.args.master_addr, "MASTER_PORT": str(self.args.master_port)}

    def _refuse_filters(self) -> None:
        given = {
            "--include": self.args.include,
            "--exclude": self.args.exclude,
            "--num_nodes": self.args.num_nodes != -1,
            "--num_gpus": self.args.num_gpus != -1,
        }
        for flag, is_given in given.items():
            if is_given:
                raise LauncherError(
                    f"--launcher {self.name} takes hosts and slots from the hostfile and cannot honour {flag}; "
                    "edit the hostfile"
                )


class PDSHRunner(MultiNodeRunner):
    """Runs the node launcher on every host through pdsh over ssh."""

    backend_program = "pdsh"
    backend_name = PDSH_LAUNCHER

    def get_cmd(
        self, environment: MutableMapping[str, str], active_resources: Mapping[str, Sequence[Slot]]
    ) -> list[str]:
        environment["PDSH_RCMD_TYPE"] = "ssh"
        if self.args.ssh_port is not None:
            earlier = environment.get("PDSH_SSH_ARGS_APPEND", "")
            environment["PDSH_SSH_ARGS_APPEND"] = f"{earlier} -p {self.args.ssh_port}".strip()
        steps = [f"export {key}={_quote(value)}" for key, value in self.exports.items()]
        steps.append(f"cd {_quote(os.getcwd())}")
        if self.args.venv_script is not None:
            steps.append(f". {_quote(self.args.venv_script)}")
        # Only %n, the host's index in the list, is for pdsh to fill in.
        launch = [sys.executable, *NODE_LAUNCHER, *self._node_flags()]
        user = [self.user_script, *self.user_arguments]
        steps.append(" ".join([*map(_quote, launch), "--node_rank=%n", *map(_quote, user)]))
        return [*self._pdsh(active_resources), *self._launcher_args(), "; ".join(steps)]

    def get_stop_cmd(self, active_resources: Mapping[str, Sequence[Slot]]) -> list[str]:
        # The brackets keep the pattern from matching the shell that runs this very command.
        pattern = f"[-]-job_id={self.args.job_id}"
        return [*self._pdsh(active_resources), f"pkill -TERM -f -- {_quote(pattern)}"]

    def _pdsh(self, active_resources: Mapping[str, Sequence[Slot]]) -> list[str]:
        return [self.backend_program, "-S", "-f", str(PDSH_MAX_FAN_OUT), "-w", ",".join(active_resources)]

    def _node_flags(self) -> list[str]:
        flags = [
            f"--world_info={self.world_info_base64}",
            f"--master_addr={self.args.master_addr}",
            f"--master_port={self.args.master_port}",
            f"--job_id={self.args.job_id}",
        ]
        return [*flags, *node_script_flags(self.args)]


class OpenMPIRunner(MultiNodeRunner):
    """Starts all ranks with Open MPI's mpirun, which takes the hosts from the hostfile."""

    backend_program = "mpirun"
    backend_name = OPENMPI_LAUNCHER

    def validate_args(self) -> None:
        super().validate_args()
        self._refuse_filters()

    def get_cmd(
        self, environment: MutableMapping[str, str], active_resources: Mapping[str, Sequence[Slot]]
    ) -> list[str]:
        own = self._launcher_args()
        defaults = {"btl": "^openib", "btl_tcp_if_include": "eth0"}
        settings = [word for key, value in defaults.items() if key not in own for word in ("--mca", key, value)]
        exports = [
            word for key, value in {**self._master(), **self.exports}.items() for word in ("-x", f"{key}={value}")
        ]
        count = str(sum(self.resource_pool.values()))
        return [
            self.backend_program, "-n", count, "-hostfile", self.args.hostfile,
            *settings, *own, *exports, *self._script(),
        ]  # fmt: skip


class MPICHRunner(MultiNodeRunner):
    """Starts all ranks with the Hydra mpirun of MPICH: one section per rank, with its host and its place in the job.

    Hydra numbers ranks in the order of the sections, so that RANK agrees with the MPI rank.
    """

    backend_program = "mpirun"
    backend_name = MPICH_LAUNCHER

    def get_cmd(
        self, environment: MutableMapping[str, str], active_resources: Mapping[str, Sequence[Slot]]
    ) -> list[str]:
        world_size = sum(len(slots) for slots in active_resources.values())
        shared = {**self._master(), "WORLD_SIZE": str(world_size), **self.exports}
        command = [self.backend_program, *(word for key, value in shared.items() for word in ("-genv", key, value))]
        command += self._launcher_args()
        rank = 0
        for node_rank, (host, slots) in enumerate(active_resources.items()):
            node = {
                "LOCAL_SIZE": str(len(slots)),
                "CROSS_RANK": str(node_rank),
                "CROSS_SIZE": str(len(active_resources)),
            }
            get_accelerator().set_visible_devices_envs(node, slots)
            for local_rank in range(len(slots)):
                own = {"RANK": str(rank), "LOCAL_RANK": str(local_rank), **node}
                command += [":"] if rank else []
                command += [
                    "-n",
                    "1",
                    "-host",
                    host,
                    *(word for key, value in own.items() for word in ("-env", key, value)),
                ]
                command += self._script()
                rank += 1
        return command


class IMPIRunner(MPICHRunner):
    """Starts all ranks with Intel MPI's mpirun, which is Hydra as well, with its core pinning off."""

    backend_name = IMPI_LAUNCHER

    def get_cmd(
        self, environment: MutableMapping[str, str], active_resources: Mapping[str, Sequence[Slot]]
    ) -> list[str]:
        self.exports.setdefault("I_MPI_PIN", "0")
        return super().get_cmd(environment, active_resources)


class MVAPICHRunner(MPICHRunner):
    """Starts all ranks with MVAPICH's mpirun, with what MVAPICH needs for training programs with threads."""

    backend_name = MVAPICH_LAUNCHER

    def validate_args(self) -> None:
        super().validate_args()
        self._refuse_filters()
        if len(set(self.resource_pool.values())) > 1:
            raise LauncherError(
                f"--launcher {self.name} needs equal slots on all hosts, the hostfile gives {self.resource_pool}; "
                "make them equal"
            )

    def backend_exists(self) -> bool:
        """Return whether MVAPICH's own tool is on the PATH, since other libraries bring an mpirun as well."""
        return shutil.which("mpiname") is not None and super().backend_exists()

    def get_cmd(
        self, environment: MutableMapping[str, str], active_resources: Mapping[str, Sequence[Slot]]
    ) -> list[str]:
        on_gpu = {"MV2_USE_CUDA": "1"} if get_accelerator().device_name() == "cuda" else {}
        # Affinity would put all threads of a rank on one core.
        for key, value in {"MV2_SUPPORT_DL": "1", "MV2_ENABLE_AFFINITY": "0", **on_gpu}.items():
            self.exports.setdefault(key, value)
        return super().get_cmd(environment, active_resources)


class SlurmRunner(MultiNodeRunner):
    """Starts all ranks with srun inside a Slurm allocation.

    Slurm decides which host gets rank 0, so ranks take the master's address from Slurm unless --master_addr gives one.
    """

    backend_program = "srun"
    backend_name = SLURM_LAUNCHER

    def validate_args(self) -> None:
        super().validate_args()
        for flag, value in (("--include", self.args.include), ("--exclude", self.args.exclude)):
            if ":" in value:
                raise LauncherError(
                    f'{flag} "{value}" names slots, but Slurm gives out devices itself; name whole hosts, or '
                    "use --num_gpus"
                )

    def get_cmd(
        self, environment: MutableMapping[str, str], active_resources: Mapping[str, Sequence[Slot]]
    ) -> list[str]:
        counts = [len(slots) for slots in active_resources.values()]
        command = [self.backend_program, "-n", str(sum(counts)), "-N", str(len(counts)), *self._launcher_args()]
        if len(set(counts)) == 1:
            command.append(f"--ntasks-per-node={counts[0]}")
        if set(active_resources) != set(self.resource_pool):
            command.append(f"--nodelist={','.join(active_resources)}")
        exports = {key: value for key, value in self._master().items() if value} | self.exports
        # srun splits the list at commas, so such values travel in its own environment, which ALL passes on.
        environment.update({key: value for key, value in exports.items() if "," in value})
        listed = [f"{key}={value}" for key, value in exports.items() if "," not in value]
        return [*command, f"--export={','.join(['ALL', *listed])}", *self._script()]


RUNNERS: dict[str, type[MultiNodeRunner]] = {
    runner.backend_name: runner
    for runner in (PDSHRunner, OpenMPIRunner, MPICHRunner, IMPIRunner, SlurmRunner, MVAPICHRunner)
}


def node_script_flags(args: argparse.Namespace) -> list[str]:
    """Return the flags of the node launcher that say how a rank runs the script, from the runner's command line."""
    switches = ("module", "no_python", "no_local_rank", "bind_cores_to_rank")
    flags = [f"--{name}" for name in switches if getattr(args, name)]
    flags.append(f"--enable_each_rank_log={args.enable_each_rank_log}")
    if args.bind_core_list is not None:
        flags.append(f"--bind_core_list={args.bind_core_list}")
    if args.save_pid:
        flags.append(f"--save_pid={os.getpid()}")
    return [*flags, f"--log_level={args.log_level}"]


def _quote(word: str) -> str:
    """Return `word` safe for the remote shell and for pdsh, which replaces %h, %n and %u."""
    return shlex.quote(word).replace("%", "%%")
