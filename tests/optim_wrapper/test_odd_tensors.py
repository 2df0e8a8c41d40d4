"""Tensors of every odd kind, wherever they turn up: refused at the start, or left out with a reason; never a crash."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lastwords.errors import ConfigError
from lastwords.optim_wrapper.capture.recorder import StepRecorder
from lastwords.optim_wrapper.launch.world import World, next_prefix
from lastwords.optim_wrapper.resume.state_restore import RestorePlan
from lastwords.optim_wrapper.state.state_view import UnitView
from lastwords.optim_wrapper.wrapper import OptTFTWrapper
from lastwords.sharding.verify import digest_units
from lastwords.vocabulary import UNIT_REPLICATED, Phase, Stand
from tests.ledgers import told
from tests.selection import usually


class Wrapped(torch.Tensor):
    """A tensor of a class of its own, around another one."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Every function computes on what is inside."""

        def bare(value: Any) -> Any:
            return value.inner if isinstance(value, Wrapped) else value

        found = func(*map(bare, args), **{key: bare(value) for key, value in (kwargs or {}).items()})
        return Wrapped(found) if isinstance(found, torch.Tensor) else found


def freed() -> torch.Tensor:
    tensor = torch.ones(3)
    tensor.untyped_storage().resize_(0)
    return tensor


ODD: dict[str, Callable[[], torch.Tensor]] = {
    "coo": lambda: torch.eye(3).to_sparse(),
    "csr": lambda: torch.eye(3).to_sparse_csr(),
    "meta": lambda: torch.ones(3, device="meta"),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "own class": lambda: Wrapped(torch.ones(3)),
    "lazy": lambda: nn.UninitializedBuffer(),
    "freed": freed,
    "conjugate": lambda: torch.ones(3, dtype=torch.complex64).conj(),
    "negative": lambda: torch.ones(3, dtype=torch.complex64).conj().imag,
    "expanded": lambda: torch.ones(1).expand(3),
    "empty": lambda: torch.empty(0, 3),
    "complex32": lambda: torch.ones(3, dtype=torch.complex64).to(torch.complex32),
    "float8": lambda: torch.ones(3).to(torch.float8_e4m3fn),
    "float8 exponents": lambda: torch.ones(3).to(torch.float8_e8m0fnu),
    "bits": lambda: torch.ones(4, dtype=torch.uint8).view(torch.bits8),
    "small integers": lambda: torch.empty(4, dtype=torch.uint4) if hasattr(torch, "uint4") else torch.empty(0),
    "inference": lambda: torch.inference_mode()(lambda: torch.ones(3))(),
}
UNSAVED = {"meta", "own class", "nested", "jagged", "quantized", "freed", "lazy"}
USUAL = ("coo", "nested", "own class", "lazy", "freed", "expanded", "quantized")


class Counting(torch.optim.SGD):
    """Its state_dict() gives out one more thing."""

    extra: Any = None

    def state_dict(self) -> dict[str, Any]:
        """With it."""
        return {**super().state_dict(), "extra": self.extra}


class Telling(nn.Linear):
    """It gives out a state of its own."""

    extra: Any = None

    def get_extra_state(self) -> Any:
        return {"extra": self.extra}

    def set_extra_state(self, state: Any) -> None:
        self.extra = state["extra"]


class Job:
    def __init__(self, folder: Path, place: str = "", odd: torch.Tensor | None = None) -> None:
        self.model = nn.Sequential(Telling(4, 3), nn.Linear(3, 2))
        self.inner = Counting(self.model.parameters(), lr=0.1, momentum=0.9)
        self.extras: dict[str, Any] = {"mine": 1}
        if odd is not None:
            self.put(place, odd)
        wrapper = OptTFTWrapper(self.inner)
        self.recorder = StepRecorder(self.model, [wrapper], {"e": self.extras}, {"l": self.extras})
        units = self.recorder.agree_units(World(), next_prefix(), ())
        self.source = self.recorder.make_source(lambda rank: folder / "box", lambda step: {})
        self.recorder.open(folder / "box")
        digest_units(units.views.values())
        self.recorder.begin(0, None)
        self.done = 0

    def put(self, place: str, odd: torch.Tensor) -> None:
        first = self.model[0]
        if place == "parameter":
            first._parameters["odd"] = odd  # type: ignore[assignment]
        elif place == "buffer":
            first._buffers["odd"] = odd
        elif place == "state":
            self.inner.state[first.weight]["odd"] = odd  # type: ignore[index]
        elif place == "group":
            self.inner.param_groups[0]["odd"] = odd
        elif place == "extras":
            self.extras["odd"] = odd
        elif place == "attribute":
            self.inner.odd = odd  # type: ignore[attr-defined]
        elif place == "state_dict":
            self.inner.extra = odd
        else:
            vars(first)["extra"] = odd

    def step(self) -> None:
        for parameter in self.model.parameters():
            if parameter.grad is None and parameter.requires_grad and parameter.is_leaf and parameter.numel() > 5:
                parameter.grad = torch.ones(parameter.shape)
        self.recorder.tentative()
        super(Counting, self.inner).step()
        self.recorder.watch.end_update()
        self.done += 1
        self.recorder.end_step(self.done, None)

    def save(self) -> list[str]:
        state = self.source.unit_state(UNIT_REPLICATED, self.done, Stand(Phase.COMPUTING, self.done))
        for _, content in state.tensors:
            bytes(content() if callable(content) else content)
        local = self.source.local_states([0], self.done)[0]
        return [*state.meta.reasons, *map(str, local.reasons)]


PLACES = ("buffer", "state", "group", "extras", "attribute", "state_dict", "extra_state")


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    warnings.simplefilter("ignore")


@pytest.mark.ci
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", ODD)
def test_what_comes_while_training_is_saved_or_named_and_everything_else_is_saved(
    tmp_path: Path, kind: str, place: str
) -> None:
    job = Job(tmp_path)
    job.step()
    job.put(place, ODD[kind]())
    for _ in range(3):
        job.step()
        job.save()
    reasons = [*job.save(), *told(job.recorder)]
    on_a_resume = place == "attribute" or (place == "buffer" and kind in ("nested", "quantized"))
    if kind in ("meta", "own class", "nested", "quantized", "freed", "lazy") and not on_a_resume:
        assert any("odd" in reason or "extra" in reason for reason in reasons), reasons


def plain(tensor: Any) -> torch.Tensor:
    """Its values, which can be compared."""
    dense = tensor.to_dense() if tensor.layout != torch.strided else tensor
    return dense.resolve_conj().resolve_neg().contiguous().view(torch.uint8)


@pytest.mark.ci
@pytest.mark.parametrize("place", ["buffer", "state"])
@pytest.mark.parametrize("kind", sorted(ODD.keys() - UNSAVED))
def test_what_is_saved_comes_back(tmp_path: Path, kind: str, place: str) -> None:
    """Into a new process, which has it at the start (a buffer) or not yet (optimizer state)."""
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    job, again = map(Job, folders)
    if place == "buffer" and kind in ("coo", "csr"):
        pytest.skip("left to the new process, and compared there")
    if place == "buffer":
        again.put(place, torch.zeros_like(ODD[kind]()))
    job.put(place, odd := ODD[kind]())
    job.step()
    view = UnitView(job.model, job.inner)
    state = view.state()
    assert state.meta.reasons == []
    plan = RestorePlan(UnitView(again.model, again.inner), [spec for spec, _ in state.tensors], state.meta)
    for spec, source in state.tensors:
        plan.into(spec)[:] = source() if callable(source) else source
    plan.commit()
    first = again.model[0]
    found = first._buffers["odd"] if place == "buffer" else again.inner.state[first.weight]["odd"]
    assert (found.dtype, found.shape, found.layout) == (odd.dtype, odd.shape, odd.layout)
    assert torch.equal(plain(found), plain(odd))


@pytest.mark.ci
@pytest.mark.parametrize("place", ["group", "extras", "state_dict", "extra_state"])
@pytest.mark.parametrize("kind", usually(ODD, USUAL))
def test_what_takes_the_place_of_a_plain_tensor_stops_no_step(tmp_path: Path, kind: str, place: str) -> None:
    job = Job(tmp_path, place, torch.ones(3))
    job.step()
    job.step()
    job.put(place, ODD[kind]())
    for _ in range(2):
        job.step()
        job.save()


@pytest.mark.ci
@pytest.mark.parametrize("place", sorted({*PLACES, "parameter"} - {"state"}))
@pytest.mark.parametrize("kind", usually(ODD, USUAL))
def test_what_is_there_at_the_start_is_refused_or_trains(tmp_path: Path, kind: str, place: str) -> None:
    try:
        job = Job(tmp_path, place, ODD[kind]())
    except ConfigError as error:
        said = str(error)
    else:
        said = "odd"
        for _ in range(3):
            job.step()
            job.save()
    assert "odd" in said


@pytest.mark.parametrize("kind", ["coo", "meta", "own class", "freed"])
def test_a_weight_that_becomes_odd_stops_no_step_and_is_named_when_it_should_be_saved(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Weights are never left out of what is saved; so this rank cannot write, and says why before it has to."""
    job = Job(tmp_path)
    job.step()
    job.put("parameter", ODD[kind]())
    job.step()
    with pytest.raises(ConfigError):
        job.save()
