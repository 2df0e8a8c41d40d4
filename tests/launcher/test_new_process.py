"""A rank that `lastwords run` has forked finds what a process finds that torchrun has started; and ends as it does."""

from __future__ import annotations

import json
import os
import py_compile
import re
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lastwords.launcher.command import _program, parser
from tests import golden
from tests.launcher import properties
from tests.launcher.forked import ROOT, Done, Forks, environment
from tests.patience import until

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]

RANKS = range(2)
LAUNCHERS = {"torchrun": ["torch.distributed.run"], "lastwords run": ["lastwords.cli", "run"]}
SCRIPT = properties.__file__
Found = dict[str, list[dict[str, Any]]]


def job(directory: Path, module: list[str]) -> list[dict[str, Any]]:
    """What each rank has found; what it has written to stdout and stderr is in a file, and on those of the launcher."""
    flags = ["--standalone", "--nproc-per-node", str(len(RANKS)), "--log-dir", str(directory / "logs")]
    command = [sys.executable, "-m", *module, *flags, "--redirects", "3", "--tee", "0:3", SCRIPT, str(directory), "all"]
    done = subprocess.run(
        command, env=environment(), cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr
    for name, stream in (("out", done.stdout), ("err", done.stderr)):
        teed = [line.partition(":")[2] for line in stream.splitlines() if line.startswith("[default")]
        assert teed == [f"{name} of rank {RANKS[0]}"]
    found = []
    for rank in RANKS:
        for stream in ("out", "err"):
            (file,) = (directory / "logs").glob(f"*/attempt_0/{rank}/std{stream}.log")
            assert file.read_text().count(f"{stream} of rank {rank}") == 1
        assert len((directory / f"at-exit-{rank}").read_text().splitlines()) == 1
        found.append(json.loads((directory / f"rank-{rank}.json").read_text()))
    shutil.rmtree(directory)
    return found


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Of each launcher, by rank."""
    directory, found = tmp_path_factory.mktemp("jobs") / "job", {}
    for name, module in LAUNCHERS.items():
        directory.mkdir()
        found[name] = job(directory, module)
    return found


@pytest.mark.parametrize("name", [*properties.LIGHT, *properties.HEAVY])
def test_a_rank_finds_what_it_would_find_under_torchrun(jobs: Found, name: str) -> None:
    for forked, started in zip(jobs["lastwords run"], jobs["torchrun"], strict=True):
        assert forked[name] == started[name]
    assert "Error" not in str(jobs["torchrun"][0][name])


@pytest.mark.parametrize("name", properties.OWN)
def test_what_is_a_processs_own_is_different_in_each(jobs: Found, name: str) -> None:
    values = [str(found[name]) for ranks in jobs.values() for found in ranks]
    assert len({*values}) == 2 * len(RANKS), values


def test_no_rank_has_a_variable_of_lastwords(jobs: Found) -> None:
    for found in jobs["lastwords run"]:
        _, names = found["environment"]
        assert not [name for name in names if name.startswith("LASTWORDS_")]


BINDING = """
import sys
from torch.numa import binding
near = int(sys.argv.pop(1)), int(sys.argv.pop(1))
binding._get_validated_logical_cpus_to_bind_to = lambda gpu_index, numa_options: {near[gpu_index]}
from lastwords.cli.main import main
main()
"""
"""The command, where each rank has a device that is near to one processor."""


def test_a_rank_is_bound_to_the_processors_that_torch_would_bind_it_to(tmp_path: Path) -> None:
    script, cpus = tmp_path / "train.py", sorted(os.sched_getaffinity(0))
    script.write_text(
        "import os\nwith open(f'{__file__}.{os.environ[\"RANK\"]}', 'w') as file:\n"
        "    file.write(str([*os.sched_getaffinity(0)]))"
    )
    near = cpus[0], cpus[-1]
    flags = ["run", "--standalone", "--nproc-per-node", str(len(RANKS)), "--numa-binding", "node", str(script)]
    command = [sys.executable, "-c", BINDING, *map(str, near), *flags]
    done = subprocess.run(command, env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    assert [Path(f"{script}.{rank}").read_text() for rank in RANKS] == [str([cpu]) for cpu in near]


# ---------------------------------------------------------------------- forks of one server


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    with Forks.anywhere() as forks:
        yield forks


FORMS = ("script", "compiled", "directory", "zip", "module", "package")


def form(place: Path, name: str) -> tuple[str, bool]:
    """The same program in a form that Python knows: what to run, and whether that is a module."""
    package = place / f"a_{name}"
    package.mkdir()
    for file in ("__main__.py", "__init__.py", "train.py"):
        shutil.copy(SCRIPT, package / file) if file != "__init__.py" else (package / file).touch()
    if name == "zip":
        with zipfile.ZipFile(place / "all.zip", "w") as archive:
            archive.write(package / "__main__.py", "__main__.py")
    if name == "compiled":
        py_compile.compile(str(package / "train.py"), str(package / "train.pyc"))
    return {
        "compiled": (str(package / "train.pyc"), False),
        "script": (os.path.relpath(package / "train.py"), False),
        "directory": (str(package), False),
        "zip": (str(place / "all.zip"), False),
        "module": ("a_module.train", True),
        "package": ("a_package", True),
    }[name]


@pytest.mark.parametrize("name", FORMS)
def test_a_program_of_any_form_is_the_main_one(forks: Forks, tmp_path: Path, name: str) -> None:
    target, is_module = form(forks.directory, name)
    found = []
    for run in (forks.run, forks.plain):
        done = run(target, str(tmp_path), "light", is_module=is_module)
        assert done == Done(0, "out of rank 1\n", "err of rank 1\n")
        found.append(json.loads((tmp_path / "rank-1.json").read_text()))
    for one in ("arguments", "search_path", "main_attributes", "main_module", "pickled_classes"):
        assert found[0][one] == found[1][one], one


ENDINGS = {
    "the end": "print('done')",
    "exit": "import sys; sys.exit()",
    "exit 3": "import sys; sys.exit(3)",
    "exit text": "import sys; sys.exit('no samples')",
    "own error": "def read(path):\n    raise ValueError(path)\n\nread('a file')",
    "chain": "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    raise KeyError(7) from error",
    "syntax": "def main(:\n    pass",
    "interrupt": "raise KeyboardInterrupt",
    "at exit": "import atexit\natexit.register(lambda: 1 / 0)",
    "abrupt": "import os; print('lost', end=''); os._exit(4)",
    "killed": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "no script": "import os\nos.rename(__file__, __file__ + '.gone')\nraise ValueError",
    "thread": "import threading\nthreading.Thread(target=lambda: print('of a thread')).start()",
    "hook": "import sys\nsys.excepthook = lambda *error: print(error[:2])\nraise ValueError(7)",
    "open files": "file = open(__file__ + '.rows', 'w')\nfile.write('1,2')\ncycle = [file]\ncycle.append(cycle)",
    "open files at an error": "file = open(__file__ + '.rows', 'w')\nfile.write('1,2')\nraise ValueError",
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_program_ends_as_a_process_of_its_own(forks: Forks, tmp_path: Path, ending: str) -> None:
    script, rows = tmp_path / "train.py", tmp_path / "train.py.rows"
    ends = []
    for run in (forks.plain, forks.run):
        script.write_text(ENDINGS[ending])
        done = run(str(script))
        err = re.sub("0x[0-9a-f]+", "ADDRESS", done.err)
        ends.append((done.code, done.out, err, rows.read_text() if rows.exists() else ""))
        rows.unlink(missing_ok=True)
    assert ends[0] == ends[1]
    if "files" in ending:
        assert ends[0][-1] == "1,2"


def test_ps_tells_ranks_apart_and_has_no_environment_of_theirs(forks: Forks, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os\nprint(open('/proc/self/cmdline').read().strip('\\0'))\n"
        "print(os.environ['OWN'], 'OWN=' in open('/proc/self/environ').read())"
    )
    out = forks.run(str(script), "--lr", "1", OWN="mine").out
    assert out == f"{script} --lr 1 [lastwords rank 1]\nmine False\n"


def test_names_that_are_no_unicode_are_passed_on(forks: Forks, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import os, sys\nprint(ascii([sys.argv[1:], os.environ['ODD']]))")
    odd = os.fsdecode(b"a\xffb")
    done = forks.run(str(script), odd, ODD=odd)
    assert done == forks.plain(str(script), odd, ODD=odd)
    assert done.code == 0


@pytest.mark.parametrize("rank", ["0", "1"])
def test_settings_that_come_too_late_are_named_by_one_rank(forks: Forks, tmp_path: Path, rank: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os\nos.environ.update(OMP_NUM_THREADS='3', ATEN_CPU_CAPABILITY='default', OMP_PLACES='cores')\n"
        "from lastwords.optim_wrapper.launch import reporter\nreporter.reporter().begun(0, lacks='')"
    )
    done = forks.run(str(script), LOCAL_RANK=rank, OMP_PLACES="cores")
    assert done.code == 0
    assert ("ATEN_CPU_CAPABILITY, OMP_NUM_THREADS" in done.err) is (rank == "0")
    if rank == "0":
        golden.says(done.err)


def test_settings_of_the_compiler_the_log_and_a_preloaded_hub_come_too_late_and_others_do_not(tmp_path: Path) -> None:
    (tmp_path / "datasets.py").touch()
    script = tmp_path / "train.py"
    names = (
        "TORCHINDUCTOR_MAX_AUTOTUNE",
        "TORCHINDUCTOR_CACHE_DIR",
        "TORCH_LOGS",
        "HF_HOME",
        "TRANSFORMERS_CACHE",
        "MY_SETTING",
    )
    script.write_text(
        f"import os\nos.environ.update(dict.fromkeys({names}, 'x'))\n"
        "from lastwords.optim_wrapper.launch import reporter\nreporter.reporter().begun(0, lacks='')"
    )
    with Forks(tmp_path, preload=["datasets"]) as hub:
        done = hub.run(str(script), LOCAL_RANK="0")
    assert done.code == 0
    golden.says(done.err)


def test_a_safe_search_path_stays_safe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    (tmp_path / "beside.py").touch()
    script = tmp_path / "train.py"
    script.write_text("import lastwords\nprint(lastwords.__name__)\nimport beside")
    with Forks.anywhere() as safe:
        done = safe.run(str(script))
        assert done == safe.plain(str(script))
        assert (done.code, done.out) == (1, "lastwords\n")


def test_what_variables_say_to_the_interpreter_holds_in_each_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OPTIMIZE", "DEVMODE", "FAULTHANDLER", "NOUSERSITE", "UTF8"):
        monkeypatch.setenv(f"PYTHON{name}", "1")
    monkeypatch.setenv("PYTHONWARNINGS", "error::ImportWarning")
    found = []
    with Forks.anywhere() as forks:
        for run in (forks.run, forks.plain):
            assert run(SCRIPT, str(tmp_path), "light").code == 0
            found.append(json.loads((tmp_path / "rank-1.json").read_text()))
    for name in ("arguments", "interpreter"):
        assert found[0][name] == found[1][name], name
    flags = dict(zip(sys.flags.__match_args__, found[0]["arguments"][3], strict=False))
    assert (flags["optimize"], flags["dev_mode"], flags["no_user_site"], flags["utf8_mode"]) == (1, True, 1, 1)
    assert "error::ImportWarning" in found[0]["arguments"][4]


@pytest.mark.parametrize("module", LAUNCHERS.values(), ids=LAUNCHERS)
def test_flags_of_the_launchers_interpreter_are_not_the_ranks(module: list[str], tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys\nprint('rank', __debug__, sys.flags.dev_mode)")
    command = [sys.executable, "-O", "-X", "dev", "-W", "ignore", "-m", *module, "--standalone", str(script)]
    done = subprocess.run(command, env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert (done.returncode, done.stdout) == (0, "rank True False\n"), done.stderr


def test_the_traceback_of_a_module_is_that_of_python(forks: Forks) -> None:
    (forks.directory / "a_module_that_fails.py").write_text("raise ValueError('too small')")
    for module in ("a_module_that_fails", "a_module_that_is_not_there"):
        done = forks.run(module, is_module=True)
        assert done == forks.plain(module, is_module=True)
        assert done.code == 1


REFUSED = {
    "by run": (2, "import lastwords\nlastwords.run(None)"),
    "in main": (2, "import lastwords\ndef main():\n    raise lastwords.ConfigError('no')\nlastwords.run(main)"),
    "without run": (
        2,
        "import lastwords\ndef main():\n    lastwords.protect('ckpt', model=None, optimizer=None)\nmain()",
    ),
    "busy": (5, "from lastwords.errors import BusyError\nraise BusyError('another process runs')"),
}


@pytest.mark.parametrize(("code", "text"), REFUSED.values(), ids=REFUSED)
def test_what_lastwords_refuses_is_one_line_and_the_launcher_hears_that_it_would_come_again(
    forks: Forks, tmp_path: Path, code: int, text: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text(text)
    done = forks.run(str(script))
    assert (done.code, done.out) == (code, "")
    (line,) = done.err.splitlines()
    golden.says(line)
    (said,) = forks.heard()
    assert (f"lastwords: rank 1: {said['error']}", said["lasting"]) == (line, True)


def test_the_launcher_hears_of_no_script_that_ends_well(forks: Forks, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import sys; sys.exit()")
    assert forks.run(str(tmp_path / "train.py")).code == 0
    assert forks.heard() == []


COUNTS = """
import os, sys
sys.path.insert(0, os.environ["ROOT"])
from tests.launcher.properties import thread_counts, work_of_several_threads
print(thread_counts(), work_of_several_threads())
"""


def test_with_two_threads_all_pools_have_two(forks: Forks, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(COUNTS)
    more = {"OMP_NUM_THREADS": "2", "ROOT": str(ROOT)}
    forked, alone = (
        forks.run(str(tmp_path / "train.py"), threads=2, **more),
        forks.plain(str(tmp_path / "train.py"), **more),
    )
    assert forked == alone
    assert alone.out.startswith("(2, ")


@pytest.mark.parametrize(
    ("ranks", "variable", "threads"), [(1, "", 7), (2, "", 1), (1, "3", 3), (2, "3", 3), (2, "0", 7), (2, "x", 7)]
)
def test_a_rank_has_as_many_threads_as_torchrun_would_give_it(
    ranks: int, variable: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of this host's seven."""
    monkeypatch.setattr("lastwords.launcher.command.torch.get_num_threads", lambda: 7)
    monkeypatch.setenv("OMP_NUM_THREADS", variable)
    if not variable:
        monkeypatch.delenv("OMP_NUM_THREADS")
    arguments = parser().parse_args(["train.py"])
    config: Any = type("Config", (), {"nproc_per_node": ranks})
    assert _program(arguments, config, "python").threads == threads


def test_ctrl_c_ends_a_rank_as_it_ends_any_process(forks: Forks, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import signal\nprint('ready')\ntry:\n    signal.pause()\nfinally:\n    print('left')")
    process = forks.start(str(script))
    out = Path(forks.directory / f"{forks.count}.out")
    until(lambda: out.exists() and "ready" in out.read_text())
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(60) == -signal.SIGINT
    assert out.read_text() == "ready\nleft\n"
