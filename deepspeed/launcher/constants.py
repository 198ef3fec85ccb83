"""Names and defaults shared by the launcher's parts."""

import os

DLTS_HOSTFILE = "/job/hostfile"
TORCH_DISTRIBUTED_DEFAULT_PORT = 29500
PID_FILE_BASEPATH = "/tmp"

PDSH_LAUNCHER = "pdsh"
OPENMPI_LAUNCHER = "openmpi"
MPICH_LAUNCHER = "mpich"
IMPI_LAUNCHER = "impi"
SLURM_LAUNCHER = "slurm"
MVAPICH_LAUNCHER = "mvapich"
# pdsh runs this many remote commands at once; its own default of 32 would keep the ranks of larger jobs waiting for
# each other.
PDSH_MAX_FAN_OUT = 1024

DEEPSPEED_ENVIRONMENT_NAME = os.environ.get("DS_ENV_FILE", ".deepspeed_env")
DEEPSPEED_ENVIRONMENT_PATHS = [os.path.expanduser("~"), "."]

NEBULA_EXPORT_ENVS = [
    "DLTS_JOB_ID",
    "DLTS_NUM_WORKER",
    "NEBULA_PERSISTENT_STORAGE_PATH",
    "NEBULA_PERSISTENT_TIME_INTERVAL",
]
# A variable goes to the other nodes when its name starts with one of these.
EXPORT_ENVS = ["MLFLOW", "PYTHON", "MV2", "UCX", *NEBULA_EXPORT_ENVS]
# When the first variable is set, the scheduler sets the listed ones for each node, and one node's values are wrong
# elsewhere.
PER_NODE_ENVS = {"AISC_JOB_NAME": ["NCCL_IB_HCA", "UCX_NET_DEVICES"]}
