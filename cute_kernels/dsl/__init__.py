"""Parts of CuTe DSL that this package relies on (``nvidia-cutlass-dsl``), beyond what its documentation promises.

Another version of CuTe DSL is a matter of this folder: compile options and what a compilation leaves behind, the
machine code of host functions and how they take their arguments, host functions as object files, and the methods
through which the emulator takes the place of the CUDA runtime. What differs between versions is decided here too.

Nothing else of the package is imported here but `forks` and `interrupts`, so that the emulator can be used by itself,
and CuTe DSL is imported by the functions that need it.
"""

import importlib
from typing import Any

#: Name -> (module, attribute or None for the module itself): what kernels use that CuTe DSL does not document.
_FOR_KERNELS = {
    "dsl_user_op": ("cutlass.cutlass_dsl", "dsl_user_op"),
    "nvvm": ("cutlass._mlir.dialects.nvvm", None),
    "llvm": ("cutlass._mlir.dialects.llvm", None),
    "cute_ir": ("cutlass._mlir.dialects.cute", None),
    "mlir_types": ("cutlass.cutlass_dsl", "T"),
    "tensor_of": ("cutlass.cute.tensor", "_Tensor"),
}


def __getattr__(name: str) -> Any:
    """``from cute_kernels.dsl import dsl_user_op``: the decorator of operations; MLIR dialects, types and values."""
    if name not in _FOR_KERNELS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _FOR_KERNELS[name]
    found = importlib.import_module(module)
    return found if attribute is None else getattr(found, attribute)
