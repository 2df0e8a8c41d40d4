"""The variables that make a process part of a dynamic cluster; their names and values are MindSpore's.

MS_ROLE             MS_SCHED or MS_WORKER; without it a process is no part of a cluster
MS_WORKER_NUM       how many workers there are
MS_SCHED_HOST       address of the scheduler's host
MS_SCHED_PORT       the scheduler's port there
MS_RECOVERY_PATH    a directory that all processes of the cluster see, for this cluster alone
MS_ENABLE_RECOVERY  1: workers and scheduler may be started again; else the first death ends the job
MS_NODE_ID          name of the worker, under which it rejoins; a number below MS_WORKER_NUM becomes its rank
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lastwords.errors import ConfigError

_log = logging.getLogger(__name__)

ROLE, WORKERS, HOST, PORT = "MS_ROLE", "MS_WORKER_NUM", "MS_SCHED_HOST", "MS_SCHED_PORT"
PATH, RECOVERY, NODE = "MS_RECOVERY_PATH", "MS_ENABLE_RECOVERY", "MS_NODE_ID"

SCHEDULER, WORKER = "MS_SCHED", "MS_WORKER"

PORT_MAX = 65535
NODE_CHARS_MAX = 200

_NEEDED = (WORKERS, HOST, PORT, PATH)
_NAMES = (ROLE, *_NEEDED, RECOVERY, NODE)

_LIKENESS = 0.85
"""From which on a name counts as misspelt: MS_SCHEDULER_HOST has 0.87, MindSpore's own MS_WORKER_IP 0.80."""

_LAUNCHERS = ("TORCHELASTIC_RUN_ID", "RANK")


@dataclass(frozen=True, slots=True)
class Cluster:
    """What the environment says. node: "" where the scheduler is to choose."""

    role: str
    workers: int
    host: str
    port: int
    path: Path
    recovery: bool
    node: str = ""

    @property
    def address(self) -> str:
        """Of the scheduler, as people write it."""
        return f"{self.host}:{self.port}"


def cluster_of(environ: Mapping[str, str], role: str = "") -> Cluster | None:
    """None where MS_ROLE is not set; ConfigError that names what is missing or contradicts itself.

    A process without MS_ROLE is refused where all else says that it is a worker, and no launcher has started it: it
    would train alone, or wait for ranks that never come.

    role: what the caller is, whatever MS_ROLE says.

    >>> cluster_of({}) is None
    True
    >>> some = {"MS_ROLE": "MS_WORKER", "MS_WORKER_NUM": "8", "MS_SCHED_HOST": "node-1", "MS_SCHED_PORT": "8118"}
    >>> cluster_of({**some, "MS_RECOVERY_PATH": "/shared/recovery"}).address
    'node-1:8118'
    """
    cluster = _cluster_of(environ, role)
    if cluster is not None:
        for hint in _hints(environ):
            _log.warning("%s", hint)
    return cluster


def _hints(environ: Mapping[str, str]) -> list[str]:
    """About names that no variable of a cluster has, but almost: that of one that is not set.

    >>> _hints({"MS_ENABLE_RECOVER": "1", "MS_WORKER_IP": "10.0.0.7", "MS_ROLE": "MS_SCHED"})
    ['MS_ENABLE_RECOVER is set, which lastwords does not read: is MS_ENABLE_RECOVERY meant?']
    """
    unset = [name for name in _NAMES if not environ.get(name)]
    strange = sorted(name for name in environ if name.startswith("MS_") and name not in _NAMES)
    close = {name: difflib.get_close_matches(name, unset, 1, _LIKENESS) for name in strange}
    return [
        f"{name} is set, which lastwords does not read: is {meant[0]} meant?" for name, meant in close.items() if meant
    ]


def _cluster_of(environ: Mapping[str, str], role: str) -> Cluster | None:
    said = environ.get(ROLE, "")
    launcher = next((name for name in _LAUNCHERS if name in environ), None)
    if not (said or role):
        if launcher is None and all(environ.get(name) for name in _NEEDED):
            why = (
                f"{', '.join(_NEEDED)} are set, and {ROLE} is not: set {ROLE}={WORKER} for a worker of this cluster, "
                "or unset the others for a process that is none"
            )
            raise ConfigError("; ".join((why, *_hints(environ))))
        return None
    if said and role and said != role:
        raise ConfigError(
            f"{ROLE} is {said}, and `lastwords scheduler` is {role}: leave {ROLE} out, or set it to {role}"
        )
    role = role or said
    if role not in (SCHEDULER, WORKER):
        raise ConfigError(f"{ROLE} is {role!r}; it is {SCHEDULER} or {WORKER}")
    if launcher is not None and role == WORKER:
        raise ConfigError(
            f"{ROLE} is set, and so is {launcher}, by a launcher: start each process of a cluster by itself, or unset "
            f"{ROLE} under `lastwords run` and torchrun"
        )
    missing = [name for name in _NEEDED if not environ.get(name)]
    if missing:
        who = f"{ROLE}={role}" if said else "lastwords scheduler"
        why = f"{who} needs {', '.join(missing)} in the environment: docs/cluster.md"
        raise ConfigError("; ".join((why, *_hints(environ))))
    recovery = environ.get(RECOVERY, "0")
    if recovery not in ("0", "1"):
        raise ConfigError(f"{RECOVERY} is {recovery!r}; it is 0 or 1")
    return Cluster(
        role,
        _number(environ, WORKERS, 1, None),
        _host(environ),
        _number(environ, PORT, 1, PORT_MAX),
        Path(environ[PATH]).absolute(),
        recovery == "1",
        _node(environ) if role == WORKER else "",
    )


def _host(environ: Mapping[str, str]) -> str:
    """Whether it is known is another question; what can be no name raises UnicodeError wherever it is asked."""
    host = environ[HOST]
    try:
        host.encode("idna")
    except UnicodeError as error:
        raise ConfigError(
            f"{HOST} is {host!r:.80}, which can be no name: set it to an address or a name of the scheduler's host, in "
            "all processes of the cluster"
        ) from error
    return host


def _node(environ: Mapping[str, str]) -> str:
    """The worker's name; "" where it has none."""
    node = environ.get(NODE)
    if node is None:
        return ""
    if not is_name(node):
        raise ConfigError(
            f"{NODE} is {node!r:.80}, which is no name: give the worker one, such as 3 or worker-3, or unset it, and "
            "the scheduler chooses"
        )
    if len(node) > NODE_CHARS_MAX:
        raise ConfigError(f"{NODE} has {len(node)} characters, {NODE_CHARS_MAX} are the most")
    return node


def is_name(node: str) -> bool:
    """Whether people can tell it from others, and from none.

    >>> [is_name(node) for node in ("3", "worker-3", "", " 3", "3\\n")]
    [True, True, False, False, False]
    """
    return bool(node) and node == node.strip() and node.isprintable()


def _number(environ: Mapping[str, str], name: str, least: int, most: int | None) -> int:
    text = environ[name]
    if text.isascii() and text.isdigit() and least <= int(text) and (most is None or int(text) <= most):
        return int(text)
    raise ConfigError(f"{name} is {text!r}; it is a number from {least}{'' if most is None else f' to {most}'}")
