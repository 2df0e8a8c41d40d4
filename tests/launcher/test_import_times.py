"""What the launcher hears of the imports of a script, when its training loop begins."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest

from tests.launcher.forked import Forks

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]

LONG = "import signal\nsignal.sigtimedwait((), 0.1)\n"
MODULES = {
    "slow": f"import below\n{LONG}",
    "below": LONG,
    "package/__init__": "",
    "package/deep": LONG,
    "package/lazy": LONG,
    "chosen/__init__": f"import chosen.part\n{LONG}",
    "chosen/part": LONG,
    "quick": "",
    "preloaded": LONG,
    "of_a_rank": f"import os\nrank = os.environ['RANK']\n{LONG}",
    "grpc/late": LONG,
    "raises": f"{LONG}raise ValueError",
}
SCRIPT = """
import grpc, importlib.util, json, os, sys, traceback
found = type(importlib.util.find_spec("late")).__name__
import quick, slow, preloaded, of_a_rank
grpc.__path__.append(os.path.dirname(__file__) + '/grpc')
import grpc.late
from package import deep
installed = os.path.dirname(grpc.__file__) + "/lazy.py"
library = compile("import importlib; importlib.import_module(name)", installed, "exec")
exec(library, {"__name__": "library", "name": "chosen"})
exec(library, {"__name__": "package.of_it", "name": "package.lazy"})
try:
    import raises
except ValueError as error:
    frames = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
from lastwords.optim_wrapper.launch.reporter import reporter
reporter().begun(3, lacks="")
import late
reporter().begun(4, lacks="")
specs = {found} | {type(module.__spec__).__name__ for module in (quick, slow, deep, preloaded)}
print(json.dumps([frames, [*specs], [type(one).__name__ for one in sys.meta_path if not isinstance(one, type)]]))
"""


def test_the_launcher_hears_which_modules_take_long_that_could_be_preloaded() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        for name, text in {**MODULES, "late": LONG, "script": SCRIPT}.items():
            path = Path(directory, f"{name}.py")
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        script = str(Path(directory, "script.py"))
        with Forks(Path(directory), preload=["of_a_rank", "preloaded"]) as forks:
            done = forks.run(script)
            first, second = forks.heard()
    assert done.code == 0, done.err
    imports = dict(first["imports"])
    assert [*imports] == ["slow", "package.deep", "package.lazy"], "and not what another library imports"
    assert imports["slow"] >= 0.2, "with what it imports"
    assert second["imports"] == []
    frames, specs, finders = json.loads(done.out)
    assert frames == ["<module>", "<module>"]
    assert specs == ["ModuleSpec"]
    assert "ImportTimes" not in finders
