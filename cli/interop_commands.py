"""`lastwords convert`, `export` and `diff`: their arguments and what they print. The work is in `integrations`."""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Callable
from pathlib import Path

from lastwords.cli import tables
from lastwords.cli.checkpoint_commands import ExitCode, print_json
from lastwords.errors import ConfigError
from lastwords.integrations.bars import bar

COMMANDS = ("convert", "export", "diff")
_SUFFIXES = {"": 1, "KB": 1000, "MB": 1000**2, "GB": 1000**3, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}
_DIFFERENT_ROWS_MAX = 40

Add = Callable[[str, str], argparse.ArgumentParser]


def add_parsers(add: Add) -> None:
    """Adds the three commands; `add(name, what)` makes a parser without arguments."""
    convert = add("convert", "rewrite a checkpoint as one of torch.distributed.checkpoint, or the reverse")
    convert.add_argument("source", type=Path, metavar="SRC", help="what to read")
    convert.add_argument(
        "out",
        type=Path,
        metavar="DST",
        help="--to dcp: the directory to create; --to lastwords: the directory that holds checkpoints",
    )
    convert.add_argument("--to", required=True, choices=("dcp", "lastwords"), help="the format of DST")
    convert.add_argument("--model-key", default="model", metavar="KEY", help="the model's key (default model)")
    convert.add_argument("--optim-key", default="optim", metavar="KEY", help="the optimizer's key (default optim)")
    convert.add_argument(
        "--step", type=int, metavar="N", help=("--to lastwords: the global step, if SRC does not record it")
    )
    convert.add_argument(
        "--optimizer",
        default="",
        metavar="CLASS",
        help=("--to lastwords: the optimizer's class, such as AdamW, if SRC does not record it"),
    )
    convert.add_argument(
        "--buffer",
        action="append",
        default=[],
        metavar="PATTERN",
        help="--to lastwords: names of the buffers, if SRC does not record them",
    )
    _chosen(convert, "--to dcp: ")
    convert.add_argument(
        "--ranks", type=int, metavar="N", help="--to lastwords: the number of ranks that will resume (default 1)"
    )
    _units(convert)
    export = add("export", "write weights as model-0000k-of-0000K.safetensors and an index")
    export.add_argument("path", type=Path, metavar="PATH", help="a checkpoint, or the directory that holds them")
    export.add_argument("out", type=Path, metavar="OUT", help="the directory to create; it must not exist")
    export.add_argument("--shard-size", default="5GB", metavar="SIZE", help="maximum size of a file (default 5GB)")
    _chosen(export, "")
    _units(export)
    diff = add("diff", "compare two checkpoints by tensor, whatever their layouts; exit code 0 same, 1 different")
    diff.add_argument("a", type=Path, metavar="A", help="a checkpoint, or the directory that holds them")
    diff.add_argument("b", type=Path, metavar="B", help="another")
    diff.add_argument("--weights", action="store_true", help="compare parameters and buffers only")
    diff.add_argument("--all", action="store_true", help="show every difference")
    diff.add_argument("--json", action="store_true", help="print one JSON document instead of a table")


def _chosen(parser: argparse.ArgumentParser, where: str) -> None:
    what = f"{where}only tensors with such a name, '*' for anything; may be repeated"
    parser.add_argument("--name", action="append", default=[], metavar="PATTERN", help=what)
    what = f"{where}OTHER and NAME were saved separately and are the same weight; may be repeated"
    parser.add_argument("--tied", action="append", default=[], metavar="OTHER=NAME", help=what)
    what = f"{where}the model's floating-point tensors in this type: bfloat16"
    parser.add_argument("--dtype", default="", metavar="TYPE", help=what)
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def _units(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--unit", action="append", default=[], metavar="UNIT", help="only this unit (a pipeline stage); may be repeated"
    )


def run(arguments: argparse.Namespace) -> ExitCode:
    """Runs one of the commands; returns its exit code."""
    if arguments.command == "diff":
        return _diff(arguments)
    return _convert(arguments) if arguments.command == "convert" else _export(arguments)


def _convert(arguments: argparse.Namespace) -> ExitCode:
    with bar("convert") as progress:
        path = _converted(arguments, progress)
    if arguments.json:
        print_json({"path": str(path)})
    else:
        print(path)
    return ExitCode.OK


def _converted(arguments: argparse.Namespace, progress: Callable[[int, int], None] | None) -> Path:
    model, optimizer = arguments.model_key, arguments.optim_key
    if arguments.to == "dcp":
        for option in ("step", "optimizer", "buffer", "ranks"):
            if getattr(arguments, option) not in (None, "", []):
                raise ConfigError(f"--{option} says what a foreign checkpoint does not; it requires --to lastwords")
        from lastwords.integrations.dcp_out import to_dcp  # brings torch, which most commands do without

        return to_dcp(
            arguments.source,
            arguments.out,
            model=model,
            optimizer=optimizer,
            units=arguments.unit,
            names=arguments.name,
            dtype=arguments.dtype,
            tied=_ties(arguments.tied),
            progress=progress,
        )
    from lastwords.integrations.dcp_in import Told, from_dcp

    for option in ("unit", "name", "dtype", "tied"):
        if getattr(arguments, option):
            raise ConfigError(f"--{option} selects what is read from a lastwords checkpoint; it requires --to dcp")
    told = Told(arguments.step, arguments.optimizer, ranks=1 if arguments.ranks is None else arguments.ranks)
    if arguments.buffer:
        told = dataclasses.replace(told, buffers=(*told.buffers, *arguments.buffer))
    return from_dcp(arguments.source, arguments.out, told, model=model, optimizer=optimizer, progress=progress)


def _export(arguments: argparse.Namespace) -> ExitCode:
    from lastwords.integrations.export import export_safetensors  # brings torch, which most commands do without

    with bar("export") as progress:
        files = export_safetensors(
            arguments.path,
            arguments.out,
            shard_bytes_max=size_of(arguments.shard_size),
            units=arguments.unit,
            names=arguments.name,
            dtype=arguments.dtype,
            tied=_ties(arguments.tied),
            progress=progress,
        )
    if arguments.json:
        print_json({"path": str(arguments.out), "files": [file.name for file in files]})
        return ExitCode.OK
    for file in files:
        print(file)
    return ExitCode.OK


def _diff(arguments: argparse.Namespace) -> ExitCode:
    from lastwords.integrations.diff import diff

    found = diff(arguments.a, arguments.b, weights_only=arguments.weights)
    if arguments.json:
        content = {
            "a": {"path": str(found.a), "global_step": found.steps[0]},
            "b": {"path": str(found.b), "global_step": found.steps[1]},
            "same": found.same,
            "differences": [dataclasses.asdict(item) for item in found.differences],
        }
        print_json(content)
        return ExitCode.NOTHING_FOUND if found.differences else ExitCode.OK
    console = tables.console()
    console.print(
        tables.facts([("A", f"{found.a} (step {found.steps[0]})"), ("B", f"{found.b} (step {found.steps[1]})")])
    )
    shown = found.differences if arguments.all else found.differences[:_DIFFERENT_ROWS_MAX]
    rows = [(item.name, item.what, item.text, "" if item.largest is None else f"{item.largest:.3g}") for item in shown]
    if rows:
        columns = ("what", "differs in", "A, B", "largest difference")
        console.print(tables.table("Differences", columns, rows, right=columns[3:]))
    left = len(found.differences) - len(shown)
    text = f"{found.same} the same bit for bit, {len(found.differences)} different"
    console.print(tables.plain(text + (f" ({left} not shown; --all shows them)" if left else "")))
    return ExitCode.NOTHING_FOUND if found.differences else ExitCode.OK


def _ties(texts: list[str]) -> dict[str, str]:
    ties = dict(text.split("=", 1) for text in texts if "=" in text.strip("="))
    if len(ties) != len(texts):
        raise ConfigError(f"--tied {' --tied '.join(texts)}: write each OTHER=NAME, and each OTHER once")
    return ties


def size_of(text: str) -> int:
    """Bytes in words of a person.

    >>> size_of("5GB"), size_of("1.5 MiB"), size_of("700")
    (5000000000, 1572864, 700)
    """
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) *([A-Za-z]*)", text)
    if found is None or found[2].upper() not in _SUFFIXES:
        raise ConfigError(
            f"{text!r} is not a size; write a number of bytes, or a number with KB, MB, GB, KiB, MiB or GiB"
        )
    return int(float(found[1]) * _SUFFIXES[found[2].upper()])
