"""LLVM: IR text and object files to machine code of this host, in memory."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from cute_kernels.emulator.core.library import address


@functools.cache
def _target() -> tuple[Any, Any]:
    """llvmlite's binding module, imported on first use (a fifth of a second), and the target of this host."""
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm, llvm.Target.from_default_triple()


class Library:
    """Compiled functions; the machine code lives as long as this object.

    Args:
        text: an LLVM module.
        level: LLVM's code generation effort, 0 to 3.
        optimise: run LLVM's passes over the module first (inlining, registers for variables, loops).
    """

    def __init__(self, text: str, level: int = 0, *, optimise: bool = False) -> None:
        llvm, target = _target()
        module = llvm.parse_assembly(text)
        machine = target.create_target_machine(
            cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=level, jit=True
        )
        if optimise:
            builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=level))
            builder.getModulePassManager().run(module, builder)
        self._engine = llvm.create_mcjit_compiler(module, machine)
        self._engine.finalize_object()

    def address(self, name: str) -> int:
        """Address of a function."""
        return self._engine.get_function_address(name)


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


def c_function(name: str) -> str:
    """A function of the core as the callee of a call in LLVM IR."""
    return f"inttoptr (i64 {address(name)} to ptr)"
