"""What thousands of ranks cost the controller, and 100 000 tensors one rank: python bench/scale.py [--ranks 16384].

    python bench/scale.py [--ranks 1024] [--tensors 1000] [--one-rank 100000] [--dir DIR]

Ranks are synthetic: one part is written as a rank writes it, and copied for all others with their number and their
checksums, into the page cache. Each rank has a unit of its own, the case with most writers. The controller's own code
chooses among them and orders, verifies the parts, publishes them, and looks for the newest checkpoint.

A second thread asks every millisecond for its turn. "Pause" is the longest time that it did not get one, in which the
controller would have heard nobody, and the rank would not have trained. It is counted in processor time of this
process, which says how long the work did not let go, whatever else the machine does, and stands beside that of a bare
loop.
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import xxhash

from lastwords import codec
from lastwords.checkpoint import layout, load, publish
from lastwords.checkpoint.entries import FileEntry, UnitEntry
from lastwords.checkpoint.format import TensorSpec, encode_header
from lastwords.checkpoint.meta import EMPTY_UNIT, LocalMeta
from lastwords.checkpoint.part import LocalState, RankPart, UnitState, write_part
from lastwords.controller.core import ControllerCore
from lastwords.controller.events import (
    Died,
    Event,
    FromRank,
    Published,
    Remember,
    Send,
    StartPublish,
    StartVerify,
    Verified,
)
from lastwords.controller.handover import ControllerSpec, StateFile, StateOwner
from lastwords.core_events import Tick
from lastwords.launcher.events import Begun, Effect, Ended, Leaving, Ready, Updated
from lastwords.launcher.events import Event as LauncherEvent
from lastwords.launcher.head import Head
from lastwords.launcher.link import Lines
from lastwords.launcher.protocol import FromHost, read, to_message
from lastwords.vocabulary import (
    DeathSource,
    Exit,
    Freeze,
    Hello,
    LoopBegin,
    Order,
    Phase,
    ProcessId,
    Raised,
    Save,
    Saved,
    Settled,
    Stand,
    Status,
)

BUDGET_S = 30.0
"""Planned, verified and published, for 16 384 ranks with 1 000 tensors; fewer ranks have their share."""
BUDGET_RANKS = 16_384
LATEST_BUDGET_S = 0.1
PAUSE_BUDGET_S = 0.05
MESSAGE_BUDGET_BYTES = 1024
REST_BUDGET_CORES = 1.0
FREEZE_BUDGET_S = 1.0
CHOICE_BUDGET_S = 0.1
REST_S = 10
"""So many seconds in which every rank ends a step and says so."""

TEMPLATE = 999_999
"""Rank of the part that is copied; longer than any other, so that its digits occur nowhere else."""
RANKS_A_HOST = 8
JOB = "scale"


@dataclass
class Cost:
    """Of one block of work. pause_s: most processor time that was spent without a turn for another thread."""

    wall_s: float = 0.0
    cpu_s: float = 0.0
    pause_s: float = 0.0

    def __str__(self) -> str:
        return f"{self.wall_s:9.2f} s {self.cpu_s:9.2f} s {self.pause_s * 1000:9.1f} ms"


@contextmanager
def cost() -> Iterator[Cost]:
    """Measures the block; to be read when it has ended."""
    found, over = Cost(), threading.Event()

    def tick() -> None:
        last_s = time.process_time()
        while not over.wait(0.001):
            now_s = time.process_time()
            found.pause_s, last_s = max(found.pause_s, now_s - last_s), now_s

    ticker = threading.Thread(target=tick)
    ticker.start()
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    yield found
    found.wall_s, found.cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
    over.set()
    ticker.join()


def peak_mib() -> float:
    """Largest resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


# ---------------------------------------------------------------------- the controller's decision


class Core:
    """The controller's core in a job of synthetic ranks. copies: ranks that hold each unit, on different hosts."""

    def __init__(self, ranks: int, copies: int = 1) -> None:
        self.core = ControllerCore(ranks, 1)
        self.orders: list[Order] = []
        self.now_s = 1.0
        self._ranks = ranks
        self.tell(Tick())
        for rank in range(ranks):
            process = ProcessId(f"host-{rank // RANKS_A_HOST}", 100 + rank, 7, f"nonce-of-rank-{rank}")
            unit = unit_name(rank % (ranks // copies))
            self.tell(FromRank(Hello(rank, 1, ranks, process, (unit,), Stand(Phase.COMPUTING, 0))))

    def tell(self, event: Event) -> list[object]:
        effects = self.core.handle(event, self.now_s)
        self.orders += [effect.order for effect in effects if isinstance(effect, Send)]
        return list(effects)

    def train(self) -> None:
        """All have begun the loop, and ended step 1."""
        for rank in range(self._ranks):
            self.tell(FromRank(LoopBegin(rank, 1, 0, 0, 0)))
        for rank in range(self._ranks):
            self.tell(FromRank(Status(rank, 1, Stand(Phase.COMPUTING, 1))))

    def all_are_told(self) -> None:
        """Everybody got SIGTERM at step 1, and has stopped."""
        for rank in range(self._ranks):
            self.tell(FromRank(Raised(rank, 1, "SIGTERM", False, Stand(Phase.COMPUTING, 1))))
        for rank in range(self._ranks):
            self.tell(FromRank(Settled(rank, 1, 1, 1, Stand(Phase.COMPUTING, 1))))

    def all_have_saved(self) -> StartVerify:
        saves = [order for order in self.orders if isinstance(order, Save)]
        assert len(saves) == self._ranks
        effects = [self.tell(FromRank(Saved(rank, 1, 1, 1, 1, 1000))) for rank in range(self._ranks)]
        return next(effect for effect in itertools.chain(*effects) if isinstance(effect, StartVerify))

    def verified(self) -> StartPublish:
        return next(effect for effect in self.tell(Verified(1, 1)) if isinstance(effect, StartPublish))


def sizes_of(orders: list[Order]) -> list[int]:
    """Bytes of each as they go over the network."""
    return [codec.order_to_pb(order).ByteSize() for order in orders]


# ---------------------------------------------------------------------- synthetic parts


def unit_name(rank: int) -> str:
    return f"u{rank}"


def specs_of(rank: int, tensors: int) -> list[TensorSpec]:
    """Names as long as those of real models, 8 bytes each."""
    return [
        TensorSpec(f"unit/{unit_name(rank)}/model/decoder.layers.{number // 10}.attention.weight_{number}", "F32", (2,))
        for number in range(tensors)
    ]


def write_template(directory: Path, tensors: int) -> tuple[bytes, bytes]:
    """What a rank leaves: its file, and part.json."""
    unit = UnitState(
        [(spec, b"\0" * 8) for spec in specs_of(TEMPLATE, tensors)], replace(EMPTY_UNIT, holders=[TEMPLATE])
    )
    local = LocalState([], LocalMeta(slot={"position": {"batch": 1}}))
    part = write_part(directory, TEMPLATE, 1, 1, 1, {unit_name(TEMPLATE): unit}, {TEMPLATE: local}, {}, job=JOB)
    rank_dir = directory / layout.rank_dir_name(TEMPLATE)
    return (directory / part.file.path).read_bytes(), (rank_dir / layout.PART_NAME).read_bytes()


def write_copies(directory: Path, ranks: int, tensors: int) -> int:
    """Parts of all ranks, as if they had written them; returns their bytes."""
    with tempfile.TemporaryDirectory(dir=directory.parent) as aside:
        file, part = write_template(Path(aside), tensors)
    header_bytes = 8 + int.from_bytes(file[:8], "little")
    text, data = file[8:header_bytes].rstrip(), file[header_bytes:]
    old = str(TEMPLATE).encode()
    written = 0
    for rank in range(ranks):
        new = str(rank).encode()
        padded = text.replace(old, new)
        padded += b" " * (-(8 + len(padded)) % 64)
        header = len(padded).to_bytes(8, "little") + padded
        whole = header + data
        described = part.replace(old, new)
        for name, value in {
            "bytes": str(len(whole)),
            "header_bytes": str(len(header)),
            "header_sum": f'"{xxhash.xxh3_64_hexdigest(header)}"',
            "chunks": f'["{xxhash.xxh3_64_hexdigest(whole)}"]',
        }.items():
            described = with_value(described, name, value)
        described = with_value(described, "checksum", f'"{"0" * 16}"')
        described = with_value(described, "checksum", f'"{xxhash.xxh3_64_hexdigest(described)}"')
        rank_dir = directory / layout.rank_dir_name(rank)
        rank_dir.mkdir(parents=True)
        (directory / str(layout.PartPath(rank, 1, 1))).write_bytes(whole)
        (rank_dir / layout.PART_NAME).write_bytes(described)
        written += len(whole) + len(described)
    return written


def with_value(document: bytes, name: str, value: str) -> bytes:
    """The document with another value of a short field, whose name occurs first where it is meant."""
    key = f'"{name}":'.encode()
    begin = document.index(key) + len(key)
    begin += document[begin : begin + 1] == b" "
    end = document.index(b"]", begin) + 1 if document[begin : begin + 1] == b"[" else begin
    while end == begin or document[end : end + 1] not in b",}\n":
        end += 1
    return document[:begin] + value.encode() + document[end:]


# ---------------------------------------------------------------------- one rank with many tensors


def encode_one_rank(tensors: int) -> tuple[Cost, Cost]:
    """Encoding of one rank's header and of its part.json."""
    specs = specs_of(0, tensors)
    with cost() as of_header:
        header = encode_header(specs, {})
    file = FileEntry(str(layout.PartPath(0, 1, 1)), len(header), len(header), "0" * 16, ("0" * 16,))
    unit = UnitEntry(0, file.path, tuple(specs), {})
    with cost() as of_part:
        RankPart(0, 1, 1, 1, JOB, file, {unit_name(0): unit}, {}, {}).encode()
    return of_header, of_part


def bare_pause() -> float:
    """The machine's own limit: the longest pause beside a loop that holds nothing for long."""
    with cost() as found:
        until_s = time.perf_counter() + 2.0
        while time.perf_counter() < until_s:
            pass
    return found.pause_s


# ---------------------------------------------------------------------- the report


def verdict(value: float, budget: float) -> str:
    return "met" if value <= budget else "MISSED"


def line(what: str, found: Cost) -> None:
    print(f"{what:<52}{found}", flush=True)


def measure(ranks: int, tensors: int, root: Path) -> dict[str, Cost]:
    """Decide, verify, publish, and look for the newest, with what each costs."""
    costs: dict[str, Cost] = {}
    core = Core(ranks)
    core.orders.clear()
    with cost() as costs["decided: all ranks settled, choice, orders"]:
        core.all_are_told()
    saves = [order for order in core.orders if isinstance(order, Save)]
    sizes = sizes_of(list(saves))
    print(f"orders to save: {len(sizes)}, {sum(sizes) / 1e6:.2f} MB in all, the largest {max(sizes)} bytes", end="")
    print(f"   budget {MESSAGE_BUDGET_BYTES}: {verdict(max(sizes), MESSAGE_BUDGET_BYTES)}")
    with cost() as costs["heard that all have written"]:
        order = core.all_have_saved()
    directory = layout.TemporaryName(1, JOB, 1, 1, 1).under(root)
    begun_s = time.perf_counter()
    written = write_copies(directory, ranks, tensors)
    print(f"parts: {written / 1e6:.0f} MB of {ranks} ranks, made in {time.perf_counter() - begun_s:.0f} s", flush=True)
    with cost() as costs["verified"]:
        heads: dict[int, publish.SeenPart] = {}
        problems = publish.verify_parts(
            directory, order.writers, order.units, order.local_ranks, 1, job=JOB, heads=heads
        )
    assert not problems, problems[:3]
    asked = core.verified()
    writers = tuple(part.rank for part in asked.parts)
    incident = publish.IncidentFacts(JOB, 1, 1, 1, 1, ranks, writers, asked.reason, asked.cause_ranks)
    with cost() as costs["published: manifest, rename"]:
        path = publish.publish(root, directory, incident, heads=heads)
    core.orders.clear()
    with cost() as costs["farewell"]:
        core.tell(Published(1, 1, str(path)))
    sizes = sizes_of([order for order in core.orders if isinstance(order, Exit)])
    print(f"farewells: {len(sizes)}, {sum(sizes) / 1e6:.2f} MB in all, the largest {max(sizes)} bytes", end="")
    print(f"   budget {MESSAGE_BUDGET_BYTES}: {verdict(max(sizes), MESSAGE_BUDGET_BYTES)}")
    with cost() as newest:
        assert load.latest(root) == path
    print(f"manifest: {(path / layout.MANIFEST_NAME).stat().st_size / 1e6:.1f} MB")
    print(f"\n{'':<52}{'wall':>11} {'processor':>11} {'pause':>12}")
    for what, found in costs.items():
        line(what, found)
    line("the newest is found", newest)
    total_s = sum(found.wall_s for found in costs.values())
    budget_s = BUDGET_S * ranks / BUDGET_RANKS
    pause_s = max(found.pause_s for found in costs.values())
    print(f"\nall but the last   {total_s:.2f} s   budget {budget_s:.1f}: {verdict(total_s, budget_s)}")
    met = verdict(newest.wall_s, LATEST_BUDGET_S)
    print(f"the newest         {newest.wall_s:.2f} s   budget {LATEST_BUDGET_S}: {met}")
    print(f"longest pause      {pause_s * 1000:.0f} ms   budget {PAUSE_BUDGET_S * 1000:.0f}: ", end="")
    print(verdict(pause_s, PAUSE_BUDGET_S))
    print(f"peak memory        {peak_mib():.0f} MiB")
    return costs


# ---------------------------------------------------------------------- many ranks die at once


def mass_death(ranks: int, dead: int, directory: Path, copies: int = 1) -> tuple[Cost, Cost]:
    """So many ranks are lost at one moment; what the controller keeps for the next one is written.

    Returns what it costs until all others have been told to stop, as bytes, and until it is chosen who saves.
    """
    core, alive = Core(ranks, copies), ranks - dead
    core.train()
    spec = ControllerSpec(JOB, 1, ranks, "127.0.0.1", 1, directory)
    kept = StateFile(directory / "controller.json", StateOwner(1, 1), spec, "token")
    found = [0, 0]

    def tell(event: Event) -> None:
        for effect in core.tell(event):
            if isinstance(effect, Remember):
                kept.write(effect)
                found[0] += 1
                found[1] += kept.path.stat().st_size

    print(f"\n{dead} of {ranks} ranks die at once:")
    core.orders.clear()
    with cost() as deaths:
        for rank in range(alive, ranks):
            tell(Died(rank, DeathSource.ROBUST_MUTEX))
        frozen = sizes_of(core.orders)
    assert len(frozen) >= alive
    line("all deaths are heard, all others told to stop", deaths)
    answers = [FromRank(Settled(rank, 1, 1, 1, Stand(Phase.COMPUTING, 1))) for rank in range(alive)]
    with cost() as settled:
        for answer in answers[:-1]:
            tell(answer)
    line("all others but one have settled", settled)
    with cost() as chosen:
        tell(answers[-1])
    line("the last one has settled: choice, orders", chosen)
    print(f"kept for the next controller: {found[0]} times, {found[1] / 1e6:.1f} MB in all")
    return deaths, chosen


# ---------------------------------------------------------------------- nothing happens


def at_rest(ranks: int) -> None:
    """Every rank ends a step each second, and says so. Decoded as it comes; the network's own work is not in it."""
    core = Core(ranks)
    core.train()
    with cost() as found:
        pass
    for step in range(2, 2 + REST_S):
        core.now_s += 1.0
        stand = Stand(Phase.COMPUTING, step)
        raw = [codec.reports_to_bytes([Status(rank, 1, stand, work_s=0.9)]) for rank in range(ranks)]
        with cost() as second:
            for one in raw:
                for report in codec.reports_from_bytes(one):
                    core.tell(FromRank(report))
            core.tell(Tick())
        found.wall_s, found.cpu_s = found.wall_s + second.wall_s, found.cpu_s + second.cpu_s
        found.pause_s = max(found.pause_s, second.pause_s)
    assert not any(isinstance(order, Freeze) for order in core.orders)
    print(f"\n{ranks} ranks train, a status of each in a second:")
    line(f"{REST_S} seconds of it", found)
    cores, budget = found.cpu_s / REST_S, REST_BUDGET_CORES * ranks / BUDGET_RANKS
    print(f"processor at rest  {cores:.2f} cores   budget {budget:.2f}: {verdict(cores, budget)}")


def one_host(ranks: int, directory: Path) -> None:
    """A host is lost: how long until all others have been told, and until it is chosen who saves."""
    frozen, chosen = mass_death(ranks, RANKS_A_HOST, directory, copies=2)
    share = ranks / BUDGET_RANKS
    for what, found, budget_s in (("all are told", frozen, FREEZE_BUDGET_S), ("it is chosen", chosen, CHOICE_BUDGET_S)):
        print(
            f"{what:<18} {found.cpu_s:.3f} s   budget {budget_s * share:.3f}: {verdict(found.cpu_s, budget_s * share)}"
        )


# ---------------------------------------------------------------------- a rank dies, and all begin anew


def recover(ranks: int) -> None:
    """The launcher of the first host hears all ranks, as lines of JSON, from hosts of RANKS_A_HOST."""
    head, told = Head(ranks, 0, "127.0.0.1"), [0]

    def obey(effect: Effect) -> None:
        told[0] += len(json.dumps(to_message(effect)))

    for first in range(0, ranks, RANKS_A_HOST):
        head.has_host(range(first, min(first + RANKS_A_HOST, ranks)), obey)

    def hear(what: str, events: Iterable[LauncherEvent]) -> None:
        raw = [json.dumps(to_message(event)).encode() + b"\n" for event in events]
        lines = Lines()
        with cost() as found:
            for one in raw:
                for message in lines.feed(one):
                    head.hear(read(message, FromHost))
                head.tick()
        line(f"{what} ({sum(map(len, raw)) / 1e6:.1f} MB)", found)

    every, rest = range(ranks), range(1, ranks)
    print(f"\nthe launcher of the first host, {ranks} ranks:")
    hear("all can be started, and are", (Ready(rank) for rank in every))
    hear("all loops have begun", (Begun(rank) for rank in every))
    ends = (each for rank in rest for each in (Leaving(rank, 7), Ended(rank, 75)))
    hear("one dies, the others leave, all are started", [Ended(0, -9), *ends])
    hear("all train again", (each for rank in every for each in (Begun(rank), Updated(rank))))
    assert head.core.entry == 1
    print(f"{told[0] / 1e6:.1f} MB of orders")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--tensors", type=int, default=1000, help="of each rank; 0: no checkpoint")
    parser.add_argument("--one-rank", type=int, default=100_000, help="tensors of one rank, to be encoded")
    parser.add_argument("--dir", type=Path, help="where the parts are made; default: a temporary directory")
    arguments = parser.parse_args()
    print(f"a bare loop in Python: another thread waits for up to {bare_pause() * 1000:.0f} ms")
    print(f"before: {peak_mib():.0f} MiB of memory")
    with tempfile.TemporaryDirectory(dir=arguments.dir) as directory:
        if arguments.tensors:
            measure(arguments.ranks, arguments.tensors, Path(directory))
        at_rest(arguments.ranks)
        one_host(arguments.ranks, Path(directory))
        mass_death(arguments.ranks, arguments.ranks // 2, Path(directory))
    recover(arguments.ranks)
    print(f"\none rank with {arguments.one_rank} tensors:")
    for what, found in zip(("its file's header", "its part.json"), encode_one_rank(arguments.one_rank), strict=True):
        line(what, found)
        print(f"{'':<52}budget for the pause {PAUSE_BUDGET_S * 1000:.0f} ms: {verdict(found.pause_s, PAUSE_BUDGET_S)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
