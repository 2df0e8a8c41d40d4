"""lightning_script.py under the library's older name."""

from pathlib import Path

import pytorch_lightning  # noqa: F401  # what --auto looks for in a script

_file = Path(__file__).with_name("lightning_script.py")
exec(compile(_file.read_text(encoding="utf-8").replace("lightning.pytorch", "pytorch_lightning"), _file, "exec"))
