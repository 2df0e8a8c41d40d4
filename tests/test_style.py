"""House rules as an ordinary test. Every message names the replacement, and every rule is shown to be able to fail."""

from __future__ import annotations

import ast
import functools
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SHIPPED_FOLDERS = (
    "src/lastwords", "controller", "processor", "optim_wrapper", "sharding", "checkpoint", "liveness", "integrations",
    "launcher", "cli", "page", "drill",
)  # fmt: skip
TEST_FOLDERS = ("tests",)
LINES_MAX = 800

LONGER_THAN_ALLOWED: dict[str, str] = {}
"""Shipped module -> why it may be longer than LINES_MAX. Splitting it is the better answer."""

CORE_ROOTS = ("controller/core.py", "processor/core.py", "launcher/core.py", "launcher/registry.py")
"""Whatever these import of their own package is core as well, and has to be as pure."""
CORE_IMPORTS = frozenset(
    {"__future__", "collections", "collections.abc", "dataclasses", "enum", "itertools", "math", "re", "typing"}
    | {"lastwords.vocabulary", "lastwords.errors", "lastwords.core_events"}
)
MAY_PRINT = ("cli/",)
MAY_SET_UP_LOGGING = ("cli/", "controller/__main__.py", "controller/teller.py", "src/lastwords/log_lines.py")
MAY_READ_A_CLOCK = ("src/lastwords/clock.py",)
MAY_READ_WALL_TIME = (
    "checkpoint/publish.py",
    "checkpoint/starts.py",
    "checkpoint/system.py",
    "cli/retention_commands.py",
    "controller/handover.py",
    "controller/server.py",
    "controller/teller.py",
    "controller/handover.py",
    "controller/timeline.py",
    "drill/report.py",
    "launcher/host.py",
    "liveness/leftovers.py",
    "page/server.py",
    "page/watch.py",
)
"""A wall clock jumps. What one does to each of these is shown in tests/test_wall_clock.py."""
MAY_IMPORT_TORCH = ("launcher/", "optim_wrapper/", "sharding/", "integrations/", "src/lastwords/torch_private.py")
MAY_PICKLE = ("integrations/dcp.py", "integrations/dcp_in.py")
"""torch.distributed.checkpoint takes what is no tensor only as torch.save's bytes; ours never leave memory."""
BANNED_NAMES = {
    "common": "what the code is about",
    "data": "what the values are: digits, records, samples",
    "helper": "what it does, as a noun of the glossary",
    "helpers": "what they do, as a noun of the glossary",
    "manager": "what it holds or decides: controller, registry, watch",
    "misc": "one module for each reason to change",
    "util": "what the code is about",
    "utils": "what the code is about",
}
MAY_EXPECT_SENTENCES = (
    "tests/integration/test_bad_input.py",
    "tests/integration/test_ddp_wherever.py",
    "tests/integration/test_early_end.py",
    "tests/integration/test_elastic_runs.py",
    "tests/integration/test_faults.py",
    "tests/integration/test_forks.py",
    "tests/integration/test_gate.py",
    "tests/integration/test_hand_cut.py",
    "tests/integration/test_layouts.py",
    "tests/integration/test_live_strategy.py",
    "tests/integration/test_negative_controls.py",
    "tests/integration/test_odd_values.py",
    "tests/integration/test_reshard.py",
    "tests/integration/test_session.py",
    "tests/integration/test_sharded_options.py",
    "tests/integration/test_transform.py",
    "tests/integration/test_unreduced.py",
    "tests/scenarios/test_protocol_page.py",
)
"""Their texts are other programs', pages, or of processes that say something else each time. The list only shrinks."""
TEXT_SEARCHES = frozenset({"startswith", "endswith", "removeprefix", "removesuffix", "partition", "find", "index"})
SENTENCE = re.compile(r"[a-z]+ ")
WORDS = re.compile(r"[A-Za-z]{2,},? [a-z]{2,}")
MAY_WAIT_FOR_A_CLOCK = {
    "tests/integration/test_black_box_kill.py": "draws the instants of its kills",
    "tests/integration/test_controller_shell.py": "a silence of gRPC's own keepalive, which no clock of ours counts",
    "tests/integration/test_forks.py": "waits for its own forks",
    "tests/integration/test_gate.py": "ranks that come late",
    "tests/integration/test_page.py": "requests a second",
    "tests/integration/test_pass_gate.py": "a parked thread does nothing, for a moment",
    "tests/integration/test_pauses.py": "a process that is stopped for so long",
    "tests/integration/test_periodic.py": "a checkpoint is due every so many seconds",
    "tests/launcher/test_import_times.py": "an import that takes its time",
    "tests/processor/test_departure.py": "a report of the user's that takes its time",
    "tests/test_bench.py": "a thread that loses the processor for a moment",
}
"""Whose subject is time that passes in another process. The list only shrinks."""
WORKLOADS = (
    "browser.py", "faults.py", "guarded.py", "harness.py", "living.py", "puppet.py", "rig.py", "sabotage.py",
    "zygote.py", "rank.py", "patience.py", "_training.py",
)  # fmt: skip
"""Ends of the names of scripts that take their time as a user's do, and of what starts and watches them."""
FOR_EVER_S = 60
UNITLESS = re.compile(r"(?:^|_)(?:timeout|deadline|interval|delay|elapsed|duration)$")


@dataclass(frozen=True)
class Source:
    """One module: its path relative to the project root, its text and its syntax tree."""

    path: str
    text: str

    @functools.cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @functools.cached_property
    def nodes(self) -> list[ast.AST]:
        """All of the tree."""
        return [*ast.walk(self.tree)]

    def below(self, prefixes: tuple[str, ...]) -> bool:
        return self.path.startswith(prefixes)


Rule = Callable[[Source], Iterator[str]]


def _imports(source: Source) -> Iterator[tuple[int, str]]:
    """Line and full name of each module that is imported, at whatever depth."""
    for node in source.nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.lineno, node.module or ""


def _type_checking_lines(source: Source) -> set[int]:
    """Lines inside `if TYPE_CHECKING:` blocks, which do not run."""
    lines: set[int] = set()
    for node in source.nodes if "TYPE_CHECKING" in source.text else ():
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            for inside in node.body:
                lines.update(range(inside.lineno, (inside.end_lineno or inside.lineno) + 1))
    return lines


def _calls(source: Source) -> Iterator[tuple[int, str]]:
    for node in source.nodes:
        if isinstance(node, ast.Call):
            yield node.lineno, _text_of(node.func)


def _text_of(node: ast.expr) -> str:
    """`ast.unparse`, which takes ten times as long for a dotted name."""
    if isinstance(node, ast.Name):
        return node.id
    return f"{_text_of(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else ast.unparse(node)


def _comments(source: Source) -> dict[int, str]:
    tokens = tokenize.generate_tokens(io.StringIO(source.text).readline)
    return {token.start[0]: token.string for token in tokens if token.type == tokenize.COMMENT}


def no_banned_name(source: Source) -> Iterator[str]:
    for part in Path(source.path).with_suffix("").parts:
        if part in BANNED_NAMES:
            yield f"the name {part!r} says nothing; name it after {BANNED_NAMES[part]}"


def no_long_module(source: Source) -> Iterator[str]:
    """Imports do not count: a package more is a line more, and nobody reads them."""
    imports = [node for node in source.tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    lines = source.text.count("\n") - sum((node.end_lineno or node.lineno) - node.lineno + 1 for node in imports)
    if lines > LINES_MAX and source.path not in LONGER_THAN_ALLOWED:
        yield f"{lines} lines, {LINES_MAX} is the most: split it by reason to change"


def no_print(source: Source) -> Iterator[str]:
    if not source.below(MAY_PRINT):
        for line, name in _calls(source):
            if name == "print":
                yield f"line {line}: print in a library; use logging.getLogger(__name__), or sys.stderr.write at exit"


def no_sentence_is_matched(source: Source) -> Iterator[str]:
    """A better sentence must not change what the code does."""
    for node in source.nodes:
        looked_for: list[ast.expr] = []
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in TEXT_SEARCHES:
            looked_for = node.args
        elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn):
            looked_for = [node.left]
        for part in (inner for given in looked_for for inner in ast.walk(given)):
            if isinstance(part, ast.Constant) and isinstance(part.value, str) and SENTENCE.search(part.value):
                yield f"line {part.lineno}: {part.value!r} is matched; give the message's object a field or a class"


def no_pickle(source: Source) -> Iterator[str]:
    if source.below(MAY_PICKLE):
        return
    for line, name in _imports(source):
        if name.split(".")[0] in {"pickle", "cloudpickle", "dill", "marshal", "shelve"}:
            yield f"line {line}: {name} runs code from files; use safetensors for tensors and JSON for the rest"
    for line, name in _calls(source):
        if name in {"torch.load", "torch.save"}:
            yield f"line {line}: {name} pickles; use lastwords.checkpoint"


def no_relative_import(source: Source) -> Iterator[str]:
    for node in source.nodes:
        if isinstance(node, ast.ImportFrom) and node.level:
            yield f"line {node.lineno}: relative import; write from lastwords.package.module import name"


def no_broad_except(source: Source) -> Iterator[str]:
    comments = _comments(source)
    for node in source.nodes:
        if not isinstance(node, ast.ExceptHandler):
            continue
        caught = "" if node.type is None else ast.unparse(node.type)
        if caught and not re.search(r"\b(Exception|BaseException)\b", caught):
            continue
        if isinstance(node.body[-1], ast.Raise) and node.body[-1].exc is None:
            continue  # it looks at the exception and lets it go on
        near = " ".join(comments.get(line, "") for line in range(node.lineno - 1, node.body[0].lineno + 1))
        if "outermost" not in near and "handed to" not in near:
            yield (
                f"line {node.lineno}: except {caught or '(everything)'}; catch the error that you expect. A thread's "
                "outermost frame may: say so in a comment ('outermost', or whom the error is 'handed to')"
            )


def no_name_without_its_unit(source: Source) -> Iterator[str]:
    for node in source.nodes:
        names: list[str] = []
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = node.args
            names = [argument.arg for argument in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]]
        elif isinstance(node, ast.AnnAssign):
            names = [ast.unparse(node.target).rpartition(".")[2]]
        for name in names:
            if UNITLESS.search(name):
                yield f"line {node.lineno}: {name} has no unit; name it {name}_s (or _ms), a clock {name}_mono_s"


def no_clock_outside_clock(source: Source) -> Iterator[str]:
    if source.below(MAY_READ_A_CLOCK):
        return
    for line, name in _calls(source):
        if re.fullmatch(r"time\.(time|monotonic|perf_counter)(_ns)?|datetime\.now", name):
            yield f"line {line}: {name}(); take now_s as an argument; a shell calls lastwords.clock.mono_s or wall_ns"


def no_wall_time_where_a_jump_would_decide(source: Source) -> Iterator[str]:
    if source.below(MAY_READ_A_CLOCK + MAY_READ_WALL_TIME):
        return
    for node in source.nodes:
        name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
        if re.fullmatch(r"wall_ns|modified_unix_s|st_[acm]time(_ns)?", name):
            yield (
                f"line {node.lineno}: {name}: take lastwords.clock.mono_s; if it has to be the wall clock, show in "
                "tests/test_wall_clock.py what a jump does, and add the module to MAY_READ_WALL_TIME"
            )


def no_torch_outside_the_trainer_side(source: Source) -> Iterator[str]:
    if source.below(MAY_IMPORT_TORCH):
        return
    unused = _type_checking_lines(source)
    for line, name in _imports(source):
        if name.split(".")[0] == "torch" and line not in unused:
            yield f"line {line}: torch is imported by optim_wrapper only; hand tensors down as memoryviews"


def no_logging_set_up_by_the_library(source: Source) -> Iterator[str]:
    if source.below(MAY_SET_UP_LOGGING):
        return
    for line, name in _calls(source):
        if name == "logging.basicConfig" or name.endswith(".addHandler"):
            yield f"line {line}: {name}; a library installs no handlers, its caller does"


def no_formatted_log_message(source: Source) -> Iterator[str]:
    for node in source.nodes:
        if not isinstance(node, ast.Call) or not node.args or not isinstance(node.args[0], ast.JoinedStr):
            continue
        if re.fullmatch(r"_?(log|logger|LOG|LOGGER)\.(debug|info|warning|error|exception)", _text_of(node.func)):
            yield f"line {node.lineno}: f-string in a log call; pass the values: log.info('step %s', step)"


def a_docstring_says_what_the_module_is(source: Source) -> Iterator[str]:
    if source.text.strip() and not ast.get_docstring(source.tree):
        yield "no module docstring: say in one line what this module is for"


def cores_import_nothing_that_acts(source: Source) -> Iterator[str]:
    if source.path not in _core_modules():
        return
    own = f"lastwords.{source.path.partition('/')[0]}."
    unused = _type_checking_lines(source)
    for line, name in _imports(source):
        if name not in CORE_IMPORTS and not name.startswith(own) and line not in unused:
            yield f"line {line}: a core imports {name}; pass in what it needs (now_s, a seeded random.Random, an event)"


@functools.cache
def _core_modules() -> frozenset[str]:
    """The cores' roots and all modules of their own packages that these import, however indirectly."""
    found: set[str] = set()
    queue = list(CORE_ROOTS)
    while queue:
        path = queue.pop()
        found.add(path)
        for _, name in _imports(Source(path, (ROOT / path).read_text(encoding="utf-8"))):
            module = name.removeprefix("lastwords.").replace(".", "/") + ".py"
            if module.partition("/")[0] == path.partition("/")[0] and module not in found and (ROOT / module).is_file():
                queue.append(module)
    return frozenset(found)


def no_clock_is_waited_for_in_a_test(source: Source) -> Iterator[str]:
    if source.path in (*MAY_WAIT_FOR_A_CLOCK, "tests/test_style.py") or source.path.endswith(WORKLOADS):
        return
    for line, what in _waits(source):
        yield f"line {line}: {what} in a test; pass now_s, wait on an event, or until() of tests/patience.py"


def _waits(source: Source) -> Iterator[tuple[int, str]]:
    """Sleeps, those of code in strings as well, but for ever; and bounds of real time."""
    for node in source.nodes:
        if isinstance(node, ast.Call) and SLEEPS.fullmatch(f"{ast.unparse(node)}") and not _is_for_ever(node):
            yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            for found in re.finditer(r"\bsleep\((\d*\.?\d*)\)|sigtimedwait\(", node.value):
                if not found.group(1) or float(found.group(1)) < FOR_EVER_S:
                    yield node.lineno, f"{found.group()} in code"
        elif isinstance(node, ast.Assert) and any(map(_is_bound, ast.walk(node.test))):
            yield node.lineno, "a bound of real time"


SLEEPS = re.compile(
    r"((time|asyncio|anyio)\.)?sleep\((?!0\)).*|signal\.sigtimedwait\(.*|(threading\.)?Event\(\)\.wait\(.+\)"
)


def _is_for_ever(node: ast.Call) -> bool:
    last = node.args[-1] if node.args else None
    return isinstance(last, ast.Constant) and isinstance(last.value, int | float) and last.value >= FOR_EVER_S


def _is_bound(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Compare)
        and re.search(r"(monotonic|perf_counter|mono_s)\(\)", ast.unparse(node)) is not None
    )


def no_sentence_is_expected_in_a_test(source: Source) -> Iterator[str]:
    """A better sentence must change one line of messages.txt, and no test."""
    if source.path not in MAY_EXPECT_SENTENCES:
        for line, text in _sentences(source):
            yield f"line {line}: {text!r}; use golden.raises or golden.says, or look at a field"


def _sentences(source: Source) -> Iterator[tuple[int, str]]:
    """Texts of two words and more that an assertion, or pytest.raises, looks for in another text."""
    for node in source.nodes:
        expected: list[ast.expr] = []
        if isinstance(node, ast.Call) and _text_of(node.func) == "pytest.raises":
            expected = [keyword.value for keyword in node.keywords if keyword.arg == "match"]
        elif isinstance(node, ast.Assert):
            inside = [part for part in ast.walk(node.test) if isinstance(part, ast.Compare)]
            expected = [part.left for part in inside if isinstance(part.ops[0], ast.In | ast.NotIn)]
        for part in (inner for given in expected for inner in ast.walk(given)):
            if isinstance(part, ast.Constant) and isinstance(part.value, str) and WORDS.search(part.value):
                yield part.lineno, part.value


SHIPPED_RULES: tuple[Rule, ...] = (
    no_banned_name,
    no_long_module,
    no_print,
    no_pickle,
    no_sentence_is_matched,
    no_relative_import,
    no_broad_except,
    no_name_without_its_unit,
    no_clock_outside_clock,
    no_wall_time_where_a_jump_would_decide,
    no_torch_outside_the_trainer_side,
    no_logging_set_up_by_the_library,
    no_formatted_log_message,
    a_docstring_says_what_the_module_is,
    cores_import_nothing_that_acts,
)
TEST_RULES: tuple[Rule, ...] = (
    no_clock_is_waited_for_in_a_test,
    no_sentence_is_expected_in_a_test,
    no_relative_import,
)


def _sources(folders: tuple[str, ...]) -> list[Source]:
    found: list[Source] = []
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            through_a_link = any(
                (ROOT / folder / part).is_symlink() for part in path.relative_to(ROOT / folder).parts[:1]
            )
            if not through_a_link and "/_pb/" not in name:
                found.append(Source(name, path.read_text(encoding="utf-8")))
    return found


def _complaints(rules: tuple[Rule, ...], folders: tuple[str, ...]) -> list[str]:
    """Of all rules in one test: each module is parsed once, by one process."""
    return [
        f"{source.path}: {rule.__name__}: {text}"
        for source in _sources(folders)
        for rule in rules
        for text in rule(source)
    ]


def test_shipped_modules_keep_the_rules() -> None:
    complaints = _complaints(SHIPPED_RULES, SHIPPED_FOLDERS)
    assert not complaints, "\n" + "\n".join(complaints)


def _named_alike(sources: Iterable[Source]) -> dict[str, list[str]]:
    """Classes at the top of a module that share a name, but for an underscore, and where."""
    where: dict[str, list[str]] = {}
    for source in sources:
        for node in source.tree.body:
            if isinstance(node, ast.ClassDef):
                where.setdefault(node.name.lstrip("_"), []).append(source.path)
    return {name: paths for name, paths in where.items() if len(paths) > 1}


def test_no_two_classes_share_a_name() -> None:
    assert not _named_alike(_sources(SHIPPED_FOLDERS))
    assert _named_alike([Source("a.py", "class Part: ..."), Source("b.py", "class _Part: ...")])


def test_test_modules_keep_the_rules() -> None:
    complaints = _complaints(TEST_RULES, TEST_FOLDERS)
    assert not complaints, "\n" + "\n".join(complaints)


def test_test_folders_are_not_packages() -> None:
    packages = [path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("__init__.py")]
    assert not packages, f"remove {packages}: tests are imported by path (--import-mode=importlib)"


def test_no_module_is_on_the_list_of_long_ones_for_nothing() -> None:
    long_ones = {source.path for source in _sources(SHIPPED_FOLDERS) if source.text.count("\n") > LINES_MAX}
    assert set(LONGER_THAN_ALLOWED) <= long_ones, "these are short enough: take them off LONGER_THAN_ALLOWED"


def test_no_test_may_wait_for_a_clock_for_nothing() -> None:
    sources = {path: Source(path, (ROOT / path).read_text(encoding="utf-8")) for path in MAY_WAIT_FOR_A_CLOCK}
    assert [path for path, source in sources.items() if not [*_waits(source)]] == []


def test_no_test_is_on_the_list_of_those_that_expect_sentences_for_nothing() -> None:
    listed = [Source(path, (ROOT / path).read_text(encoding="utf-8")) for path in MAY_EXPECT_SENTENCES]
    needless = [source.path for source in listed if not any(_sentences(source))]
    assert not needless, f"take {needless} off MAY_EXPECT_SENTENCES"


BAD = [
    (no_banned_name, "checkpoint/utils.py", ""),
    (no_long_module, "checkpoint/layout.py", "x = 1\n" * (LINES_MAX + 1)),
    (no_print, "checkpoint/layout.py", "print('saved')"),
    (no_pickle, "checkpoint/layout.py", "def load():\n    import pickle"),
    (no_pickle, "optim_wrapper/state.py", "torch.save(state, path)"),
    (no_sentence_is_matched, "checkpoint/load.py", "lost = reason.startswith(f'rank {rank}: lost')"),
    (no_sentence_is_matched, "checkpoint/load.py", "moved = 'is resumed by' in reason"),
    (no_relative_import, "checkpoint/layout.py", "from .format import TensorSpec"),
    (no_broad_except, "processor/agent.py", "try:\n    run()\nexcept Exception:\n    pass"),
    (
        no_broad_except,
        "processor/agent.py",
        "try:\n    run()\nexcept (ValueError, BaseException) as error:\n    log(error)",
    ),
    (no_broad_except, "processor/agent.py", "try:\n    run()\nexcept:\n    pass"),
    (no_name_without_its_unit, "processor/agent.py", "def wait(settle_timeout: float) -> None: ..."),
    (no_name_without_its_unit, "processor/agent.py", "class A:\n    deadline: float = 1.0"),
    (no_clock_outside_clock, "processor/agent.py", "import time\nnow = time.monotonic()"),
    (no_wall_time_where_a_jump_would_decide, "controller/periodic.py", "from lastwords import clock\nclock.wall_ns()"),
    (no_wall_time_where_a_jump_would_decide, "checkpoint/load.py", "newest = path.stat().st_mtime"),
    (no_torch_outside_the_trainer_side, "processor/saver.py", "from torch import Tensor"),
    (no_logging_set_up_by_the_library, "processor/saver.py", "logging.basicConfig()"),
    (no_formatted_log_message, "processor/saver.py", "log.info(f'step {step}')"),
    (a_docstring_says_what_the_module_is, "processor/saver.py", "x = 1"),
    (cores_import_nothing_that_acts, "controller/core.py", "import time"),
    (cores_import_nothing_that_acts, "controller/selection.py", "import random"),
    (cores_import_nothing_that_acts, "processor/core.py", "from lastwords.clock import mono_s"),
    (no_clock_is_waited_for_in_a_test, "tests/controller/test_core.py", "import time\ntime.sleep(1)"),
    (no_clock_is_waited_for_in_a_test, "tests/controller/test_core.py", "import signal\nsignal.sigtimedwait((), 1)"),
    (no_clock_is_waited_for_in_a_test, "tests/integration/test_kills.py", "import time\ntime.sleep(1)"),
    (
        no_clock_is_waited_for_in_a_test,
        "tests/controller/test_core.py",
        "import threading\nthreading.Event().wait(0.3)",
    ),
    (no_clock_is_waited_for_in_a_test, "tests/controller/test_core.py", "SCRIPT = 'import time; time.sleep(1.5)'"),
    (no_clock_is_waited_for_in_a_test, "tests/controller/test_core.py", "assert time.monotonic() - began < 2.0"),
    (
        no_sentence_is_expected_in_a_test,
        "tests/controller/test_core.py",
        "pytest.raises(E, match=f'{path} is gone now')",
    ),
    (
        no_sentence_is_expected_in_a_test,
        "tests/controller/test_core.py",
        "assert any('is gone' in line for line in log)",
    ),
]

GOOD = [
    (no_broad_except, "processor/agent.py", "try:\n    run()\nexcept Exception:  # outermost loop\n    report()"),
    (no_broad_except, "processor/agent.py", "try:\n    run()\nexcept BaseException:\n    undo()\n    raise"),
    (no_name_without_its_unit, "processor/agent.py", "def wait(settle_timeout_s: float) -> None: ..."),
    (no_print, "cli/main.py", "print('step 3')"),
    (no_torch_outside_the_trainer_side, "checkpoint/a.py", "if TYPE_CHECKING:\n    import torch"),
    (cores_import_nothing_that_acts, "controller/core.py", "from lastwords.vocabulary import Stand"),
    (no_clock_is_waited_for_in_a_test, "tests/integration/toy_training.py", "import time\ntime.sleep(1)"),
    (no_clock_is_waited_for_in_a_test, "tests/controller/test_core.py", "SCRIPT = 'import time; time.sleep(600)'"),
    (no_sentence_is_expected_in_a_test, "tests/controller/test_core.py", "assert 'rank 1' in log\nassert 'is gone'"),
]


@pytest.mark.parametrize(("rule", "path", "text"), BAD)
def test_the_rule_can_fail(rule: Rule, path: str, text: str) -> None:
    assert list(rule(Source(path, text)))


@pytest.mark.parametrize(("rule", "path", "text"), GOOD)
def test_the_rule_leaves_good_code_alone(rule: Rule, path: str, text: str) -> None:
    assert not list(rule(Source(path, text)))


def test_every_rule_has_an_example_that_breaks_it() -> None:
    shown = {rule for rule, _, _ in BAD}
    assert shown == set(SHIPPED_RULES) | set(TEST_RULES)


def _python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


HEAVY = "[name for name in ('torch', 'grpc', 'numpy', 'google.protobuf') if name in sys.modules]"


def test_importing_the_package_loads_neither_torch_nor_grpc() -> None:
    assert _python(f"import sys, lastwords; lastwords.ConfigError; print({HEAVY})") == "[]"


@pytest.mark.ci
def test_torch_is_loaded_once_the_wrapper_is_asked_for() -> None:
    """Negative control for the test above."""
    assert "'torch'" in _python(f"import sys, lastwords; lastwords.OptTFTWrapper; print({HEAVY})")


@pytest.mark.ci
def test_a_controller_starts_without_torch() -> None:
    code = (
        "import sys, importlib; importlib.import_module('lastwords.controller.__main__'); print('torch' in sys.modules)"
    )
    assert _python(code) == "False"


def test_every_public_name_can_be_imported_and_is_typed() -> None:
    import lastwords

    for name in lastwords.__all__:
        assert getattr(lastwords, name) is not None
    assert dir(lastwords) == sorted(lastwords.__all__)
    assert (ROOT / "src/lastwords/py.typed").is_file()


def test_an_unknown_public_name_is_an_attribute_error() -> None:
    import lastwords

    with pytest.raises(AttributeError, match="TFTRegistry"):
        _ = lastwords.TFTRegistry
