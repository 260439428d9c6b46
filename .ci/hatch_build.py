"""Build hook: compiles the emulator's core (``cute_kernels/emulator/core``) for a wheel or an editable installation.

Where that fails, for want of a compiler for instance, the installation goes on without: GPUs need nothing of it, and
the emulator says what is missing when it is first used.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from packaging.tags import platform_tags

CORE = Path("cute_kernels", "emulator", "core")


class CoreBuildHook(BuildHookInterface):
    """A wheel gets the core for every instruction set of a machine; an editable installation gets the one in use."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        core = _core(Path(self.root))
        editable = version == "editable"
        try:
            variants = [core.library.variant()] if editable else core.build.variants()
            libraries = [core.build.library(variant) for variant in variants]
        except core.build.CoreNotBuilt as error:
            self.app.display_warning(f"without the compiled core, which the emulator will need: {error}")
            return
        if editable:
            return
        build_data["artifacts"] += [f"/{path.relative_to(self.root).as_posix()}" for path in libraries]
        build_data["pure_python"] = False
        # C without Python's interface: any Python 3.
        build_data["tag"] = f"py3-none-{core.build.platform_tag(libraries, next(platform_tags()))}"


def _core(root: Path) -> ModuleType:
    """The package ``core`` alone: what the rest of the emulator needs is not installed where packages are built.

    Of the rest of ``cute_kernels`` it imports what needs the standard library alone.
    """
    name, place = "emulator_core", root / CORE
    spec = importlib.util.spec_from_file_location(name, place / "__init__.py", submodule_search_locations=[str(place)])
    core = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(core)
    with mock.patch.object(sys, "path", [*sys.path, str(root)]):
        for module in ("build", "library"):
            importlib.import_module(f"{name}.{module}")
    return core
