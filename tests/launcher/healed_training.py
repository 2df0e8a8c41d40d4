"""A training script for `lastwords run`: some ranks kill themselves once, at a step and a phase that the plan names.

Arguments: a directory, steps, and deaths as rank:step:phase. Phases of a step: parent (which is killed), fwd, bwd, win,
always (each time that it comes there), unsaved, and two that are no deaths: skip, which leaves out a collective, and
forget, which deletes what the directory remembers of starts. Of step 0: release, and stop, of a spare. Of main and
resume, in place of a step, the generation; of import, how many processes of the rank have died before. Each rank
appends a line per step to {directory}/trace-{rank}: step, loss, pid and time, and writes a digest of all state at the
end.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import lastwords
from lastwords.launcher import worker
from lastwords.optim_wrapper.trainer import reentry

DIRECTORY, STEPS = Path(sys.argv[1]), int(sys.argv[2])
DEATHS = {(int(rank), int(step), phase) for rank, step, phase in (one.split(":") for one in sys.argv[3:])}
MEETS = any(phase == "skip" for *_, phase in DEATHS)
STOPS = any(phase == "stop" for *_, phase in DEATHS)
WORKERS = 2 if "LOADER_WORKERS" in os.environ else 0
kept: list[BaseException] = []
entries: list[int] = []
outside: list[torch.nn.Module] = []


def due(step: int, phase: str) -> bool:
    """Whether the plan says so, here, and it has not been done."""
    rank = int(os.environ.get("RANK", "-1"))
    mark = DIRECTORY / f"died-{rank}-{step}-{phase}"
    if (rank, step, phase) not in DEATHS or mark.exists():
        return False
    mark.write_text(str(time.monotonic()), encoding="utf-8")
    return True


def die(step: int, phase: str) -> None:
    """Here, if the plan says so."""
    if due(step, phase):
        if STOPS:
            await_spare()
        os.kill(os.getppid() if phase == "parent" else os.getpid(), signal.SIGKILL)


def await_spare() -> None:
    """Until a spare waits for a rank, and the launcher knows."""
    while not (DIRECTORY / "spare").exists():
        signal.sigtimedwait((), 0.05)
    signal.sigtimedwait((), 1)


def hide_checkpoints(step: int) -> None:
    """In place of the directory there is a file, so nothing can be saved, until `main` begins again."""
    if (int(os.environ["RANK"]), step, "unsaved") in DEATHS and not (DIRECTORY / "hidden").exists():
        (DIRECTORY / "ckpt").rename(DIRECTORY / "hidden")
        (DIRECTORY / "ckpt").touch()
        die(step, "unsaved")


def forget_starts(step: int) -> None:
    """As somebody does who cleans up hidden files while the job runs."""
    if due(step, "forget"):
        for path in (DIRECTORY / "ckpt").glob(".lastwords-start*"):
            path.unlink()


def show_checkpoints() -> None:
    """All ranks, at once."""
    with contextlib.suppress(OSError):
        (DIRECTORY / "ckpt").unlink()
    (DIRECTORY / "ckpt").mkdir(exist_ok=True)


def network() -> torch.nn.Sequential:
    """Of equal weights on all ranks."""
    torch.manual_seed(7)
    return torch.nn.Sequential(
        torch.nn.Linear(32, 128), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(128, 32)
    )


class Unsaid:
    """In place of whoever tells the launcher: this rank dies when all loops are over, before it can say so."""

    def __getattr__(self, name: str) -> object:
        return lambda *args: die(0, "release") if name == "over" else None


class Counted:
    """State of the script's own. Where it is loaded, the resume has begun and not ended."""

    def state_dict(self) -> dict[str, int]:
        return {"entries": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        die(generation(), "resume")


def generation() -> int:
    return int(os.environ["TORCHELASTIC_RESTART_COUNT"])


@contextlib.contextmanager
def protected(tft: lastwords.TFTRegister) -> Iterator[None]:
    """By `with`, or (START_STOP) as scripts do that know only `start()` and `stop()`."""
    if "START_STOP" not in os.environ:
        with tft:
            yield
        return
    tft.start()
    yield
    tft.stop()


def count() -> None:
    """What this process has of the system's as it enters `main`: threads and descriptors."""
    counts = {"threads": len(os.listdir("/proc/self/task")), "fds": len(os.listdir("/proc/self/fd"))}
    with (DIRECTORY / f"resources-{os.environ['RANK']}").open("a", encoding="utf-8") as file:
        file.write(json.dumps(counts) + "\n")


def addresses() -> int:
    """How many ranks have told in the store of this entry where they are, for torch's first group."""
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    return sum("//cpu//" in key for key in store.list_keys())


def await_others() -> None:
    """Until all others have told where they are, and wait for this rank; says by the file `late` how many have."""
    while addresses() < int(os.environ["WORLD_SIZE"]) - 1:
        signal.sigtimedwait((), 0.05)
    (DIRECTORY / "late").write_text(str(addresses()), encoding="utf-8")


def main() -> None:
    """The script as it would be without healing."""
    count()
    entries.append(1)
    if "ONCE_ONLY" in os.environ and len(entries) > 1:
        raise RuntimeError("something that can be done once in a process")
    show_checkpoints()
    if (DIRECTORY / "died-1-5-bwd").exists() and os.environ["RANK"] == os.environ.get("LATE_RANK"):
        await_others()
        signal.sigtimedwait((), 3)
    die(generation(), "alone")
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    print(f"rank={rank} pid={os.getpid()}", file=sys.stderr, flush=True)
    if "OWN_SIGUSR1" not in os.environ or rank == int(os.environ["OWN_SIGUSR1"]):
        signal.signal(signal.SIGUSR1, lambda *_: (DIRECTORY / f"told-{rank}").touch())
    if "FORKS" in os.environ and os.fork() == 0:
        signal.sigtimedwait((), 20)
        os._exit(0)
    if "REFUSED" in os.environ:
        lastwords.keep("data", None)  # type: ignore[arg-type]
    die(generation(), "main")
    if "OUTSIDE" in os.environ and not outside:
        outside.append(network())
    made = network()
    net = outside[0] if outside else made
    model = DistributedDataParallel(net)
    samples = torch.randn(STEPS * 4 * dist.get_world_size(), 32, generator=torch.Generator().manual_seed(3))
    data = torch.utils.data.TensorDataset(samples)
    sampler: torch.utils.data.DistributedSampler[object] = torch.utils.data.DistributedSampler(data, shuffle=True)
    persist = os.environ.get("LOADER_WORKERS") == "persistent"
    loader = torch.utils.data.DataLoader(
        data, batch_size=4, sampler=sampler, num_workers=WORKERS, persistent_workers=persist
    )
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tft = lastwords.protect(DIRECTORY / "ckpt", model=model, optimizer=optimizer, extras={"counted": Counted()})
    with protected(tft):
        optimizer = tft.optimizer
        point = tft.resume(missing_ok=True)
        if point is not None and not point.exact:
            raise SystemExit(f"the resume is not exact: {point.reasons}")
        try:
            for _, step, (batch,) in tft.steps(loader, epochs=1):
                optimizer.zero_grad()
                loss = model(batch).pow(2).mean()
                forget_starts(step)
                die(step, "parent")
                die(step, "fwd")
                if (rank, step, "always") in DEATHS:
                    os.kill(os.getpid(), signal.SIGKILL)
                if MEETS and not due(step, "skip"):
                    dist.barrier()
                loss.backward()
                die(step, "bwd")
                hide_checkpoints(step)
                optimizer.step()
                die(step, "win")
                with (DIRECTORY / f"trace-{rank}").open("a", encoding="utf-8") as file:
                    file.write(f"{step} {loss.item()!r} {os.getpid()} {time.monotonic()}\n")
        except BaseException as error:
            kept.append(error)  # as a library for error reports may do
            raise
        if (rank, 0, "release") in DEATHS:
            reentry.use(Unsaid())  # type: ignore[arg-type]
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="utf-8").split()
    (DIRECTORY / f"children-{rank}").write_text(" ".join(children), encoding="utf-8")
    digest = hashlib.sha256()
    state = [*net.parameters(), *(one for each in optimizer.state.values() for one in each.values())]
    for tensor in state:
        digest.update(tensor.detach().numpy().tobytes())
    digest.update(torch.get_rng_state().numpy().tobytes())
    (DIRECTORY / f"final-{rank}").write_text(digest.hexdigest(), encoding="utf-8")
    dist.destroy_process_group()


def take_place_and_stop(self: worker.Worker, take_place: Callable[[worker.Worker], None]) -> None:
    """A spare that becomes a rank, once: before it can say so."""
    (DIRECTORY / "spare").touch()
    take_place(self)
    if due(0, "stop"):
        os.kill(os.getpid(), signal.SIGSTOP)


if __name__ == "__main__":
    if os.environ.get("RANK", "").isdecimal():  # no spare, and no worker of a dynamic cluster
        die(len([*DIRECTORY.glob(f"died-{os.environ['RANK']}-*")]), "import")
    if "HELD" in os.environ:  # the frames of a `main` that was left keep what is in them
        worker._let_go = lambda error: None
    worker.Worker._take_place = functools.partialmethod(  # type: ignore[assignment, method-assign]
        take_place_and_stop, take_place=worker.Worker._take_place
    )
    lastwords.run(main)
