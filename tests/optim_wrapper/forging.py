"""Reads checkpoints with forged sizes, in a process that gets little memory and little time for each.

    python -m tests.optim_wrapper.forging DIRECTORY FIRST_SEED LAST_SEED

Sizes, counts and nesting that nobody has written, in manifests, parts and headers, with checksums that are right (and
bytes anywhere, with checksums that are not). Prints a line for everything that is no error of ours.
"""

from __future__ import annotations

import json
import random
import re
import resource
import shutil
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

import xxhash

from lastwords.checkpoint import load, publish
from lastwords.checkpoint.direct_io import CHUNK_BYTES
from lastwords.checkpoint.document import encode_document
from tests.optim_wrapper import test_forged_meta as forged_meta

MEMORY_BYTES = 512 << 20
"""More than this process has when all is imported. The checkpoints have some kilobytes."""

TIME_S = 120
"""For all readers of one checkpoint, which takes a quarter of a second."""

SIZES = (1 << 20, 1 << 31, 1 << 40, (1 << 53) + 1, (1 << 63) - 1, 1 << 63, 1 << 64, 1 << 200, -1, 1e308, 10**4000)


class TooLongError(BaseException):
    """No reader may catch it."""


DEEP = re.compile(rb'"deep (\d+) (\w+)"')
"""Stands for a list in a list in a list, or as many objects, which no encoder would write."""


def with_depth(raw: bytes) -> bytes:
    """The text of a document, with what was announced in it."""

    def written(found: re.Match[bytes]) -> bytes:
        depth, begin, end = int(found[1]), *((b"[", b"]") if found[2] == b"lists" else (b'{"list":', b"}"))
        return begin * depth + b"1" + end * depth

    return DEEP.sub(written, raw)


def another(value: Any, draw: random.Random) -> Any:
    """In the place of this one."""
    if isinstance(value, bool) or not isinstance(value, int | float | list) or draw.random() < 0.2:
        return f"deep {draw.choice((3, 60, 300, 900, 5000, 200_000))} {draw.choice(('lists', 'objects'))}"
    if not isinstance(value, list):
        return draw.choice(SIZES)
    size = draw.choice(SIZES[:5])
    return draw.choice(([size], [size] * 2, [size] * 60, [1] * 60, [1] * 70, value * 1000, [0, size], [size, 0]))


def forged(content: Any, draw: random.Random) -> str:
    """One value in it is another one, in place."""
    inside = [path for path in forged_meta.paths_in(content) if path]
    numbers = [path for path in inside if isinstance(_at(content, path), int | float | list)]
    path = draw.choice(numbers or inside)
    owner = _at(content, path[:-1])
    owner[path[-1]] = another(owner[path[-1]], draw)
    value = owner[path[-1]]
    shown = "10**4000" if isinstance(value, int) and value > 1 << 300 else str(value)[:60]
    return f"{'/'.join(map(str, path))} = {shown}"


def _at(content: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        content = content[key]
    return content


def _document(file: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(file.read_bytes())
    content.pop("checksum")
    return content


CHECKSUM = b'\n"checksum": "'


def dumped(content: Any) -> bytes:
    """As JSON."""
    limit = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        return json.dumps(content).encode()
    finally:
        sys.set_int_max_str_digits(limit)


def encoded(content: dict[str, Any]) -> bytes:
    """With the right checksum. Numbers of more digits than Python reads are written all the same."""
    limit = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        raw = with_depth(encode_document(content))
    finally:
        sys.set_int_max_str_digits(limit)
    begin = raw.index(CHECKSUM) + len(CHECKSUM)
    raw = raw[:begin] + b"0" * 16 + raw[begin + 16 :]
    return raw[:begin] + xxhash.xxh3_64_hexdigest(raw).encode() + raw[begin + 16 :]


def forge_document(path: Path, draw: random.Random) -> str:
    """The manifest, or a part and the manifest that has its checksum."""
    manifest = _document(path / "manifest.json")
    if manifest["tables_in_parts"] and draw.random() < 0.7:
        entry = draw.choice(manifest["files"])
        file = path / Path(entry["path"]).parent / "part.json"
        part = _document(file)
        what = forged(part, draw)
        raw = encoded(part)
        file.write_bytes(raw)
        entry |= {"part_bytes": len(raw), "part_sum": xxhash.xxh3_64_hexdigest(raw)}
    else:
        what = forged(manifest, draw)
    (path / "manifest.json").write_bytes(encoded(manifest))
    return what


def forge_header(path: Path, draw: random.Random) -> str:
    """The header of a data file, its length in front, and all checksums of them."""
    manifest = _document(path / "manifest.json")
    entry = draw.choice(manifest["files"])
    file = path / entry["path"]
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    what = forged(header, draw)
    text = with_depth(dumped(header)) if draw.random() < 0.8 else b"[" * draw.choice((500, 100_000))
    claimed = draw.choice((len(text), len(text), 1 << 26, 99_999_999, 1 << 40, (1 << 63) - 1, 0))
    raw = claimed.to_bytes(8, "little") + text + raw[8 + length :]
    file.write_bytes(raw)
    sums = [xxhash.xxh3_64_hexdigest(raw[at : at + CHUNK_BYTES]) for at in range(0, len(raw), CHUNK_BYTES)]
    entry |= {key: value for key, value in {"bytes": len(raw), "chunks": sums}.items() if key in entry}
    (path / "manifest.json").write_bytes(encode_document(manifest))
    return f"header of {entry['path']}, length {claimed}: {what}"


def forge_bytes(path: Path, draw: random.Random) -> str:
    """Some bytes anywhere, a cut, or more of them."""
    file = draw.choice(sorted(one for one in path.rglob("*") if one.is_file()))
    raw = bytearray(file.read_bytes())
    at = draw.randrange(len(raw))
    how = draw.choice(("flip", "cut", "put", "empty", "long"))
    if how == "flip":
        raw[at] ^= 1 << draw.randrange(8)
    elif how == "put":
        raw[at:at] = draw.randbytes(draw.choice((1, 100, 10_000)))
    elif how == "long":
        file.write_bytes(raw)
        with file.open("r+b") as stream:
            stream.truncate(1 << 40)  # a hole: no byte of it is on the disk
        return f"{how} {file.name}"
    else:
        del raw[at if how == "cut" else 0 :]
    file.write_bytes(raw)
    return f"{how} {file.name} at {at}"


FORGERS = (forge_document, forge_document, forge_header, forge_bytes)


def too_long(number: int, frame: object) -> NoReturn:
    """Of the alarm."""
    raise TooLongError


def main(directory: Path, seeds: range) -> None:
    """All of it."""
    sounds = []
    for tables, limit in (("manifest", publish.TABLES_BYTES_MAX), ("parts", 0)):
        publish.TABLES_BYTES_MAX = limit
        for kind, make in forged_meta.MAKERS.items():
            sounds.append((f"{kind}, tables in {tables}", make(directory / f"{kind}-{tables}")))
    live = forged_meta.Live()
    for what, sound in sounds:  # all is imported, and all threads are there
        amiss = forged_meta.use(sound.parent, sound, live)
        assert load.verify(sound) == []
        assert amiss == [], (what, amiss)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY_BYTES,) * 2)
    try:
        bytes(2 * MEMORY_BYTES)
    except MemoryError:
        signal.signal(signal.SIGALRM, too_long)
    else:
        raise AssertionError("the limit does not hold")
    for seed in seeds:
        draw = random.Random(f"sizes/{seed}")
        what, sound = draw.choice(sounds)
        path = directory / "forged" / sound.name
        shutil.rmtree(path.parent, ignore_errors=True)
        shutil.copytree(sound, path)
        what += ", " + draw.choice(FORGERS)(path, draw)
        signal.alarm(TIME_S)
        try:
            amiss = forged_meta.use(path.parent, path, forged_meta.Live())
        except TooLongError:
            amiss = [f"took more than {TIME_S} s"]
        signal.alarm(0)
        for text in amiss:
            print(f"seed {seed}, {what}: {text}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), range(int(sys.argv[2]), int(sys.argv[3])))
