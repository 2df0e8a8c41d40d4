"""Random generators of the user's own: all are found, and what is taken is put back by the place that they lie at."""

from __future__ import annotations

import functools
import os
import random
import subprocess
import sys
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.quasirandom import SobolEngine
from torch.utils.data import DataLoader, Dataset, RandomSampler

from lastwords.checkpoint.meta import StepDocument
from lastwords.optim_wrapper.state import generators, object_walk, running
from lastwords.optim_wrapper.state.attributes import Attributes, differing, saved_in
from lastwords.optim_wrapper.state.generators import Generators, kind_of, state_of
from lastwords.optim_wrapper.state.object_walk import Beyond, Walk
from lastwords.optim_wrapper.state.running import shows_locals
from tests import golden
from tests.ledgers import told
from tests.optim_wrapper.test_attributes import everything

GLOBAL = np.random.default_rng(11)


class Noisy(Dataset[Any]):
    """Draws from an attribute of the class."""

    of_class = random.Random(12)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> float:
        return float(GLOBAL.random()) + self.of_class.random()


class Env:
    """Keeps one, and runs nothing when it is looked at."""

    def __init__(self, rng: Any) -> None:
        self.rng = rng

    def draw(self) -> float:
        raise AssertionError("the user's code was run")

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was asked for")


def closing_over(rng: Any) -> Any:
    return lambda x: x + rng.random()


def with_default(rng: Any) -> Any:
    def noise(x: Any, rng: Any = rng, *, other: Any = 1) -> Any:
        return x + rng.random() + other

    return noise


def decorated(rng: Any) -> Any:
    @torch.no_grad()
    def update() -> float:
        return float(rng.random())

    return update


def hooked(rng: Any) -> Any:
    module = nn.Linear(1, 1)
    module.register_forward_hook(lambda *_: rng.random() and None)
    return module


PLACES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "attribute": (Env, "it.held.rng"),
    "list": (lambda rng: [None, rng], "it.held[1]"),
    "tuple": (lambda rng: (rng,), "it.held[0]"),
    "deque": (lambda rng: deque([rng]), "it.held[0]"),
    "dict": (lambda rng: OrderedDict(a={"b": rng}), "it.held['a']['b']"),
    "closure": (closing_over, "it.held.rng"),
    "default": (with_default, "it.held.__defaults__[0]"),
    "decorated": (decorated, "it.held.func.rng"),
    "bound method": (lambda rng: Env(rng).draw, "it.held.__self__.rng"),
    "bound method of its own": (lambda rng: rng.random, "it.held.__self__"),
    "partial": (lambda rng: functools.partial(print, sep=rng), "it.held.keywords['sep']"),
    "method in a partial": (lambda rng: functools.partial(Env(rng).draw, 1), "it.held.func.__self__.rng"),
    "wrapped": (lambda rng: functools.wraps(closing_over(rng))(lambda: 0), "it.held.__wrapped__.rng"),
    "hook of a module": (hooked, "it.held._forward_hooks[0].rng"),
}  # fmt: skip


class Holder:
    """An object of a job."""

    def __init__(self, held: Any) -> None:
        self.held = held


def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the stack and the modules, which are those of the tests."""
    monkeypatch.setattr(object_walk, "user_frames", list)
    monkeypatch.setattr(object_walk, "user_modules", lambda: ())


@pytest.fixture
def by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    alone(monkeypatch)


def looked(walk: Walk) -> dict[str, Any]:
    return {**walk.generators, **Beyond(walk, {}).generators}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.usefixtures("by_itself")
def test_it_is_found_where_it_lies_and_found_there_again(place: str) -> None:
    hold, path = PLACES[place]
    rng = random.Random(1)
    walk = Walk({"it": Holder(hold(rng))}, {})
    path = path.replace("hooks[0]", f"hooks[{next(iter(hooked_keys(walk)), 0)}]")
    assert looked(walk) == {path: rng}


def hooked_keys(walk: Walk) -> list[int]:
    return [key for one in walk.objects.values() if isinstance(one, nn.Module) for key in one._forward_hooks]


SCRIPT = """
from tests.optim_wrapper import test_generators as here
here.object_walk.user_frames, here.object_walk.user_modules = list, lambda: ()
for name, (hold, _) in here.PLACES.items():
    print(name, *here.looked(here.Walk({"it": here.Holder(hold(here.random.Random(1)))}, {})))
"""


@pytest.mark.ci
def test_the_names_are_the_same_in_every_process() -> None:
    def names(seed: str) -> str:
        done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=Path(__file__).parents[2], check=True, text=True,
                              capture_output=True, env={**os.environ, "PYTHONHASHSEED": seed})  # fmt: skip
        return done.stdout

    assert names("1") == names("2") != ""


def test_those_of_the_loader_of_classes_and_of_modules_are_found() -> None:
    data = Noisy()
    loader = DataLoader(data, sampler=RandomSampler(data, generator=torch.Generator()), generator=torch.Generator())
    walk = Walk({"loader": loader}, {})
    assert walk.generators.keys() == {"loader.sampler.generator", "loader.generator"}
    found = Beyond(walk, {"extras['env']": Env(random.Random(1))}).generators
    assert found.keys() >= {f"{__name__}.Noisy.of_class", f"{__name__}.GLOBAL", "extras['env'].rng"}
    assert found[f"{__name__}.GLOBAL"] is GLOBAL
    assert found[f"{__name__}.Noisy.of_class"] is Noisy.of_class
    assert not any("torch." in path.partition("'")[0] for path in found)


class Batch:
    """Held by one local variable."""


def outer() -> tuple[dict[str, Any], list[Any], bool]:
    """A loop with a batch that it lets go of. Without assertions: what pytest makes of those asks for `locals()`."""
    rng = {"mine": np.random.default_rng(1)}
    batch: Any = Batch()

    def inner() -> dict[str, Any]:
        own = torch.Generator()
        beyond = Beyond(Walk({}, {}), {})
        found = beyond.generators
        part = beyond.part(beyond.way_to([beyond.origin(path) for path in found])).generators
        mine = [path for path in found if ".outer." in path]
        return {path: (found[path], part[path]) for path in mine} if own else {}

    found = inner()
    gone = weakref.ref(batch)
    batch = None
    same = [found[f"{__name__}.outer.rng['mine']"][1] is rng["mine"], *(one is now for one, now in found.values())]
    return found, same, gone() is None


def test_the_local_variables_of_the_functions_on_the_stack_are_searched_and_left_alone() -> None:
    found, same, gone = outer()
    assert f"{__name__}.outer.<locals>.inner.own" in found
    assert all(same)
    assert gone, "the search keeps no variable alive"


def found_in(place: str) -> bool:
    """Whether the generator in the variable `rng` of this function is found."""
    return any(path.endswith(f"{place}.rng") for path in Beyond(Walk({}, {}), {}).generators)


def with_a_dict_of_its_locals() -> tuple[bool, bool]:
    """Whether its generator is found, and whether the dict is what it was."""
    rng = np.random.default_rng(1)
    config = locals()
    before = dict(config)
    return found_in("with_a_dict_of_its_locals"), config == before or rng is None


def with_a_dict_of_its_vars() -> tuple[bool, bool]:
    rng = np.random.default_rng(1)
    config = vars()
    before = dict(config)
    return found_in("with_a_dict_of_its_vars"), config == before or rng is None


@pytest.mark.parametrize("function", [with_a_dict_of_its_locals, with_a_dict_of_its_vars])
def test_a_function_that_may_have_its_locals_as_a_dict_is_left_alone_and_it_is_told(
    function: Callable[[], tuple[bool, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert shows_locals(function.__code__) is (sys.version_info < (3, 13))
    assert function() == (sys.version_info >= (3, 13), True)
    if sys.version_info < (3, 13):
        monkeypatch.setattr(running, "shows_locals", lambda code: False)
        assert function() == (True, False), "the control: the dict is written into"


def with_other_dicts(options: Holder) -> tuple[bool, dict[str, Any]]:
    rng = np.random.default_rng(1)
    made: dict[str, Any] = {}
    exec("kept = 5")
    config = [vars(options), dir(options), eval("1 + 1"), rng is made]
    found = found_in("with_other_dicts")
    return found and bool(config), {"kept": eval("kept")}


def test_the_dict_of_an_object_is_another_thing_and_what_exec_has_made_stays() -> None:
    """`wandb.init(config=vars(args))`: the loop's own function, and nothing of it was looked at, unsaid."""
    assert with_other_dicts(Holder([])) == (True, {"kept": 5})


@pytest.mark.usefixtures("by_itself")
def test_streams_of_libraries_are_none_of_the_users() -> None:
    held = [
        torch.default_generator,
        random._inst,
        np.random.mtrand._rand,
        random.gauss,
        np.random.normal,
        torch,
        random,
    ]  # type: ignore[attr-defined]
    assert looked(Walk({"it": Holder(held)}, {})) == {}


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
    numbers = [generator.normal(), generator.integers(9, dtype=np.int32), generator.spawn(1)[0].random()]
    return [float(number) for number in numbers]


@pytest.mark.parametrize("kind", MAKE)
def test_every_kind_of_generator_goes_on_in_another_process_where_it_was_taken(kind: str) -> None:
    generator = MAKE[kind]()
    state = state_of(generator)
    assert state is not None
    for _ in range(3):
        draw(generator)
        taken = state.read()
        expected = draw(generator)
        again = MAKE[kind]()
        assert draw(again) != expected, "the control"
        again = MAKE[kind]()
        state_again = state_of(again)
        assert state_again is not None
        state_again.put(taken)
        assert draw(again) == expected


@pytest.mark.usefixtures("by_itself")
def test_torchs_quasirandom_engine_is_an_object_with_attributes() -> None:
    engine, again = (Holder(SobolEngine(3, scramble=True, seed=3)) for _ in range(2))
    watch, new = (watched(one) for one in (engine, again))
    engine.held.draw(5)
    watch.look()
    expected = engine.held.draw(2)
    engine.held.reset()
    engine.held.fast_forward(5)
    watch.look()
    assert new.restore(everything(watch)) == []
    assert torch.equal(again.held.draw(2), expected)


def test_kinds_have_names() -> None:
    assert kind_of(np.random.SeedSequence(1)).endswith("SeedSequence")
    assert kind_of(np.random.RandomState(1)) == "numpy.random.RandomState"


# --------------------------------------------------------------------------- captured, and put back by place


def watched(one: Any) -> Attributes:
    watch = Attributes({"it": one}, dict)
    watch.begin()
    return watch


class Job:
    """What `StepRecorder` does at the ends of steps."""

    def __init__(self) -> None:
        self.program = Holder(np.random.default_rng(5))
        self.watch = watched(self.program)
        self.document = self.watch.document()

    def end(self, *, look: bool = False) -> None:
        self.watch.end_step()
        if look:
            self.watch.look(beyond=True)
        self.document = self.watch.document()

    @property
    def names(self) -> list[str]:
        return self.watch.generators.names

    def resume(self, program: Any) -> list[str]:
        """Reasons of a new process that has this program."""
        new = watched(program)
        stored = saved_in(StepDocument(**self.document), "x")
        return [*new.restore(stored._replace(values={})), *new.generators.left_over()]


@pytest.fixture
def job(by_itself: None) -> Job:
    return Job()


def fresh() -> Any:
    return Holder(np.random.default_rng(5))


def test_a_generator_is_captured_at_each_steps_end_and_goes_on_in_a_new_process(job: Job) -> None:
    for _ in range(3):
        job.program.held.random()
        job.end()
        expected = job.program.held.random()
    again = fresh()
    rng = again.held
    assert job.resume(again) == []
    assert again.held is rng
    assert rng.random() == expected
    assert fresh().held.random() != expected, "the control"


def test_one_that_has_drawn_since_its_copy_is_told_in_an_incident_and_one_that_has_come(job: Job) -> None:
    assert job.watch.generators.drawn() == ""
    job.program.held.random()
    assert job.watch.generators.drawn() == "it.held"
    before = job.document
    job.end()
    assert differing(before, job.document) == "it.held"
    assert job.watch.generators.drawn() == ""
    job.program.late = random.Random(4)
    assert job.watch.unseen() == ["it.late"]
    job.end(look=True)
    assert job.watch.unseen() == []


def test_one_that_is_made_late_is_captured_from_the_next_look_on(job: Job) -> None:
    job.end(look=True)
    job.program.late = random.Random(4)
    job.end(look=True)
    assert job.names == ["it.held", "it.late"]
    expected = job.program.late.random()
    again = fresh()
    again.late = random.Random(9)
    assert job.resume(again) == []
    assert again.late.random() == expected


def test_what_lies_at_the_place_at_a_steps_end_is_captured_whichever_object_it_is(job: Job) -> None:
    """A loop that makes its generator anew in each epoch, and draws from it in every step."""
    job.program.held.random()
    job.end()
    job.program.held = np.random.default_rng(6)
    job.program.held.random()
    job.end()
    expected = job.program.held.random()
    again = fresh()
    assert job.resume(again) == []
    assert again.held.random() == expected


def test_one_that_is_made_anew_in_each_step_is_no_state(job: Job) -> None:
    for step in range(1, 10):
        job.program.passing = torch.Generator().manual_seed(step)
        torch.rand(2, generator=job.program.passing)
        job.end(look=step & (step - 1) == 0)
        assert ("it.passing" in job.names) is (step == 1), "it is not known yet whether the next step reads it"
    assert job.resume(fresh()) == []
    assert job.watch.generators.unseen(Walk({"it": job.program}, {})) == []


def test_one_that_stays_after_all_is_captured(job: Job) -> None:
    for step in range(1, 11):
        if step <= 3:
            job.program.passing = np.random.default_rng(step)
        job.program.passing.random()
        job.end(look=step & (step - 1) == 0)
        assert ("it.passing" in job.names) is (step in (1, 5, 6, 7, 8, 9, 10))


def test_what_is_drawn_in_the_next_step_before_it_is_made_anew_is_state(job: Job) -> None:
    """rng = default_rng(rng.integers(...)): each is another object, and hangs on the one before."""
    job.program.chained = np.random.default_rng(1)
    job.end(look=True)
    for _ in range(3):
        job.program.chained = np.random.default_rng(job.program.chained.integers(1 << 30))
        job.end()
        assert "it.chained" in job.names


def test_what_is_here_or_in_the_checkpoint_alone_is_named(job: Job) -> None:
    job.program.held = None
    job.program.gone = random.Random(1)
    job.end(look=True)
    assert job.names == ["it.gone"]
    missing, unsaved = job.resume(fresh())
    assert missing.startswith("the random generator it.gone was saved but does not exist when the loop begins")
    assert unsaved == "the random generator it.held is not in the checkpoint, and starts from its initial state"


def test_one_in_a_function_that_is_not_being_run_any_more_is_not_missed() -> None:
    """Where the loop fetches its data in such a function, no look at the end of a step has ever found it."""
    own = Generators({})

    def sets_the_data_back() -> list[str]:
        order = random.Random(3)
        own.begin(Walk({}, {}))
        own.restore({})
        assert order.random()
        return own.left_over()

    golden.says(reason for reason in sets_the_data_back() if ".order " in reason)
    assert not any(".order " in reason for reason in own.left_over())  # pytest's own frames may hold others


def test_another_kind_at_the_same_place_is_named_and_so_is_a_state_that_cannot_be(job: Job) -> None:
    [reason] = job.resume(Holder(random.Random(1)))
    golden.says(reason)
    job.program.held = seeds = np.random.SeedSequence(1)
    seeds.spawn(2)
    job.end()
    again = Holder(np.random.SeedSequence(1))
    again.held.spawn(3)
    golden.says(job.resume(again))
    forged = [watched(Holder(make())).generators for make in MAKE.values()]
    assert all(len(one.restore({"it.held": (one._leaves["it.held"].kind, b"[1]")})) == 1 for one in forged[:-1])


def test_a_state_that_cannot_be_had_is_said(by_itself: None) -> None:
    class Own(random.Random):
        def getstate(self) -> Any:
            raise NotImplementedError

    watch = watched(Holder(Own()))
    assert watch.generators.names == []
    golden.says(told(watch))


def test_states_that_are_too_large_in_all_are_told(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generators, "BYTES_MAX", 100)
    assert job.watch.generators.document() == {}
    golden.says(told(job.watch))


def test_a_search_ends_somewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    alone(monkeypatch)
    wide = [[random.Random(n)] for n in range(900)]
    monkeypatch.setattr(object_walk, "ALL_ITEMS_MAX", 1500)
    walk = Walk({"it": Holder(wide)}, {})
    assert 100 < len(walk.generators) < 900


@pytest.mark.parametrize(
    ("names", "users"),
    [
        ({"__name__": "made_by_a_script"}, True),
        ({"__name__": "utils", "__file__": "/home/me/utils.py"}, True),
        ({"__name__": "mine", "__path__": ["/home/me/mine"]}, True),
        ({"__name__": "made_by_a_class", "__loader__": object.__new__(Noisy)}, True),
        ({"__name__": "google", "__path__": ["/usr/lib/python3/dist-packages/google"]}, False),
        ({"__name__": "_remote_module", "__loader__": torch.nn.Identity()}, False),
        ({"__name__": "_cython_3_2_4"}, False),
        ({"__name__": "cython_runtime"}, False),
    ],
)
def test_a_module_without_a_file_is_of_whoever_has_made_it(names: dict[str, Any], users: bool) -> None:
    assert running.is_of_the_user(names) is users


def test_no_module_that_torch_and_lastwords_bring_along_is_the_users() -> None:
    code = """
import lastwords.launcher.fork_server as here
from lastwords.optim_wrapper.state.running import user_modules
here._import_all()
print(*(name for name, _ in user_modules()))
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert said.stdout.split() == ["__main__"]
