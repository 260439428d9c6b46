"""Peers of the fused patch embed, each a module with ``build(data) -> Candidate``.

A peer that cannot run a case raises `PeerUnavailable` with the reason, which the table shows.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from bench.cases import CaseData
from bench.timing import Launch

Scope = Literal["complete", "rows given", "GEMM only", "copy"]
"""What a peer does: everything; all but the preparation of its rows; the product alone; a copy of as many bytes."""


class PeerUnavailable(RuntimeError):
    """Why a peer cannot run here: a missing package, or a case that it does not support."""


@dataclass(frozen=True)
class Candidate:
    """A peer bound to the tensors of a case.

    Attributes:
        launch: enqueues one launch on input set ``slot``, returns its output.
        detail: what was chosen: algorithm, tile, configuration.
        around_capture: context in which a CUDA graph of it is captured.
    """

    launch: Launch
    detail: str = ""
    around_capture: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext


@dataclass(frozen=True)
class Peer:
    """A row of the table: what it computes and where its code is (``module``, ``function`` of bench.peers).

    ``dtypes`` are those of the cases that it is set up for, of all where it is empty.
    """

    name: str
    scope: Scope
    module: str
    function: str
    dtypes: tuple[str, ...] = ()

    def build(self, data: CaseData) -> Candidate:
        """Compiles and tunes for the case.

        Raises:
            PeerUnavailable: it cannot run here.
        """
        if self.dtypes and data.case.dtype not in self.dtypes:
            raise PeerUnavailable(f"set up here for {' and '.join(self.dtypes)} only, not for {data.case.dtype}")
        try:
            module = importlib.import_module(f"bench.peers.{self.module}")
            build: Callable[[CaseData], Candidate] = getattr(module, self.function)
            return build(data)
        except ImportError as error:
            raise PeerUnavailable(f"not installed: {error}") from error


OURS = "cute_kernels"

_FP8 = ("float8_e4m3fn",)

# The order is the order of building. quack changes CuTe tensor classes of the whole process when it is imported, so it
# comes last, and our kernels are compiled for all cases before the first peer is built.
PEERS: tuple[Peer, ...] = (
    Peer(OURS, "complete", "ours", "build"),
    Peer("scaled_mm + add", "complete", "torch_peers", "build_eager"),
    Peer("torch.compile", "complete", "torch_peers", "build_compiled"),
    Peer("cuBLASLt position-major", "complete", "cublaslt_peers", "build_position_major", _FP8),
    Peer("cuBLASLt image-major + C", "complete", "cublaslt_peers", "build_image_major", _FP8),
    Peer("Triton position-major", "complete", "triton_peers", "build_position_major", _FP8),
    Peer("Triton flat", "complete", "triton_peers", "build_flat", _FP8),
    Peer("quack position-major", "complete", "quack_peers", "build_position_major", _FP8),
    Peer("scaled_mm", "GEMM only", "torch_peers", "build_gemm"),
    Peer("cuBLASLt", "GEMM only", "cublaslt_peers", "build_gemm", _FP8),
    Peer("quack", "GEMM only", "quack_peers", "build_gemm", _FP8),
    Peer("copy of the same bytes", "copy", "torch_peers", "build_copy"),
)


def select(names: list[str] | None) -> list[Peer]:
    """All peers, or those named, in building order; our kernel is always among them.

    Raises:
        ValueError: an unknown name.
    """
    if names is None:
        return list(PEERS)
    known = {peer.name for peer in PEERS}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"peers {unknown}: must be one of {', '.join(sorted(known))}")
    return [peer for peer in PEERS if peer.name in names or peer.name == OURS]
