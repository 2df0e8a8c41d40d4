"""Folders, links, package lists and wheel agree: a forgotten sub-package would vanish from a wheel in silence."""

from __future__ import annotations

import email
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import readme
from tools import build_dist

ROOT = Path(__file__).resolve().parents[1]
IGNORED = shutil.ignore_patterns("__pycache__", "*.pyc", "*.egg-info")
EPOCH_S = 1_700_000_000
FIX = "add it to [tool.setuptools] packages and package-dir in pyproject.toml, and link it in src/lastwords"


def _pyproject() -> dict[str, Any]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        return tomllib.load(file)


def _package_dirs() -> dict[str, str]:
    return dict(_pyproject()["tool"]["setuptools"]["package-dir"])


def _links(folder: Path) -> dict[str, str]:
    return {f"lastwords.{path.name}": os.readlink(path) for path in sorted(folder.iterdir()) if path.is_symlink()}


def _packages_below(folder: Path, name: str) -> dict[str, Path]:
    """Every package (a folder with an `__init__.py`) in `folder`, itself included, by its dotted name."""
    found: dict[str, Path] = {}
    for init in sorted(folder.rglob("__init__.py")):
        found[".".join([name, *init.parent.relative_to(folder).parts])] = init.parent
    return found


def test_every_listed_package_has_a_folder_and_every_folder_is_listed() -> None:
    setuptools = _pyproject()["tool"]["setuptools"]
    assert sorted(setuptools["packages"]) == sorted(setuptools["package-dir"]), (
        "packages and package-dir in pyproject.toml name different packages"
    )
    on_disk: set[str] = set()
    for name, folder in _package_dirs().items():
        assert (ROOT / folder / "__init__.py").is_file(), f"{name}: {folder}/__init__.py is missing"
        on_disk |= set(_packages_below(ROOT / folder, name))
    forgotten = sorted(on_disk - set(setuptools["packages"]))
    assert not forgotten, f"these packages would be missing from the wheel: {forgotten}; {FIX}"


def test_every_folder_at_the_top_level_that_is_a_package_is_listed_and_linked() -> None:
    not_shipped = {"bench", "demo", "tests", "tools"}
    top_level = {path.parent.name for path in ROOT.glob("*/__init__.py")} - not_shipped
    listed = {folder for folder in _package_dirs().values() if "/" not in folder}
    linked = {target.removeprefix("../../") for target in _links(ROOT / "src" / "lastwords").values()}
    assert top_level == listed == linked, f"folders {top_level}, package-dir {listed}, links {linked}; {FIX}"


def test_links_in_the_source_tree_point_at_the_folders_that_pyproject_names() -> None:
    links = _links(ROOT / "src" / "lastwords")
    expected = {name: f"../../{folder}" for name, folder in _package_dirs().items() if "/" not in folder}
    assert links == expected, FIX


def _copy_sources(target: Path, *, links: bool) -> Path:
    """A copy of what a wheel is built from. links=False: as git checks it out where symlinks are not supported."""
    tree = target / "tree"
    tree.mkdir(parents=True)
    for name in ("pyproject.toml", "README.md", "MANIFEST.in"):
        shutil.copy(ROOT / name, tree / name)
    shutil.copytree(ROOT / "src", tree / "src", symlinks=True, ignore=IGNORED)
    for folder in _package_dirs().values():
        if "/" not in folder:
            shutil.copytree(ROOT / folder, tree / folder, ignore=IGNORED)
    if not links:
        for path in (tree / "src" / "lastwords").iterdir():
            if path.is_symlink():
                link = os.readlink(path)
                path.unlink()
                path.write_text(link, encoding="utf-8")
    return tree


def _build_wheel(tree: Path, out: Path) -> Path:
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(tree)]
    env = {**os.environ, "SOURCE_DATE_EPOCH": str(EPOCH_S)}
    built = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=240)
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,) = out.glob("*.whl")
    return wheel


def _source_files() -> set[str]:
    """Name inside the wheel of every file that has to be in it."""
    wanted: set[str] = set()
    for name, folder in _package_dirs().items():
        for path in (ROOT / folder).glob("*.py"):
            wanted.add(f"{name.replace('.', '/')}/{path.name}")
    page = {f"lastwords/page/static/{path.name}" for path in (ROOT / "page" / "static").iterdir()}
    return wanted | page | {"lastwords/py.typed"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("wheel")
    return _build_wheel(_copy_sources(work, links=True), work / "dist")


@pytest.mark.ci
def test_the_wheel_holds_every_module_and_nothing_else(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    wanted = _source_files()
    assert names >= wanted, f"missing from the wheel: {sorted(wanted - names)}; {FIX}"
    assert {name for name in names if name.endswith(".py")} == {name for name in wanted if name.endswith(".py")}
    assert all(name.startswith("lastwords/") for name in names), "the wheel may not install bare top-level names"


@pytest.mark.ci
def test_a_clone_without_symlinks_builds_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    other = _build_wheel(_copy_sources(tmp_path, links=False), tmp_path / "dist")
    assert zipfile.ZipFile(other).namelist() == zipfile.ZipFile(wheel).namelist()
    assert other.read_bytes() == wheel.read_bytes(), "the same sources, built a second time, give other bytes"


@pytest.mark.ci
def test_a_tree_without_package_dir_entries_is_noticed(wheel: Path, tmp_path: Path) -> None:
    """Negative control: the comparison above can fail."""
    tree = _copy_sources(tmp_path, links=False)
    text = (tree / "pyproject.toml").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.strip() != '"lastwords.liveness" = "liveness"']
    text = "\n".join(lines).replace('"lastwords.liveness", ', "")
    (tree / "pyproject.toml").write_text(text, encoding="utf-8")
    broken = zipfile.ZipFile(_build_wheel(tree, tmp_path / "dist")).namelist()
    assert not [name for name in broken if name.startswith("lastwords/liveness/")]
    assert not set(broken) >= _source_files()


def test_the_wheel_says_what_an_index_shows_and_that_it_is_typed(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    said = email.message_from_bytes(archive.read(name))
    project = _pyproject()["project"]
    assert said["Summary"] == project["description"]
    assert said["Requires-Python"] == ">=3.11"
    assert set(said.get_all("Classifier", [])) == set(project["classifiers"])
    assert set(said.get_all("Provides-Extra", [])) == set(project["optional-dependencies"])
    assert str(said.get_payload()).startswith("# lastwords\n")
    assert "Typing :: Typed" in project["classifiers"]


def test_without_a_licence_no_index_takes_it() -> None:
    """Who owns it has not chosen one yet; README.md says so."""
    project = _pyproject()["project"]
    chosen = "license" in project
    assert chosen != ("Private :: Do Not Upload" in project["classifiers"])
    assert chosen != bool(re.search(r"\bno licence\b", (ROOT / "README.md").read_text(encoding="utf-8")))


@pytest.mark.thorough
@pytest.mark.dist
def test_both_distributions_have_the_same_bytes_when_they_are_built_again(tmp_path: Path) -> None:
    built = []
    for attempt in range(2):
        tree = _copy_sources(tmp_path / f"{attempt}", links=True)
        os.utime(tree / "README.md", (attempt, attempt))
        umask = os.umask(0o002 if attempt else 0o077)
        try:
            built.append([path.read_bytes() for path in build_dist.build(tree, tmp_path / f"dist{attempt}", EPOCH_S)])
        finally:
            os.umask(umask)
    wheel, sdist = built[0]
    assert built[0] == built[1]
    with tarfile.open(fileobj=io.BytesIO(sdist)) as archive:
        assert {member.mtime for member in archive} == {EPOCH_S}
    assert zipfile.ZipFile(io.BytesIO(wheel)).testzip() is None


@pytest.mark.thorough
@pytest.mark.dist
def test_another_time_gives_other_bytes(tmp_path: Path) -> None:
    """Negative control."""
    tree = _copy_sources(tmp_path, links=True)
    dists = [build_dist.build(tree, tmp_path / f"dist{later}", EPOCH_S + later) for later in (0, 2)]
    assert [one.name for one in dists[0]] == [one.name for one in dists[1]]
    assert all(one.read_bytes() != other.read_bytes() for one, other in zip(*dists, strict=True))


IMPORT_EVERYTHING = """
import importlib, pkgutil, sys
import lastwords
assert lastwords.__file__.startswith(sys.argv[1]), f"imported from {lastwords.__file__}, not from the installed wheel"
names = ["lastwords"]
for info in pkgutil.walk_packages(lastwords.__path__, "lastwords."):
    names.append(info.name)
    if not info.name.endswith("__main__"):
        try:
            importlib.import_module(info.name)
        except ModuleNotFoundError as error:  # of a library that only its users have
            if error.name.partition(".")[0] not in ("accelerate", "lightning", "pytorch_lightning", "transformers"):
                raise
print("\\n".join(names))
"""


@pytest.mark.process
def test_the_installed_wheel_imports_every_module_outside_the_repository(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", str(target), str(wheel)]
    installed = subprocess.run(install, capture_output=True, text=True, check=False, timeout=240)
    assert installed.returncode == 0, installed.stdout + installed.stderr
    environment = {**os.environ, "PYTHONPATH": str(target)}
    imported = subprocess.run(
        [sys.executable, "-c", IMPORT_EVERYTHING, str(target)],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        cwd=tmp_path,
        env=environment,
    )
    assert imported.returncode == 0, imported.stderr
    missing = set(_package_dirs()) - set(imported.stdout.split())
    assert not missing, f"not in the installed wheel: {sorted(missing)}; {FIX}"


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The commands of a new environment with the wheel and what it needs, which is from the package index."""
    folder = tmp_path_factory.mktemp("installed")
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True, timeout=240)
    install = [folder / "venv/bin/pip", "install", "-c", ROOT / "constraints.txt", wheel]
    installed = subprocess.run(install, capture_output=True, text=True, check=False, timeout=1200)
    assert installed.returncode == 0, installed.stdout + installed.stderr
    yield folder / "venv/bin"
    shutil.rmtree(folder)


WHERE_FROM = """
import lastwords
Path("from").write_text(lastwords.__file__)
"""
DIFF = readme.block("diff", "lastwords")


@pytest.mark.process
@pytest.mark.thorough
@pytest.mark.readme
@pytest.mark.timeout(1800)
def test_the_wheel_in_a_new_environment_trains_heals_resumes_and_inspects(installed: Path, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    folders = [tmp_path / name for name in ("before", "resumed", "healed")]
    for folder in folders:
        folder.mkdir()
    before = readme.trained([installed / "torchrun"], readme.script(DIFF, added=False), folders[0], environment)
    script = readme.script(DIFF) + WHERE_FROM
    resumed = readme.resumed([installed / "torchrun"], script, folders[1], environment)
    assert resumed == before.after_the_kill()
    assert (folders[1] / "from").read_text().startswith(str(installed.parent))
    healed = readme.trained([installed / "lastwords", "run"], readme.script(DIFF), folders[2], environment)
    assert healed.states == before.states
    for folder in folders[1:]:
        inspected = readme.run([installed / "lastwords", "inspect", "ttp_checkpoints"], folder, environment)
        assert re.search(rf"complete +{readme.KILLED_AT - 1} .*died", inspected.stdout), inspected.stdout


@pytest.mark.process
@pytest.mark.thorough
@pytest.mark.readme
@pytest.mark.timeout(1800)
def test_a_script_that_takes_the_clones_package_is_noticed(installed: Path, tmp_path: Path) -> None:
    """Negative control."""
    (tmp_path / "script.py").write_text("from pathlib import Path" + WHERE_FROM)
    for sources, is_installed in (("", True), (str(ROOT / "src"), False)):
        readme.run([installed / "python", "script.py"], tmp_path, {**os.environ, "PYTHONPATH": sources})
        assert (tmp_path / "from").read_text().startswith(str(installed.parent)) == is_installed


EXTRAS = _pyproject()["project"]["optional-dependencies"]
USED = {
    "remote": "from lastwords.checkpoint.remote import store; store.Store(store.address_of('memory://bucket/job'))",
    "s3": "from lastwords.checkpoint.remote import store; store.Store(store.address_of('s3://bucket/job'))",
    "hf": "from lastwords.integrations import accelerate_data, hf, pins; accelerate_data.check(); "
    "pins.check('transformers', hf.VERSIONS, hf.PINNED)",
    "lightning": "from lastwords.integrations import lightning, pins; "
    "pins.check('lightning', lightning.VERSIONS, lightning.PINNED)",
    "page": "import lastwords.page.server",
}
"""Of extras, what a user of them comes to; what is installed has to be what an adaptor was made for."""

NEEDED = """
import importlib.metadata, re, sys, lastwords
for name in sys.argv[1:]:
    print(name, importlib.metadata.version(name))
"""


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("extra", EXTRAS)
def test_the_wheel_installs_with_each_extra_in_a_new_environment(wheel: Path, tmp_path: Path, extra: str) -> None:
    """With what the package index has; `pip check` finds what does not fit together."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True, timeout=240)
    pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    if extra == "s3":  # s3fs needs an older one, as the Makefile says
        pinned = re.sub(r"^python-dateutil==.*$", "", pinned, flags=re.MULTILINE)
    (tmp_path / "constraints.txt").write_text(pinned)
    folder = tmp_path / "venv/bin"
    outside = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    needed = [re.split(r"[\[<>=]", requirement)[0] for requirement in EXTRAS[extra]]
    for command in (
        [folder / "pip", "install", "-c", tmp_path / "constraints.txt", f"{wheel}[{extra}]"],
        [folder / "pip", "check"],
        [folder / "python", "-c", NEEDED, *needed],
        [folder / "python", "-c", USED.get(extra, "")],
        [folder / "lastwords", "--help"],
        [folder / "lastwords", "serve" if extra == "page" else "run", "--help"],
    ):
        done = subprocess.run(
            command, cwd=tmp_path, env=outside, capture_output=True, text=True, check=False, timeout=1200
        )
        assert done.returncode == 0, done.stdout + done.stderr
    shutil.rmtree(tmp_path / "venv")
