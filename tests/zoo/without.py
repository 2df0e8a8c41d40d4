"""Takes a mechanism of lastwords out of this process, to show that the zoo notices."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import Any


def nothing(*_: Any, **__: Any) -> list[Any]:
    """What a mechanism finds that does not look."""
    return []


def never(*_: Any, **__: Any) -> bool:
    """Nothing has come that needs anything."""
    return False


def no_full_looks() -> None:
    """Not even in the first steps all bytes are looked at."""
    importlib.import_module("lastwords.optim_wrapper.capture.state_watch").FULL_LOOKS = 0


def unseen() -> None:
    """The witness sees no tensor move."""
    no_full_looks()
    witness = importlib.import_module("lastwords.optim_wrapper.capture.witness").Witness
    witness.moved = witness.replaced = nothing


def unsampled() -> None:
    """The witness looks at no words of the tensors, only at their memory and torch's count of writes."""
    no_full_looks()
    importlib.import_module("lastwords.optim_wrapper.capture.witness")._words_of = lambda *_: None


def uncopied() -> None:
    """What moves outside of updates is named, and not copied."""
    watch = importlib.import_module("lastwords.optim_wrapper.capture.state_watch").StateWatch
    whole = watch.__init__

    def without_copies(self: Any, *arguments: Any, **options: Any) -> None:
        whole(self, *arguments, **{**options, "copies": False})

    watch.__init__ = without_copies


def gradients_dropped() -> None:
    """Gradients that the next step goes on with are not captured."""
    importlib.import_module("lastwords.optim_wrapper.capture.carried_gradients").CarriedGradients.end_step = never


def gradients_used_up() -> None:
    """Gradients that an update has used are taken to be of no use to the next one."""
    capture = "lastwords.optim_wrapper.capture."
    importlib.import_module(f"{capture}carried_gradients").CarriedGradients._update_ended = never
    importlib.import_module(f"{capture}carried_gradients").GradientHabit.in_doubt = never


def gradients_of_no_optimizer_lost() -> None:
    """Only gradients of what an optimizer has are looked at."""
    importlib.import_module("lastwords.optim_wrapper.capture.carried_gradients").CarriedGradients._look = nothing


def gradients_of_the_frozen_lost() -> None:
    """A parameter that is frozen is taken to have no gradient."""
    gradients = importlib.import_module("lastwords.optim_wrapper.capture.carried_gradients").CarriedGradients
    whole = gradients.end_step

    def of_the_trained(self: Any, *, trained: Callable[[], dict[str, Any]], **options: Any) -> bool:
        unfrozen = lambda: {name: one for name, one in trained().items() if one.requires_grad}  # noqa: E731
        return bool(whole(self, trained=unfrozen, **options))

    gradients.end_step = of_the_trained
    importlib.import_module("lastwords.optim_wrapper.capture.carried_gradients").GradientHabit._kept_frozen = never


def gradients_put_beside() -> None:
    """A restored gradient is a tensor of its own, even where the loop has made one."""

    def beside(parameter: Any, data: Any) -> None:
        parameter.grad = data

    importlib.import_module("lastwords.optim_wrapper.capture.carried_gradients").put_gradient = beside


def gradients_of_extras_lost() -> None:
    """Of tensors and modules among the extras the values are saved, and no gradients."""
    extras = importlib.import_module("lastwords.optim_wrapper.state.extras").Extras
    extras.parameters = extras.leaves = lambda self: {}


def zero_grad_believed() -> None:
    """A `zero_grad()` speaks for all later steps, and for whatever comes after it."""
    habit = importlib.import_module("lastwords.optim_wrapper.capture.carried_gradients").GradientHabit
    habit.next_ones = False
    habit._wavers = property(lambda self: False, lambda self, value: None)


def buckets_as_they_come() -> None:
    """The order of DDP's buckets is not replayed."""
    importlib.import_module("lastwords.optim_wrapper.ddp.ddp_buckets").replay = nothing


def networks_beside_unseen() -> None:
    """The model is what was registered, whatever else the optimizers train."""
    importlib.import_module("lastwords.optim_wrapper.state.state_view").with_those_beside = lambda model, *_: model


def own_order_believed() -> None:
    """Each rank takes the order of its own gradients for that of the sums, which is rank 0's."""
    order = importlib.import_module("lastwords.optim_wrapper.ddp.ddp_order")
    order.OrderBoard.exchange = lambda *_: None
    order.GradientOrder._unconfirmed = lambda *_: ""


def hooks_unasked() -> None:
    """Nobody asks what state a communication hook has."""
    importlib.import_module("lastwords.optim_wrapper.ddp.ddp_order").hidden_states = nothing


def late_moves_as_they_are() -> None:
    """A step that was cut off gives no reason to doubt what moves late in it."""
    importlib.import_module("lastwords.optim_wrapper.capture.source").about_to_change = nothing


def others_unasked() -> None:
    """What ranks that have ended a step saw move late in it says nothing of a rank that had not ended it."""
    source = importlib.import_module("lastwords.optim_wrapper.capture.source").TrainerSource
    source._moved_late = lambda self, states, step: ""


def own_generators_unseen() -> None:
    """Nobody looks for random generators of the user's own."""
    generators = importlib.import_module("lastwords.optim_wrapper.state.generators").Generators
    generators.look, generators.unseen = nothing, nothing


def optimizers_own_state_lost() -> None:
    """Only `state` and `param_groups` of an optimizer are saved, and its attributes are not looked at."""
    importlib.import_module("lastwords.optim_wrapper.state.own_state")._speaks_for_itself = lambda wrapper: False
    attributes_lost()


def attributes_lost() -> None:
    """Nobody looks at attributes of the model and the optimizers."""
    kind = importlib.import_module("lastwords.optim_wrapper.state.attributes").Attributes
    kind.look, kind.unseen = nothing, nothing


def variables_unseen() -> None:
    """Nobody looks at what hangs on variables of the functions that run the loop."""
    importlib.import_module("lastwords.optim_wrapper.state.attributes").variables = lambda thread: {}


def nothing_named() -> None:
    """Nobody names what variables, closures and globals hold."""
    importlib.import_module("lastwords.optim_wrapper.state.beside").Beside.changed = lambda *_: {}


def state_out_unseen() -> None:
    """Nobody asks what is missing in the optimizer's state."""
    watch = importlib.import_module("lastwords.optim_wrapper.capture.state_watch")
    watch.taken_out = lambda *_: {}
    watch.gone_for_good = watch.emptied = nothing


def ranks_uncompared() -> None:
    """On a resume nobody asks whether what has to be alike on all ranks was."""
    importlib.import_module("lastwords.optim_wrapper.resume.resume")._not_alike = nothing


def habits_forgotten() -> None:
    """A resumed run begins without what the saved one had learned of its loop."""
    resume = importlib.import_module("lastwords.optim_wrapper.resume.resume")
    meta = importlib.import_module("lastwords.checkpoint.meta")
    resume.habits_for = lambda rank, manifest: meta.Habits()


def lists_unseen() -> None:
    """Nobody asks what has moved among an optimizer's lists and numbers."""
    values = importlib.import_module("lastwords.optim_wrapper.state.plain_values").PlainValues
    values.moved = lambda self: ([], "")


def much_sampled() -> None:
    """Of an array or a container with much in it, little is compared."""
    importlib.import_module("lastwords.optim_wrapper.state.how_far")._ELEMENTS = 8
    importlib.import_module("lastwords.optim_wrapper.state.object_walk").Walk._affords = never


def begins_unasked() -> None:
    """Nobody asks whether all ranks had begun the next step, and what had changed by then."""
    for module in ("resume", "resume_choice"):
        importlib.import_module(f"lastwords.optim_wrapper.resume.{module}").begun_of = lambda manifest: (True, "")
    importlib.import_module("lastwords.optim_wrapper.capture.recorder").StepRecorder.moved_between = nothing


def survivors_silent() -> None:
    """A survivor that does not write says nothing of what belongs to it alone."""
    importlib.import_module("lastwords.optim_wrapper.capture.source").TrainerSource.settled = lambda self, report: (
        report
    )


def order_unheard() -> None:
    """Nobody asks whether a loader gives again what it had given."""
    importlib.import_module("lastwords.optim_wrapper.loop.data_position").EpochOrder.expect = nothing


MECHANISMS: dict[str, Callable[[], None]] = {
    "witness": unseen,
    "sampled words": unsampled,
    "boundary copies": uncopied,
    "carried gradients": gradients_dropped,
    "gradients that outlive": gradients_used_up,
    "gradients of no optimizer": gradients_of_no_optimizer_lost,
    "gradients of the frozen": gradients_of_the_frozen_lost,
    "gradients in their place": gradients_put_beside,
    "gradients of extras": gradients_of_extras_lost,
    "zero_grad now and then": zero_grad_believed,
    "bucket replay": buckets_as_they_come,
    "networks beside": networks_beside_unseen,
    "rank 0's order": own_order_believed,
    "hooks": hooks_unasked,
    "what moves late": late_moves_as_they_are,
    "what others saw move late": others_unasked,
    "own generators": own_generators_unseen,
    "optimizers' own state": optimizers_own_state_lost,
    "state that is taken out": state_out_unseen,
    "what has to be alike": ranks_uncompared,
    "lists in the state": lists_unseen,
    "habits": habits_forgotten,
    "attributes": attributes_lost,
    "all that there is of much": much_sampled,
    "variables": variables_unseen,
    "names": nothing_named,
    "order of an epoch": order_unheard,
    "where steps begin": begins_unasked,
    "what survivors say": survivors_silent,
}


def take_out(names: Iterable[str]) -> None:
    """Replace each of these mechanisms by one that does nothing."""
    for name in names:
        MECHANISMS[name]()
