"""The systems that are compared: how each is started, with which settings, and what it leaves on disk."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.peers.workload import RANKS

RESTARTS = ("--max-restarts", "5")
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Without it the restart of torchrun 2.13 itself fails (pytorch#135712)."""
SHARED_MEMORY = "bench_peers_"
"""DLRover names its shared memory by the job, and leaves it when killed."""
BIN = Path(sys.executable).parent


@dataclass(frozen=True)
class Command:
    """A process that the driver starts; `environment` is added to its own."""

    arguments: Sequence[str]
    environment: dict[str, str]
    serves: bool = False
    """It does not end with the training."""


@dataclass(frozen=True)
class System:
    """A row of the table."""

    name: str
    settings: str
    start: Callable[[], list[Command]]
    durable: str = ""
    """Glob of the complete checkpoints that training can resume from after all processes have gone."""
    full_again: bool = True
    """Whether a death is followed by updates of all ranks."""
    kills_per_run: int = 4


def free_port() -> int:
    """Free at the moment of the call."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def module(name: str, *arguments: str) -> list[str]:
    """What follows a launcher's own flags."""
    return ["-m", f"bench.peers.{name}", *arguments]


def torchrun(*arguments: str, environment: dict[str, str] | None = None) -> list[Command]:
    """One torchrun for all ranks."""
    flags = ["--standalone", "--nproc-per-node", str(RANKS), *RESTARTS]
    return [Command([str(BIN / "torchrun"), *flags, *arguments], OWN_STORE if environment is None else environment)]


def lastwords_run() -> list[Command]:
    """`lastwords run` takes torchrun's flags."""
    flags = ["--standalone", "--nproc-per-node", str(RANKS)]
    return [Command([str(BIN / "lastwords"), "run", *flags, *module("lastwords_ddp")], {})]


def torchft(*, tuned: bool = False) -> list[Command]:
    """A lighthouse, and one torchrun for each replica; a replica that comes back takes its state from the others."""
    port = free_port()
    flags = ["--bind", f"[::]:{port}", "--min_replicas", str(RANKS - 1)]
    flags += ["--join_timeout_ms", "1000", "--heartbeat_timeout_ms", "1000"] if tuned else []
    arguments = ["--tuned"] if tuned else []
    commands = [Command([str(BIN / "torchft_lighthouse"), *flags], {}, serves=True)]
    for rank in range(RANKS):
        environment = {"REPLICA_GROUP_ID": str(rank), "TORCHFT_LIGHTHOUSE": f"http://localhost:{port}"}
        launcher = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "1", *RESTARTS]
        commands.append(Command([*launcher, *module("torchft_ddp", *arguments)], environment))
    return commands


def nvrx(reserves: int, *, tuned: bool) -> list[Command]:
    """Plain processes: a launcher would end the others when one dies."""
    environment = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "NVRX_PORT": str(free_port()),
        "WORLD_SIZE": str(RANKS + reserves),
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # the store warns of each interval
    }
    program = [sys.executable, *module("nvrx_inprocess")]
    stores = [Command([*program, "--serve"], environment, serves=True)] if tuned else []
    program += ["--tuned"] if tuned else []
    return stores + [
        Command(program, {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(RANKS + reserves)
    ]


def dlrover(flags: Sequence[str] = (), *arguments: str) -> list[Command]:
    """The master, and DLRover's launcher, which takes torchrun's flags. Its --standalone would start the master itself,
    but does not run with torch 2.13: SubprocessHandler.__init__() missing 1 required positional argument."""
    port = free_port()
    master = [sys.executable, "-u", "-m", "dlrover.python.master.main", "--port", str(port), "--node_num", "1"]
    master += ["--job_name", f"{SHARED_MEMORY}{port}", "--platform", "local"]
    launcher = [str(BIN / "dlrover-run"), "--nnodes", "1", "--nproc-per-node", str(RANKS), *RESTARTS, *flags]
    launcher += module("dlrover_flash", *arguments)
    environment = {"DLROVER_MASTER_ADDR": f"127.0.0.1:{port}", "ELASTIC_JOB_NAME": f"{SHARED_MEMORY}{port}"}
    return [Command(master, {}, serves=True), Command(launcher, environment)]


def lm_resiliency(*arguments: str) -> list[Command]:
    """The manager, which starts torchrun with lm-resiliency's rendezvous."""
    return [Command([sys.executable, *module("lm_resiliency_ddp", "--manage", *arguments)], {})]


PLAIN = System("plain DDP", "torchrun, no checkpoints", lambda: torchrun(*module("torchrun_dcp", "--every", "0")))
"""Nobody is killed in it: step times are compared with it."""

LASTWORDS_FILES = "checkpoints/tft_saved_checkpoints-step_*/manifest.json"
TORCHFT_TUNED = "time-out 5 s; lighthouse: joining 1 s, heartbeat 1 s"
NVRX_TUNED = "intervals 0.1 s, time-outs 2 to 10 s, stores in a process of their own; DCP every 10 steps"
LM_RESILIENCY_FILES = "checkpoints/**/step-*/rank-*.pt"
DLROVER_FILES = "checkpoints/*/*.pt"
DCP_FILES = "checkpoints/*/.metadata"

SYSTEMS = (
    System("lastwords run", "defaults", lastwords_run, LASTWORDS_FILES),
    System(
        "lastwords, torchrun",
        "--max-restarts 5, else defaults",
        lambda: torchrun(*module("lastwords_ddp")),
        LASTWORDS_FILES,
    ),
    System("torchrun + DCP", "save every 10 steps", lambda: torchrun(*module("torchrun_dcp")), DCP_FILES),
    System(
        "torchrun + DCP, async",
        "async_save every 10 steps",
        lambda: torchrun(*module("torchrun_dcp", "--asynchronous")),
        DCP_FILES,
    ),
    System("torchft", "defaults", torchft),
    System("torchft, tuned", TORCHFT_TUNED, lambda: torchft(tuned=True)),
    System(
        "NVRx, a reserve",
        "defaults, gloo's time-out 10 s; DCP every 10 steps",
        lambda: nvrx(1, tuned=False),
        DCP_FILES,
        kills_per_run=1,
    ),
    System("NVRx, a reserve, tuned", NVRX_TUNED, lambda: nvrx(1, tuned=True), DCP_FILES, kills_per_run=1),
    System(
        "NVRx, no reserve, tuned", NVRX_TUNED, lambda: nvrx(0, tuned=True), DCP_FILES, full_again=False, kills_per_run=1
    ),
    System("dlrover", "to memory every 10 steps", dlrover, DLROVER_FILES),
    System(
        "dlrover, every step",
        "to memory every step, --save_at_breakpoint",
        lambda: dlrover(["--save_at_breakpoint"], "--every", "1"),
        DLROVER_FILES,
    ),
    System("lm-resiliency", "to memory every 10 steps", lm_resiliency, LM_RESILIENCY_FILES),
    System(
        "lm-resiliency, tuned",
        "to memory every 5 steps; rendezvous: polling 20 ms, heartbeat 1 s",
        lambda: lm_resiliency("--every", "5", "--tuned"),
        LM_RESILIENCY_FILES,
    ),
)
