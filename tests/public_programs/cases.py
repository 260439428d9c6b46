"""The programs, and how each is called."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent

QUACK = ("softmax", "rmsnorm", "layernorm", "cross_entropy", "topk", "gemm")
CUB = ("reduce", "scan", "sort", "histogram", "merge")
LIGER = ("softmax", "rms_norm", "layer_norm", "swiglu", "geglu")
ATTENTION = ("forward", "forward-64", "causal", "groups", "backward", "backward-64", "backward-causal")

NVIDIA = (
    ("tensorop", "sm_80"), ("static-persistent", "sm_90a"), ("persistent", "sm_100a"), ("fused-epilogue", "sm_100a"),
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One program with its arguments, for one architecture.

    Attributes:
        origin: whose kernels they are, with the version.
        program: a file of this folder.
        argument: of the program: what it runs.
        arch: as for ``cute-kernels emulate``.
    """

    origin: str
    program: str
    argument: str
    arch: str

    @property
    def name(self) -> str:
        """Of the record."""
        return f"{Path(self.program).stem}-{self.argument}-{self.arch}"

    @property
    def row(self) -> tuple[str, str]:
        """The first cells of the table: whose kernels, and which."""
        return self.origin, f"`{self.argument}`"

    def command(self, folder: Path) -> list[str]:
        """The program below a folder, and its arguments."""
        return [str(folder / self.program), *self.argument.split()]


def cases() -> Iterator[Case]:
    """All, in the order of the table."""
    for arch in ("sm_90a", "sm_100a"):
        for operator in QUACK:
            yield Case("quack-kernels 0.6.5", "quack_operators.py", operator, arch)
    for kind, arch in NVIDIA:
        yield Case("nvidia-cutlass-operators 0.3.0", "nvidia_operators.py", kind, arch)
    for arch in ("sm_80", "sm_90a", "sm_100a"):
        for operator in ATTENTION:
            if not (arch == "sm_80" and operator.startswith("backward")):  # which asserts a later architecture
                yield Case("flash-attn-4 4.0.0b36", "flash_attention_4.py", operator, arch)
    for arch in ("sm_80", "sm_90a", "sm_100a"):
        for kernel in CUB:
            yield Case("CUB of CCCL 13.0.85, by nvcc 13.0.88", "cub_blocks.py", kernel, arch)
    for arch in ("sm_80", "sm_90a", "sm_100a"):
        for operator in LIGER:
            yield Case("Liger-Kernel 0.8.5, by Triton 3.9.0", "liger_operators.py", operator, arch)
