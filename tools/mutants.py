"""Makes random mutants of product files, each of one changed line, and says which ones the nearest tests let pass.

    python tools/mutants.py [--seed N] [-n 25] [--workers 2] [--json FILE] [FILE ...]

What is drawn depends on the seed and on the syntax tree alone. Without a seed it is that of the last commit: the first
eight hexadecimal digits of its tree. A survivor that `tests/equivalent_mutants.json` lists is shown with the reason
that stands there; it counts as a survivor all the same.

Each mutant is judged by a fork of this process, which has imported pytest and all libraries, but nothing of lastwords.
An import hook hands the changed text to the fork alone, so nothing is written, and a fork that has not run it is an
error. An endless loop is killed, and counts as noticed.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import itertools
import json
import os
import random
import re
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
KILLED_SHARE_MIN = 0.75
REASONS = "tests/equivalent_mutants.json"
PRELOADED = ("pytest", "hypothesis", "numpy", "xxhash", "msgspec")

NEAREST_TESTS: dict[str, tuple[str, ...]] = {
    "controller/selection.py": ("tests/controller/test_selection.py", "tests/controller/test_shares.py"),
    "controller/incident.py": (
        "tests/controller/test_core_incident.py",
        "tests/controller/test_core_saving.py",
        "tests/controller/test_preemption.py",
        "tests/scenarios",
    ),
    "controller/saving.py": (
        "tests/controller/test_core_saving.py",
        "tests/controller/test_core_incident.py",
        "tests/controller/test_preemption.py",
        "tests/controller/test_shares.py",
        "tests/scenarios",
    ),
    "controller/membership.py": (
        "tests/controller/test_membership.py",
        "tests/controller/test_core_registration.py",
        "tests/controller/test_core_incident.py",
        "tests/controller/test_core_stall.py",
        "tests/scenarios",
    ),
    "launcher/core.py": (
        "tests/launcher/test_core.py",
        "tests/launcher/test_scheduler_core.py",
        "tests/launcher/test_core_schedules.py",
    ),
    "launcher/registry.py": ("tests/launcher/test_registry.py",),
    "checkpoint/retention.py": ("tests/checkpoint/test_retention.py",),
    "checkpoint/publish.py": (
        "tests/checkpoint/test_publish.py",
        "tests/checkpoint/test_shares.py::test_shares_of_different_tables_are_not_published",
        "tests/checkpoint/test_shares.py::test_shares_of_different_numbers_are_not_published",
        "tests/checkpoint/test_shares.py::test_a_lost_share_is_noticed",
        "tests/checkpoint/test_large.py",
        "tests/checkpoint/test_faults.py",
        "tests/checkpoint/test_crash.py::test_publish_itself_refuses_what_was_not_verified",
        "tests/checkpoint/test_crash.py::test_power_lost_at_any_system_call_leaves_the_older_and_the_whole_new_one_or_none",
    ),
    "checkpoint/cuts.py": ("tests/checkpoint/test_shares.py",),
    "optim_wrapper/capture/witness.py": (
        "tests/optim_wrapper/test_witness.py",
        "tests/optim_wrapper/test_late_changes.py",
    ),
    "optim_wrapper/loop/steps.py": (
        "tests/optim_wrapper/test_global_samples.py",
        "tests/optim_wrapper/test_loader_changes.py",
        "tests/optim_wrapper/test_loader_counters.py",
        "tests/optim_wrapper/test_steps.py",
    ),
}
"""Of each file, the tests that its mutants are shown to; some seconds each, and the nearest first."""

KILLED, SURVIVED = "killed", "survived"
GREEN, NOT_IMPORTED = 0, 99

# ---------------------------------------------------------------------- what a mutant is


@dataclass(frozen=True, slots=True, order=True)
class Mutant:
    """One line of a file, as it is and as it becomes."""

    file: str
    line: int
    before: str
    after: str

    def applied(self, source: str) -> str:
        """The whole file with this change."""
        lines = source.split("\n")
        assert lines[self.line - 1] == self.before
        lines[self.line - 1] = self.after
        return "\n".join(lines)

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.before.strip()} -> {self.after.strip()}"


COMPARISONS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "is": "is not", "is not": "is"} | {
    "in": "not in",
    "not in": "in",
}
COMPARISON = re.compile(r"is\s+not\b|not\s+in\b|is\b|in\b|[<>!=]=|[<>]")
OPERATORS: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.BitOr: ("|", "&"),
    ast.BitAnd: ("&", "|"),
}
CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}
LOGS = re.compile(r"(_?log|_?logger|LOG|tell_people)(\.(debug|info|warning|error|exception))?$")
Edit = tuple[int, int, int, str]
"""Line, first and last column (in bytes of UTF-8), and what stands there then."""


class _Edits(ast.NodeVisitor):
    """All edits of a module, in the order of its text. Not of docstrings, annotations, decorators, messages or logs."""

    def __init__(self, source: str) -> None:
        self._lines = [line.encode() for line in source.split("\n")]
        self.found: list[Edit] = []

    # -- where something stands

    def _text(self, node: ast.AST) -> str:
        """Its text, "" if it is on several lines."""
        if node.lineno != node.end_lineno:  # type: ignore[attr-defined]
            return ""
        return self._lines[node.lineno - 1][node.col_offset : node.end_col_offset].decode()  # type: ignore[attr-defined]

    def _replace(self, node: ast.AST, text: str) -> None:
        if self._text(node):
            self.found.append((node.lineno, node.col_offset, node.end_col_offset, text))  # type: ignore[attr-defined]

    def _between(self, left: ast.AST, right: ast.AST, pattern: re.Pattern[str], text: Mapping[str, str] | str) -> None:
        """Replace the operator between two operands."""
        for line in range(left.end_lineno, right.lineno + 1):  # type: ignore[attr-defined]
            begin = left.end_col_offset if line == left.end_lineno else 0  # type: ignore[attr-defined]
            end = right.col_offset if line == right.lineno else None  # type: ignore[attr-defined]
            gap = self._lines[line - 1][begin:end].decode()
            if match := pattern.search(gap.partition("#")[0]):
                after = text if isinstance(text, str) else text[" ".join(match.group().split())]
                at = begin + len(gap[: match.start()].encode())
                self.found.append((line, at, at + len(match.group()), after))
                return

    # -- what is left out

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """A message."""

    def visit_Raise(self, node: ast.Raise) -> None:
        """A message."""

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for statement in node.body:
            self.visit(statement)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        for default in [*node.args.defaults, *filter(None, node.args.kw_defaults)]:
            self.visit(default)
        for statement in node.body:
            self.visit(statement)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self.visit(node.body)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        if ast.unparse(node.targets[0]) != "__all__":
            self.generic_visit(node)

    # -- statements

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call) and not self._is_log(node.value):
            self._replace(node, "pass")
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._replace(node, "pass")
        self._between(node.target, node.value, re.compile(r"\S+="), "=")
        self.generic_visit(node)

    def visit_Continue(self, node: ast.Continue) -> None:
        self._replace(node, "pass")

    def visit_Break(self, node: ast.Break) -> None:
        self._replace(node, "pass")

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None:
            if ast.unparse(node.value) != "None":
                self._replace(node, "return None")
            self.visit(node.value)

    # -- conditions

    def _condition(self, test: ast.expr) -> None:
        if text := self._text(test):
            if not isinstance(test, ast.UnaryOp | ast.Compare | ast.Constant):  # the others have a `not` of their own
                self._replace(test, f"(not ({text}))")
            if not isinstance(test, ast.Constant):
                self._replace(test, "True")
                self._replace(test, "False")

    def visit_If(self, node: ast.If) -> None:
        if not ast.unparse(node.test).endswith("TYPE_CHECKING"):
            self._condition(node.test)
            self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        self._condition(node.test)
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._condition(node.test)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            self._condition(test)
        self.generic_visit(node)

    def visit_match_case(self, node: ast.match_case) -> None:
        if node.guard is not None:
            self._condition(node.guard)
        self.generic_visit(node)

    # -- expressions

    def visit_Compare(self, node: ast.Compare) -> None:
        operands = [node.left, *node.comparators]
        for left, right in itertools.pairwise(operands):
            self._between(left, right, COMPARISON, COMPARISONS)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        is_and = isinstance(node.op, ast.And)
        for left, right in itertools.pairwise(node.values):
            self._between(left, right, re.compile(r"\b(and|or)\b"), "or" if is_and else "and")
        for value in node.values:
            self._replace(value, str(is_and))  # as if it were not there
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self._replace(node, f"bool({self._text(node.operand)})")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if type(node.op) in OPERATORS:
            sign, other = OPERATORS[type(node.op)]
            self._between(node.left, node.right, re.compile(re.escape(sign)), other)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if self._is_log(node):
            return
        if isinstance(node.func, ast.Name):
            if node.func.id in CALLS:
                self._replace(node.func, CALLS[node.func.id])
            if node.func.id == "sorted" and not any(keyword.arg == "reverse" for keyword in node.keywords):
                given = [self._text(one) for one in node.args]  # of a generator, its parentheses are the call's
                given += [f"{keyword.arg}={self._text(keyword.value)}" for keyword in node.keywords]
                self._replace(node, f"sorted({', '.join(given)}, reverse=True)")
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        if ast.unparse(node.slice) in ("0", "-1"):
            self._replace(node.slice, "-1" if ast.unparse(node.slice) == "0" else "0")
            self.visit(node.value)
        else:
            self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._replace(node, str(not node.value))
        elif isinstance(node.value, int | float):
            self._replace(node, repr(node.value + 1))
            self._replace(node, repr(node.value - 1) if node.value >= 1 else f"({node.value - 1})")

    def _is_log(self, node: ast.Call) -> bool:
        return LOGS.search(ast.unparse(node.func)) is not None


def mutants_of(source: str, file: str) -> list[Mutant]:
    """All mutants of a file, sorted; each changes one line."""
    edits = _Edits(source)
    edits.visit(ast.parse(source))
    lines, found = source.split("\n"), set()
    for line, begin, end, text in edits.found:
        before = lines[line - 1].encode()
        found.add(Mutant(file, line, before.decode(), (before[:begin] + text.encode() + before[end:]).decode()))
    return sorted(mutant for mutant in found if mutant.after != mutant.before)


def drawn(mutants: Sequence[Mutant], count: int, seed: int) -> list[Mutant]:
    """So many of a file's, or all of them, in the order of its lines."""
    file = mutants[0].file if mutants else ""
    return sorted(random.Random(f"{seed} {file}").sample(mutants, min(count, len(mutants))))


# ---------------------------------------------------------------------- how it is judged


class _Changed(importlib.abc.MetaPathFinder, importlib.machinery.SourceFileLoader):
    """Imports one module with another text than that of its file."""

    def __init__(self, name: str, path: Path, text: str) -> None:
        super().__init__(name, str(path))
        self._text = text
        self.has_run = False

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.util.spec_from_file_location(name, self.path, loader=self) if name == self.name else None

    def get_code(self, fullname: str) -> object:  # type: ignore[override]
        return compile(self._text, self.path, "exec", dont_inherit=True)

    def exec_module(self, module: ModuleType) -> None:
        self.has_run = True
        super().exec_module(module)


@dataclass(frozen=True, slots=True)
class Task:
    """Text of a module, and the tests to show it to. mutant: None for the text as it is."""

    file: str
    module: str
    text: str
    tests: tuple[str, ...]
    mutant: Mutant | None = None


@dataclass(slots=True)
class _Fork:
    task: Task
    pid: int
    out: Path
    deadline_s: float


@dataclass(slots=True)
class Judge:
    """Runs tasks in forks of this process, some at once. cpu_s_max: how much each may compute.

    On a busy machine that says more than the time that passes; that is limited for those that wait for ever.
    """

    root: Path
    workers: int
    directory: Path
    cpu_s_max: int = 600
    wall_s_max: float = 1200.0
    forks: dict[int, _Fork] = field(default_factory=dict)
    cpu_s: float = 0.0
    """Of the fork that has ended last."""

    def results(self, tasks: Sequence[Task]) -> Iterator[tuple[Task, int | None, str]]:
        """Each task with pytest's exit code, None if it took too long, and what was said; as they end."""
        waiting = deque(tasks)
        try:
            while waiting or self.forks:
                while waiting and len(self.forks) < self.workers:
                    self._begin(waiting.popleft())
                now_s = time.monotonic()
                pause_s = max(0.0, min(fork.deadline_s for fork in self.forks.values()) - now_s)
                ended, _, _ = select.select([*self.forks], [], [], pause_s)
                late = [end for end, fork in self.forks.items() if time.monotonic() >= fork.deadline_s]
                for end in {*ended, *late}:
                    yield self._end(end, timely=end in ended)
        finally:
            for end in [*self.forks]:
                self._end(end, timely=False)

    def _begin(self, task: Task) -> None:
        sys.stdout.flush()
        out = Path(tempfile.mkdtemp(dir=self.directory))
        pid = os.fork()
        if not pid:
            code = 98
            try:
                code = _judged(task, self.root, out, self.cpu_s_max)
            finally:
                os._exit(code)
        self.forks[os.pidfd_open(pid)] = _Fork(task, pid, out, time.monotonic() + self.wall_s_max)

    def _end(self, end: int, *, timely: bool) -> tuple[Task, int | None, str]:
        fork = self.forks.pop(end)
        for signalled in (os.killpg, os.kill):  # its children, too
            try:
                signalled(fork.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        _, status, used = os.wait4(fork.pid, 0)
        self.cpu_s = used.ru_utime + used.ru_stime
        os.close(end)
        said = (fork.out / "said").read_text(errors="replace") if (fork.out / "said").exists() else ""
        shutil.rmtree(fork.out, ignore_errors=True)
        return fork.task, os.waitstatus_to_exitcode(status) if timely else None, said


def _judged(task: Task, root: Path, out: Path, cpu_s_max: int) -> int:
    """In the fork: the exit code of its tests."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s_max, cpu_s_max))
    said = os.open(out / "said", os.O_WRONLY | os.O_CREAT)
    for descriptor in (1, 2):
        os.dup2(said, descriptor)
    resource.setrlimit(resource.RLIMIT_DATA, (8 << 30, 8 << 30))  # a loop may gather without end
    os.chdir(root)
    sys.path[:0] = [str(root), str(root / "src")]
    changed = _Changed(task.module, root / task.file, task.text)
    sys.meta_path.insert(0, changed)
    hypothesis, pytest = importlib.import_module("hypothesis"), importlib.import_module("pytest")
    phases = hypothesis.Phase.explicit, hypothesis.Phase.generate  # nobody looks at a smallest example
    hypothesis.settings.register_profile("mutants", derandomize=True, database=None, phases=phases)
    hypothesis.settings.load_profile("mutants")  # what conftest.py makes of it keeps these
    options = [
        "-x",
        "-q",
        "--no-header",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:randomly",
        "-m",
        "not slow and not thorough",
    ]
    code = int(pytest.main([*options, "-o", "timeout=0", f"--basetemp={out / 'tmp'}", *task.tests]))
    loaded = sys.modules.get(task.module)  # None: it raised while it was imported
    if not changed.has_run or (loaded is not None and not isinstance(loaded.__loader__, _Changed)):
        return NOT_IMPORTED
    return code


# ---------------------------------------------------------------------- what is said


class Broken(Exception):
    """The tests are red without a mutant, or have not looked at the mutant."""


def judged(
    file: str, tests: tuple[str, ...], seed: int, count: int, *, root: Path = ROOT, package: str = "lastwords.",
    workers: int = 2,
) -> Iterator[tuple[Mutant, str, str]]:  # fmt: skip
    """Mutants of a file with KILLED or SURVIVED, and by what, as that is known. Broken if it cannot be said."""
    assert not any(name.partition(".")[0] == "lastwords" for name in sys.modules), "forks would not import it anew"
    source = (root / file).read_text(encoding="utf-8")
    module = package + file.removesuffix(".py").replace("/", ".")
    with tempfile.TemporaryDirectory(prefix="mutants-") as directory:
        judge = Judge(root, workers, Path(directory))
        unchanged = Task(file, module, source, tests)
        [(_, code, said)] = judge.results([unchanged])
        if code != GREEN:
            raise Broken(f"{file}: its tests are not green without a mutant (exit code {code})\n{said}")
        judge.cpu_s_max, judge.wall_s_max = round(3 + 3 * judge.cpu_s), 300 + 100 * judge.cpu_s
        mutants = drawn(mutants_of(source, file), count, seed)
        tasks = [Task(file, module, mutant.applied(source), tests, mutant) for mutant in mutants]
        for task in tasks:
            compile(task.text, file, "exec")  # what does not would count as killed
        for task, code, said in judge.results([*tasks, unchanged]):
            if task.mutant is None:  # once more: what makes it red now has killed mutants, too
                if code != GREEN:
                    raise Broken(f"{file}: its tests are green no more without a mutant (exit code {code})\n{said}")
                continue
            if code is not None and code >= 4:
                raise Broken(f"{task.mutant}: exit code {code}\n{said}")
            failed = re.search(r"^(?:FAILED|ERROR) (\S+)", said, re.MULTILINE)
            how = "time" if code is None else failed[1] if failed else f"exit code {code}"
            yield task.mutant, SURVIVED if code == GREEN else KILLED, "" if code == GREEN else how


def reasons(root: Path = ROOT) -> dict[tuple[str, str, str], str]:
    """Why a mutant may survive, by file and by its line before and after."""
    listed = json.loads((root / REASONS).read_text(encoding="utf-8"))
    return {(one["file"], one["before"], one["after"]): one["reason"] for one in listed}


def tree_seed(root: Path = ROOT) -> int:
    """The seed of the last commit."""
    tree = subprocess.run(["git", "rev-parse", "HEAD^{tree}"], cwd=root, capture_output=True, text=True, check=True)
    return int(tree.stdout[:8], 16)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help="of " + ", ".join(NEAREST_TESTS))
    parser.add_argument("--seed", type=int, help="default: of the last commit's tree")
    parser.add_argument("-n", type=int, default=25, help="mutants of each file")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", type=Path, help="where all results go")
    given = parser.parse_args()
    seed = tree_seed() if given.seed is None else given.seed
    files = {file: NEAREST_TESTS[file] for file in given.files or NEAREST_TESTS}
    print(f"{given.n} mutants of each of {len(files)} files, seed {seed}", flush=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # not without ending the forks
    sys.dont_write_bytecode = False  # each fork would compile the same modules again
    os.environ["OMP_NUM_THREADS"] = "1"
    for name in PRELOADED:
        importlib.import_module(name)
    known, results = reasons(), []
    begun_s = time.monotonic()
    try:
        for file, tests in files.items():
            if file.startswith("optim_wrapper/"):
                importlib.import_module("torch")  # makes forks slower, and imports of it faster
            found = list(_told(judged(file, tests, seed, given.n, workers=given.workers), known))
            _score(file, [verdict for _, verdict, _ in found])
            results += found
    except Broken as error:
        print(error, file=sys.stderr)
        return 2
    killed = _score("all", [verdict for _, verdict, _ in results])
    print(f"{time.monotonic() - begun_s:.0f} s")
    if given.json is not None:
        rows = [
            {"file": mutant.file, "line": mutant.line, "before": mutant.before, "after": mutant.after}
            | {"verdict": verdict, "by": how}
            for mutant, verdict, how in results
        ]
        given.json.write_text(json.dumps({"seed": seed, "mutants": rows}, indent=1) + "\n", encoding="utf-8")
    if killed < KILLED_SHARE_MIN:
        print(f"less than {KILLED_SHARE_MIN:.0%} of the mutants were killed", file=sys.stderr)
        return 1
    return 0


def _told(
    results: Iterator[tuple[Mutant, str, str]], known: Mapping[tuple[str, str, str], str]
) -> Iterator[tuple[Mutant, str, str]]:
    for mutant, verdict, how in results:
        if verdict == SURVIVED:
            why = known.get((mutant.file, mutant.before.strip(), mutant.after.strip()), "NOT EXPLAINED")
            print(f"{mutant}\n    {why}", flush=True)
        yield mutant, verdict, how


def _score(name: str, verdicts: Sequence[str]) -> float:
    """Says and returns the share of mutants that were killed."""
    killed = verdicts.count(KILLED)
    share = killed / max(len(verdicts), 1)
    print(f"{name:36} {killed:4} of {len(verdicts):4} killed, {100 * share:5.1f} %", flush=True)
    return share


if __name__ == "__main__":
    sys.exit(main())
