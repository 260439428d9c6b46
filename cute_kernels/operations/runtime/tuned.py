"""Configurations that `cute_kernels.explore.tuning` found fastest, by problem and device: in memory and on disk.

On disk each is a small JSON file beside the compiled kernels (`cute_kernels.dsl.kernel_cache`), written as a whole
and read only if nobody else could have written it. A configuration that this version's plan does not take is as good as
none.
"""

import contextlib
import dataclasses
import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cute_kernels.common import forks
from cute_kernels.config import Config, Problem
from cute_kernels.dsl import kernel_cache as cache
from cute_kernels.plan import PLANNERS, make_plan
from cute_kernels.plan.config_codec import ConfigCodec

SCHEMA = "cute-kernels/tuned/2"
_NAME = re.compile(r"[0-9a-f]{40}\.tuned")
_LOCK = forks.lock()


@dataclass(frozen=True)
class Device:
    """Kind of device that a measurement holds for: the product's name, architecture and number of multiprocessors."""

    name: str
    arch: str
    sm_count: int


_KNOWN: dict[tuple[Problem, Device], Config | None] = {}
"""Configurations that this process looked up or stored; None where nothing was found."""


def lookup(problem: Problem, device: Device) -> Config | None:
    """The configuration that was found fastest, or None."""
    key = (problem, device)
    with _LOCK:
        if key not in _KNOWN:
            _KNOWN[key] = _read(problem, device)
        return _KNOWN[key]


def store(problem: Problem, device: Device, config: Config, microseconds: float) -> Path | None:
    """Remembers a configuration. Returns the file, or None where the disk cache is off. Raises OSError: the file could
    not be written; this process remembers all the same."""
    with _LOCK:
        _KNOWN[problem, device] = config
        root = cache.directory()
        if root is None:
            return None
        cache.make_private(root)
        document = {
            "schema": SCHEMA,
            "problem": dataclasses.asdict(problem),
            "device": dataclasses.asdict(device),
            "config": _codec(problem).encode(config),
            "microseconds": microseconds,
        }
        path = _path(root, problem, device)
        cache.write_whole(path, (json.dumps(document, indent=1) + "\n").encode())
        return path


def files() -> list[Path]:
    """The files of the cache directory that hold configurations."""
    root = cache.directory()
    return [] if root is None else cache.regular_files(root, _NAME)


def clear() -> int:
    """Forgets everything, on disk too; returns how many files there were."""
    with _LOCK:
        _KNOWN.clear()
        found = files()
        for path in found:
            path.unlink(missing_ok=True)
        return len(found)


def _codec(problem: Problem) -> ConfigCodec:
    return next(planner.codec for planner in PLANNERS.values() if planner.problem is type(problem))


def _path(root: Path, problem: Problem, device: Device) -> Path:
    return root / f"{hashlib.sha256(f'{problem!r} {device!r}'.encode()).hexdigest()[:40]}.tuned"


def _read(problem: Problem, device: Device) -> Config | None:
    # RecursionError: JSON that is nested deeper than the parser goes.
    with contextlib.suppress(cache.InvalidEntry, ValueError, TypeError, KeyError, OSError, RecursionError):
        root = cache.directory()
        if root is not None:
            document: dict[str, Any] = json.loads(cache.read_private(_path(root, problem, device)))
            expected = {"schema": SCHEMA, "problem": dataclasses.asdict(problem), "device": dataclasses.asdict(device)}
            if all(document[name] == value for name, value in expected.items()):
                config = _codec(problem).decode(str(document["config"]))
                return make_plan(problem, config, device.arch, sm_count=device.sm_count).config
    return None
