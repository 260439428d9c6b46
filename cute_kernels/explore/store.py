"""Findings of a campaign in a file of JSON lines: each is there as soon as it is found; docs/explore.md"""

import dataclasses
import functools
import hashlib
import json
import platform
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from cute_kernels.common import files
from cute_kernels.explore.sweep_table import Row
from cute_kernels.plan.base import SmemRegion, TmemRegion

_SCHEMA = 1
_PACKAGE = Path(__file__).parents[1]
_FACTS = ("reason", "status", "registers", "stack_bytes", "counts", "smem", "smem_limit", "tmem", "memory")
"""Fields of a row that the file has; what plan and model say is worked out again."""
_VERDICT = ("killer", "schedule", "message")
"""Fields of a mutant's verdict that the file has."""


class Lines:
    """A file that records are appended to, and found in where they are of the same sources and versions.

    ``path``: of the file. ``resume``: go on with a file that exists. Raises FileExistsError: the file is there, and is
    not to be resumed; ValueError: a line of another schema."""

    def __init__(self, path: Path, *, resume: bool = False) -> None:
        if path.exists() and not resume:
            raise FileExistsError(f"--store {path} exists; go on with it by --resume, or name another")
        self.path = path
        self._known = _read(path) if path.exists() else {}
        with files.writing(path), open(path, "ab+") as file:
            if file.tell():
                file.seek(-1, 2)
                if file.read() != b"\n":  # somebody was killed in the middle of a line
                    file.write(b"\n")

    def found(self, about: Mapping[str, Any]) -> dict[str, Any] | None:
        """The record on something, which names all that its facts depend on; None where there is none."""
        return self._known.get(_key(_whole(about)))

    def append(self, about: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        """Writes a record."""
        line = json.dumps(_whole(about) | dict(facts), default=str)
        with files.writing(self.path), open(self.path, "a", encoding="utf-8") as file:
            file.write(line + "\n")

    def verdict(self, about: Mapping[str, Any], verdict: Any) -> None:
        """Appends a mutant's verdict; `found` gives it back."""
        self.append(about, {name: getattr(verdict, name) for name in _VERDICT})


class Store(Lines):
    """Rows in a file; arguments and errors as of `Lines`.

    ``shard``: which of how many parts of the rows are evaluated, from 1 on. Raises ValueError: a shard that is none."""

    def __init__(self, path: Path, *, resume: bool = False, shard: tuple[int, int] = (1, 1)) -> None:
        if not 1 <= shard[0] <= shard[1]:
            raise ValueError(f"shard = {shard[0]}/{shard[1]}: must be i/n with 1 <= i <= n")
        super().__init__(path, resume=resume)
        self.shard = shard

    def mine(self, number: int) -> bool:
        """Whether a row, by its place in the table, belongs to the shard."""
        return number % self.shard[1] == self.shard[0] - 1

    def restored(self, row: Row, origin: Mapping[str, Any]) -> Row | None:
        """The row with what the file knows of it; None where it does not. ``origin``: as `add`."""
        found = self.found(_about(row, origin))
        if found is None:
            return None
        facts = {name: found[name] for name in _FACTS}
        regions = (("smem", SmemRegion), ("tmem", TmemRegion))
        facts |= {name: tuple(kind(**r) for r in facts[name]) for name, kind in regions}
        if facts["memory"] is not None:
            import cute_kernels.explore.own_layouts as own_layouts  # the emulator

            facts["memory"] = own_layouts.OwnMemory.read(facts["memory"])
        return dataclasses.replace(row, **facts)

    def add(self, row: Row, origin: Mapping[str, Any]) -> None:
        """Appends a row. ``origin``: what was swept, in types that JSON has, without settings."""
        facts = dataclasses.asdict(dataclasses.replace(row, prediction=None, small=None, config=None))
        self.append(_about(row, origin), {name: facts[name] for name in _FACTS})


def merge(paths: Iterable[Path], output: Path) -> int:
    """Writes the rows of several files into one, which may be one of them; returns how many. Raises ValueError: two say
    something else of the same row."""
    found: dict[str, dict[str, Any]] = {}
    for path in paths:
        for key, record in _read(path).items():
            if found.setdefault(key, record) != record:
                what = next(name for name in ("mutant", "run", "settings") if name in record)
                raise ValueError(f"{what} = {record[what]} in {path}: must be what another file says")
    files.write_text(output, "".join(json.dumps(record) + "\n" for record in found.values()))
    return len(found)


def _read(path: Path) -> dict[str, dict[str, Any]]:
    """Records by their keys, without lines that were not written to their end."""
    found = {}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if not isinstance(record, dict) or record.get("schema") != _SCHEMA:
            raise ValueError(f"{path}: must have lines of schema {_SCHEMA}")
        found[_key(record)] = record
    return found


def _about(row: Row, origin: Mapping[str, Any]) -> dict[str, Any]:
    about = {**origin, "arch": row.arch, "settings": dict(row.settings), "seed": 0}
    return about | {"config": str(row.config), "counted": row.small and str(row.small.problem)}


def _whole(about: Mapping[str, Any]) -> dict[str, Any]:
    """A record without its facts: what they depend on, with schema and versions."""
    about = {"schema": _SCHEMA, **about}
    versions = {"python": platform.python_version(), "nvidia-cutlass-dsl": metadata.version("nvidia-cutlass-dsl")}
    return json.loads(json.dumps(about | {"versions": versions, "package": package_digest()}, default=str))


def _key(record: Mapping[str, Any]) -> str:
    return json.dumps({name: one for name, one in record.items() if name not in (*_FACTS, *_VERDICT)}, sort_keys=True)


@functools.cache
def package_digest() -> str:
    """Digest of this package's sources: what the emulator counts depends on all of them."""
    sources = sorted(path for path in _PACKAGE.rglob("*") if path.suffix in (".py", ".c", ".h"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()


def program_digest(script: Path) -> str:
    """Digest of a program and of the Python files beside it."""
    sources = sorted({script, *script.parent.glob("*.py")})
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
