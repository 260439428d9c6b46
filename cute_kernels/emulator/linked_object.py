"""Object files linked in memory, by LLVM."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any


@functools.cache
def _target() -> tuple[Any, Any]:
    """llvmlite's binding module, imported on first use (a fifth of a second), and the target of this host."""
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm, llvm.Target.from_default_triple()


class LinkedObject:
    """A relocatable object in memory, linked with symbols of its own; it lives as long as this Python object.

    Args:
        code: the object file.
        symbols: addresses of what the object refers to and does not define.
    """

    _NAME = "object"

    def __init__(self, code: bytes, symbols: Mapping[str, int]) -> None:
        llvm, target = _target()
        self._linker = llvm.create_lljit_compiler(target.create_target_machine(jit=True), use_jit_link=True)
        library = llvm.JITLibraryBuilder().add_object_img(code)
        for name, place in symbols.items():
            library.import_symbol(name, place)
        self._trackers = [library.link(self._linker, self._NAME)]  # LLVM unloads the object with the first that dies

    def address(self, name: str) -> int:
        """Address of a symbol that the object defines.

        Raises:
            RuntimeError: there is none, or the object refers to something that is not there.
        """
        self._trackers.append(self._linker.lookup(self._NAME, name))
        return self._trackers[-1][name]
