"""`integrations.lightning` for scripts that import `pytorch_lightning`, the older name of `lightning.pytorch`.

Its makers publish one text under both names, with the imports changed; this does the same with ours.
"""

from pathlib import Path

_file = Path(__file__).with_name("lightning.py")
exec(compile(_file.read_text(encoding="utf-8").replace("lightning.pytorch", "pytorch_lightning"), _file, "exec"))
