"""A training script for `lastwords run`: some ranks kill themselves once, at a step and a phase that the plan names.

Arguments: a directory, steps, and deaths as rank:step:phase. Phases of a step: parent (which is killed), fwd, bwd, win,
always (each time that it comes there), unsaved, and three that are no deaths: stop, in which a signal holds the rank,
skip, which leaves out a collective, and forget, which deletes what the directory remembers of starts. Of step 0:
release. Of alone, main and resume there is a generation in place of the step. Each rank appends a line per step to
{directory}/trace-{rank}: step, loss, pid and time, and writes a digest of all state at the end.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import lastwords
from lastwords.liveness.process_id import is_stopped
from lastwords.optim_wrapper.launch import reporter

DIRECTORY, STEPS = Path(sys.argv[1]), int(sys.argv[2])
DEATHS = {(int(rank), int(step), phase) for rank, step, phase in (one.split(":") for one in sys.argv[3:])}
MEETS = any(phase == "skip" for *_, phase in DEATHS)
WORKERS = 2 if "LOADER_WORKERS" in os.environ else 0


def due(step: int, phase: str) -> bool:
    """Whether the plan says so, here, and it has not been done."""
    rank = int(os.environ["RANK"])
    mark = DIRECTORY / f"died-{rank}-{step}-{phase}"
    if (rank, step, phase) not in DEATHS or mark.exists():
        return False
    mark.write_text(str(time.monotonic()), encoding="utf-8")
    return True


def die(step: int, phase: str) -> None:
    """Here, if the plan says so."""
    if due(step, phase):
        os.kill(os.getppid() if phase == "parent" else os.getpid(), signal.SIGKILL)


def await_stop(step: int) -> None:
    """In the step in which a rank stops itself, the others wait until it has. In the first generation."""
    if generation() or not any((at, phase) == (step, "stop") for _, at, phase in DEATHS):
        return
    stopped = DIRECTORY / "stopped"
    if due(step, "stop"):
        stopped.write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    while not (stopped.exists() and is_stopped(int(stopped.read_text() or "0"))):
        signal.sigtimedwait((), 0.05)


def await_release() -> None:
    """As long as there is a file of this name, no step is begun."""
    while (DIRECTORY / "hold").exists():
        signal.sigtimedwait((), 0.01)


def hide_checkpoints(step: int) -> None:
    """In place of the directory there is a file, so nothing can be saved, until the next generation begins."""
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


class Unsaid:
    """In place of whoever tells the launcher: this rank dies when all loops are over, before it can say so."""

    def __getattr__(self, name: str) -> object:
        return lambda *args, **more: die(0, "release") if name == "over" else None


class Counted:
    """State of the script's own. Where it is loaded, the resume has begun and not ended."""

    def state_dict(self) -> dict[str, int]:
        return {"entries": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        die(generation(), "resume")


def generation() -> int:
    return int(os.environ["TORCHELASTIC_RESTART_COUNT"])


def count() -> None:
    """What there is as this process begins: threads, descriptors and children of the launcher, what `fork` has left of
    earlier generations, by whether it leads a session, and the hash of a text.
    """
    task = Path(f"/proc/{os.getppid()}/task")
    counts = {"threads": len([*task.iterdir()]), "fds": len(os.listdir(task.parent / "fd"))}
    counts["hash"] = hash("a text")
    counts["children"] = sum(len((one / "children").read_text().split()) for one in task.iterdir())
    for own in (False, True):
        left = [
            path.read_text() for earlier in range(generation()) for path in DIRECTORY.glob(f"forked-*-{earlier}-{own}")
        ]
        counts[f"left-{own}"] = sum(Path("/proc", pid).exists() for pid in left)
    with (DIRECTORY / f"begun-{os.environ['RANK']}").open("a", encoding="utf-8") as file:
        file.write(json.dumps(counts) + "\n")


def fork() -> None:
    """Two children that nobody waits for; one of them leads a session of its own."""
    for own in (False, True):
        if os.fork() == 0:
            os.closerange(0, 3)
            if own:
                os.setsid()
            (DIRECTORY / f"forked-{os.environ['RANK']}-{generation()}-{own}").write_text(str(os.getpid()))
            signal.sigtimedwait((), 300)
            os._exit(0)


def addresses() -> int:
    """How many ranks have told in the store of this generation where they are, for torch's first group."""
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
    show_checkpoints()
    if generation() and os.environ["RANK"] == os.environ.get("LATE_RANK"):
        await_others()
        signal.sigtimedwait((), 3)
    die(generation(), "alone")
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    sys.stderr.write(f"rank={rank} pid={os.getpid()}\n")
    if "OWN_SIGUSR1" not in os.environ or rank == int(os.environ["OWN_SIGUSR1"]):
        signal.signal(signal.SIGUSR1, lambda *_: (DIRECTORY / f"told-{rank}").touch())
    if "FORKS" in os.environ:
        fork()
    if "REFUSED" in os.environ:
        lastwords.protect(DIRECTORY / "ckpt", model=None, optimizer=None)  # type: ignore[arg-type]
    die(generation(), "main")
    torch.manual_seed(7)
    net = torch.nn.Sequential(
        torch.nn.Linear(32, 128), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(128, 32)
    )
    model = DistributedDataParallel(net)
    seed = os.getpid() if "DRAWN_ANEW" in os.environ else 3
    samples = torch.randn(STEPS * 4 * dist.get_world_size(), 32, generator=torch.Generator().manual_seed(seed))
    data = torch.utils.data.TensorDataset(samples)
    sampler: torch.utils.data.DistributedSampler[object] = torch.utils.data.DistributedSampler(data, shuffle=True)
    loader = torch.utils.data.DataLoader(data, batch_size=4, sampler=sampler, num_workers=WORKERS)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tft = lastwords.protect(DIRECTORY / "ckpt", model=model, optimizer=optimizer, extras={"counted": Counted()})
    with tft:
        optimizer = tft.optimizer
        point = None if "NO_RESUME" in os.environ else tft.resume(missing_ok=True)
        if point is not None and not point.exact:
            raise SystemExit(f"the resume is not exact: {point.reasons}")
        for _, step, (batch,) in tft.steps(loader, epochs=1):
            await_release()
            optimizer.zero_grad()
            loss = model(batch).pow(2).mean()
            forget_starts(step)
            die(step, "parent")
            await_stop(step)
            die(step, "fwd")
            if any(death[1:] == (step, "always") for death in DEATHS):
                dist.barrier()  # then all ranks have the step before
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
        if (rank, 0, "release") in DEATHS:
            reporter.use(Unsaid())  # type: ignore[arg-type]
    digest = hashlib.sha256()
    state = [*net.parameters(), *(one for each in optimizer.state.values() for one in each.values())]
    for tensor in state:
        digest.update(tensor.detach().numpy().tobytes())
    digest.update(torch.get_rng_state().numpy().tobytes())
    (DIRECTORY / f"final-{rank}").write_text(digest.hexdigest(), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    lastwords.run(main)
