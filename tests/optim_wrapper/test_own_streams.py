"""Random generators of the user's own: all are found, what is taken is put back by its place, and the rest is named."""

from __future__ import annotations

import functools
import random
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.quasirandom import SobolEngine
from torch.utils.data import DataLoader, Dataset

from lastwords.errors import MismatchError
from lastwords.optim_wrapper.capture.rank_local import BoxRecorder, RngCapture, regions
from lastwords.optim_wrapper.streams import generator_search, own_streams, places
from lastwords.optim_wrapper.streams.generator_search import search
from lastwords.optim_wrapper.streams.generator_states import kind_of, stream_of
from lastwords.optim_wrapper.streams.own_streams import OwnStreams
from lastwords.processor.black_box import BlackBox, BoxLayout, RegionCopy
from lastwords.processor.box_reader import BoxReader
from tests import golden
from tests.ledgers import told

GLOBAL = np.random.default_rng(11)
HERE = __name__


def augment() -> float:
    """Uses a global of this module."""
    return float(GLOBAL.random())


class Noisy(Dataset[Any]):
    """Calls what uses a global."""

    of_class = random.Random(12)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> float:
        return augment() + self.of_class.random()


class Module(nn.Module):
    """A module that keeps a generator."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        self.inner[1].noise = torch.Generator()


def names(**roots: Any) -> set[str]:
    return set(search(roots, frames=False))


# --------------------------------------------------------------------------- the search


def test_attributes_containers_closures_defaults_and_globals_are_searched() -> None:
    in_closure, in_default = np.random.default_rng(1), np.random.RandomState(1)

    def used(stream: Any = in_default) -> float:
        return float(in_closure.random() + stream.rand())

    class Slotted:
        __slots__ = ("rng",)

        def __init__(self) -> None:
            self.rng = random.Random(1)

        def method(self) -> None:
            """Bound below."""

    owner = type("Owner", (), {})()
    owner.steps = [{"a": (torch.Generator(),)}, Slotted().method, functools.partial(print, np.random.PCG64(1))]
    owner.call = used
    owner.data = Noisy()
    owner.seeds, owner.points = np.random.SeedSequence(1), SobolEngine(2)
    assert names(owner=owner, model=Module()) == {
        "owner.steps[0]['a'][0]",
        "owner.steps[1].__self__.rng",
        "owner.steps[2].args[0]",
        "owner.call.in_closure",
        "owner.call.__defaults__[0]",
        "owner.seeds",
        "owner.points",
        "model.inner.1.noise",
        f"{HERE}.Noisy.of_class",
        f"{HERE}.GLOBAL",
    }


class Batch:
    """Held by one local variable."""


def outer() -> tuple[dict[str, Any], list[bool], bool]:
    """A loop with a batch that it lets go of. Without assertions: what pytest makes of those asks for `locals()`."""
    rng = {"mine": np.random.default_rng(1)}
    batch: Any = Batch()

    def inner() -> tuple[dict[str, Any], list[bool]]:
        own = torch.Generator()
        found = search({})
        return {name: generator for name, (_, generator) in found.items()}, [
            place.now() is generator is not None for place, generator in found.values() if own
        ]

    found, same = inner()
    gone = weakref.ref(batch)
    batch = None
    return found | rng, same, gone() is None


def test_the_local_variables_of_the_functions_on_the_stack_are_searched_and_left_alone() -> None:
    found, same, gone = outer()
    assert {f"{HERE}.outer.rng['mine']", f"{HERE}.outer.<locals>.inner.own"} <= found.keys()
    assert found[f"{HERE}.outer.rng['mine']"] is found["mine"]
    assert all(same)
    assert gone, "the search keeps no variable alive"


def with_a_dict_of_its_locals() -> tuple[bool, bool]:
    """Whether its generator is found, and whether the dict is what it was."""
    rng = np.random.default_rng(1)
    config = locals()
    before = dict(config)
    names_found = list(search({}))
    return any(name.endswith(".rng") for name in names_found), config == before or rng is None


def test_a_function_that_may_have_its_locals_as_a_dict_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert with_a_dict_of_its_locals() == (False, True)
    if sys.version_info < (3, 13):
        monkeypatch.setattr(places, "_may_show_locals", lambda code: False)
        assert with_a_dict_of_its_locals() == (True, False), "the control: the dict is written into"


def test_code_of_the_library_is_not_followed_and_nothing_of_the_users_is_run() -> None:
    class Trap:
        @property
        def rng(self) -> Any:
            raise AssertionError("a property was run")

        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"{name} was asked for")

        def __eq__(self, other: object) -> bool:
            raise AssertionError("compared")

        __hash__ = None  # type: ignore[assignment]
        __class__ = property(__getattr__)  # type: ignore[assignment,arg-type]

    assert names(trap=Trap(), library=[random, np.random, torch], loader=DataLoader([1, 2])) == set()


def test_hooks_of_parameters_are_searched() -> None:
    def hook_of(rng: torch.Generator) -> Any:
        return lambda gradient: gradient + torch.randn(gradient.shape, generator=rng)

    model = torch.nn.Linear(2, 1)
    model.weight.register_hook(hook_of(torch.Generator()))
    model.bias.register_post_accumulate_grad_hook(hook_of(torch.Generator()))
    found = sorted(search({"model": model}, frames=False))
    assert [name.partition("[")[0] for name in found] == [
        "model.bias._post_accumulate_grad_hooks",
        "model.weight._backward_hooks",
    ]


def test_what_is_saved_with_the_optimizer_is_left_to_that_and_the_rest_of_it_is_searched() -> None:
    optimizer = torch.optim.SGD(Module().parameters(), 0.1)
    optimizer.param_groups[0]["noise"] = random.Random(1)
    optimizer.state["by name"] = {"noise": random.Random(1)}  # type: ignore[index]
    optimizer.noise = random.Random(1)  # type: ignore[attr-defined]
    assert names(it=optimizer) == {"it.noise"}


# --------------------------------------------------------------------------- states

MAKE: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.Generator().manual_seed(3),
    "python": lambda: random.Random(3),
    "legacy": lambda: np.random.RandomState(3),
    "PCG64": lambda: np.random.default_rng(3),
    **{
        name: functools.partial(lambda name: np.random.Generator(getattr(np.random, name)(3)), name)
        for name in ("PCG64DXSM", "MT19937", "Philox", "SFC64")
    },
    "bits": lambda: np.random.PCG64(3),
    "seeds": lambda: np.random.SeedSequence(3),
    "points": lambda: SobolEngine(3, scramble=True, seed=3),
}


def draw(generator: Any) -> list[Any]:
    """What comes next, of each kind that leaves something behind for the draw after."""
    if isinstance(generator, torch.Generator):
        return [*torch.rand(3, generator=generator).tolist(), torch.randn((), generator=generator).item()]
    if isinstance(generator, random.Random):
        return [generator.random(), generator.gauss(0, 1)]
    if isinstance(generator, np.random.RandomState):
        return [generator.rand(), generator.randn()]
    if isinstance(generator, np.random.BitGenerator):
        return [generator.random_raw()]
    if isinstance(generator, np.random.SeedSequence):
        return generator.spawn(1)[0].generate_state(2).tolist()  # type: ignore[no-any-return]
    if isinstance(generator, SobolEngine):
        return generator.draw(2).tolist()  # type: ignore[no-any-return]
    numbers = [generator.normal(), generator.integers(9, dtype=np.int32), generator.spawn(1)[0].random()]
    return [float(number) for number in numbers]


@pytest.mark.parametrize("kind", MAKE)
def test_every_kind_of_generator_goes_on_in_another_process_where_it_was_taken(kind: str) -> None:
    generator = MAKE[kind]()
    stream = stream_of(generator)
    assert stream is not None
    taken = bytearray(stream.region.nbytes)
    take = stream.into(memoryview(taken))
    for _ in range(3):
        draw(generator)
        take()
        expected = draw(generator)
        again = MAKE[kind]()
        assert draw(again) != expected, "the control"
        again = MAKE[kind]()
        stream_again = stream_of(again)
        assert stream_again is not None
        stream_again.restore(taken)
        assert draw(again) == expected


def test_a_state_that_cannot_be_had_is_said() -> None:
    class Own(random.Random):
        def getstate(self) -> Any:
            raise NotImplementedError

    streams = OwnStreams({"it": Own()})
    streams.look()
    assert "it" not in streams.names
    golden.says(told(streams))


def test_a_seed_sequence_that_is_further_on_than_the_saved_one_is_refused() -> None:
    seeds = np.random.SeedSequence(1)
    seeds.spawn(3)
    stream = stream_of(seeds)
    assert stream is not None
    with golden.raises(MismatchError):
        stream.restore((2).to_bytes(8, "little"))


# --------------------------------------------------------------------------- captured, and put back by place


class Program:
    """What holds the generators of a run."""

    def __init__(self) -> None:
        self.rng: Any = np.random.default_rng(5)


class Job:
    """The box of a rank, written at each step's end as `StepRecorder` does it."""

    def __init__(self, tmp_path: Path, program: Program) -> None:
        self.program = program
        self.own = OwnStreams({"program": program}, [GLOBAL, Noisy.of_class])
        self.capture = RngCapture(own=self.own)
        self.own.look()
        box = BlackBox.create(tmp_path / "rank_0.box", BoxLayout(regions((self.capture,))))
        self.box = BoxRecorder(box, (self.capture,))
        self.step = 0
        self.box.committed(0, b"{}")

    def end(self, *, look: bool = False) -> None:
        self.step += 1
        same = not self.own.end_step(look=look)
        self.box.committed(self.step, b"{}", comparable=same)

    def saved(self) -> dict[str, RegionCopy]:
        with BoxReader(self.box.box.path) as reader:
            copy = reader.read(self.step)
        assert copy is not None
        return dict(copy.regions)

    def trust(self) -> bool:
        with BoxReader(self.box.box.path) as reader:
            return reader.tentative_trust()[0]

    def resume(self, program: Program) -> list[str]:
        """Reasons of a new process that has this program."""
        own = OwnStreams({"program": program}, [GLOBAL, Noisy.of_class])
        return [*RngCapture(own=own).restore(self.saved()), *own.left_over()]


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    """Without the stack, on which both processes are here."""
    for module in (generator_search, own_streams):
        monkeypatch.setattr(module, "user_frames", list)
    return Job(tmp_path, Program())


def test_a_generator_is_captured_at_each_steps_end_and_goes_on_in_a_new_process(job: Job) -> None:
    for _ in range(3):
        job.program.rng.random()
        job.end()
        expected = job.program.rng.random()
    again = Program()
    assert job.resume(again) == []
    assert again.rng.random() == expected
    assert Program().rng.random() != expected, "the control"


def test_one_that_is_made_late_is_captured_from_the_next_look_on(job: Job) -> None:
    job.end(look=True)
    job.program.late = random.Random(4)  # type: ignore[attr-defined]
    job.box.tentative(job.step + 1)
    job.end(look=True)
    assert job.own.names == ("program.rng", "program.late")
    assert job.trust(), "the copy before lacks it, which is no difference of the states"
    expected = job.program.late.random()  # type: ignore[attr-defined]
    again = Program()
    again.late = random.Random(9)  # type: ignore[attr-defined]
    assert job.resume(again) == []
    assert again.late.random() == expected  # type: ignore[attr-defined]


def test_what_lies_at_the_place_at_a_steps_end_is_captured_whichever_object_it_is(job: Job) -> None:
    """A loop that makes its generator anew in each epoch, and draws from it in every step."""
    job.program.rng.random()
    job.end()
    job.program.rng = np.random.default_rng(6)
    job.program.rng.random()
    job.end()
    expected = job.program.rng.random()
    again = Program()
    assert job.resume(again) == []
    assert again.rng.random() == expected


def test_one_that_is_made_anew_in_each_step_is_no_state(job: Job) -> None:
    for step in range(1, 10):
        job.program.passing = torch.Generator().manual_seed(step)  # type: ignore[attr-defined]
        torch.rand(2, generator=job.program.passing)  # type: ignore[attr-defined]
        job.box.tentative(job.step + 1)
        job.end(look=step & (step - 1) == 0)
        assert ("program.passing" in job.own.names) is (step == 1), "it is not known yet whether the next step reads it"
    assert job.resume(Program()) == []
    assert job.trust()


def test_one_that_stays_after_all_is_captured(job: Job) -> None:
    for step in range(1, 11):
        if step <= 3:
            job.program.passing = np.random.default_rng(step)  # type: ignore[attr-defined]
        job.program.passing.random()  # type: ignore[attr-defined]
        job.end(look=step & (step - 1) == 0)
        assert ("program.passing" in job.own.names) is (step in (1, 5, 6, 7, 8, 9, 10))


def test_what_is_drawn_in_the_next_step_before_it_is_made_anew_is_state(job: Job) -> None:
    """rng = default_rng(rng.integers(...)): each is another object, and hangs on the one before."""
    job.program.chained = np.random.default_rng(1)  # type: ignore[attr-defined]
    job.end(look=True)
    for _ in range(3):
        job.program.chained = np.random.default_rng(job.program.chained.integers(1 << 30))  # type: ignore[attr-defined]
        job.end()
        assert "program.chained" in job.own.names


def test_what_is_here_or_in_the_checkpoint_alone_is_named(job: Job) -> None:
    job.program.rng = None
    job.program.gone = random.Random(1)  # type: ignore[attr-defined]
    job.end(look=True)
    assert job.own.names == ("program.gone",)
    missing, unsaved = job.resume(Program())
    assert missing.startswith("the random generator program.gone was saved but does not exist when the loop begins")
    assert unsaved == "the random generator program.rng is not in the checkpoint, and starts from its initial state"


def test_one_in_a_function_that_is_not_being_run_any_more_is_not_missed() -> None:
    """Where the loop fetches its data in such a function, no look at the end of a step has ever found it."""
    own = OwnStreams({})

    def sets_the_data_back() -> list[str]:
        order = random.Random(3)
        own.restore({})
        assert order.random()
        return own.left_over()

    golden.says(reason for reason in sets_the_data_back() if ".order " in reason)
    assert not any(".order " in reason for reason in own.left_over())  # pytest's own frames may hold others


def test_another_kind_at_the_same_place_is_named(job: Job) -> None:
    again = Program()
    again.rng = random.Random(1)
    [reason] = job.resume(again)
    golden.says(reason)
    job.program.rng = random.Random(1)
    job.end()
    golden.says(reason for reason in told(job.own) if "program.rng" in reason)
    assert "program.rng" not in job.own.names


def test_more_late_ones_than_there_is_room_for_are_named(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generator_search, "_ITEMS_MAX", 64)
    job.program.many = [random.Random(n) for n in range(own_streams._SPARE_REGIONS + 1)]  # type: ignore[attr-defined]
    job.end(look=True)
    [reason] = told(job.own)
    assert reason.endswith(f"program.many[{own_streams._SPARE_REGIONS}], which was created after the start")


def test_kinds_have_names() -> None:
    assert kind_of(np.random.SeedSequence(1)).endswith("SeedSequence")
    assert kind_of(np.random.RandomState(1)) == "numpy.random.RandomState"
