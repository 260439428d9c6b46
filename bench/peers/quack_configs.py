"""What of quack's tiles, clusters and schedules is timed, by architecture; the fastest per case is quack's row.

They are taken from the lists that quack's own autotuner goes through (quack/gemm_config.py, 0.6.5), without those whose
tiles are small for these sizes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bench.configs import arch_of
from bench.peers import PeerUnavailable


@dataclass(frozen=True)
class QuackConfig:
    """Arguments of ``quack.gemm.gemm``.

    Attributes:
        rows, columns: of an output tile; of a pair of CTAs where SM100's tiles have 256 rows.
        cluster_m, cluster_n: CTAs of a cluster.
        pingpong: SM90's warpgroups take turns.
        dynamic: tiles are handed out by cluster launch control (SM100), quack's default there.
    """

    rows: int
    columns: int
    cluster_m: int
    cluster_n: int
    pingpong: bool = False
    dynamic: bool = False

    @property
    def name(self) -> str:
        schedule = "pingpong" if self.pingpong else "dynamic" if self.dynamic else "static"
        return f"{self.rows}x{self.columns}, cluster ({self.cluster_m}, {self.cluster_n}), {schedule}"

    @property
    def options(self) -> dict[str, bool]:
        """Keyword arguments beside tile and cluster."""
        return {"pingpong": self.pingpong, "persistent": True, "is_dynamic_persistent": self.dynamic}


_SM100 = tuple(
    QuackConfig(rows, columns, cluster_m, cluster_n, dynamic=dynamic)
    for rows, columns, cluster_m, cluster_n in (
        (256, 256, 2, 1), (256, 192, 2, 1), (256, 128, 2, 1), (256, 256, 2, 2), (128, 256, 1, 2), (128, 128, 1, 1),
    )
    for dynamic in (True, False)
)  # fmt: skip

PATCH_EMBED = {
    "sm_90a": (
        QuackConfig(128, 192, 2, 1, True),
        QuackConfig(128, 192, 1, 2, True),
        QuackConfig(128, 128, 2, 1, True),
        QuackConfig(256, 128, 2, 1),
        QuackConfig(256, 192, 1, 1),
    ),
    "sm_100a": _SM100,
}
GEMM = {
    "sm_90a": (
        QuackConfig(128, 256, 2, 1),
        QuackConfig(256, 128, 2, 1),
        QuackConfig(256, 192, 2, 1),
        QuackConfig(128, 192, 2, 1, True),
        QuackConfig(128, 192, 1, 2, True),
        QuackConfig(128, 128, 2, 1, True),
        QuackConfig(64, 128, 2, 1, True),
    ),
    "sm_100a": _SM100,
}


Configs = dict[str, tuple[QuackConfig, ...]]


def for_device(configs: Configs, device: torch.device) -> tuple[str, tuple[QuackConfig, ...]]:
    """Architecture of a device, and what of ``configs`` runs on it.

    Raises:
        PeerUnavailable: an architecture that nothing is set up for.
    """
    try:
        arch = arch_of(torch.cuda.get_device_capability(device))
    except ValueError as error:
        raise PeerUnavailable(f"set up here for {' and '.join(configs)} only: {error}") from None
    if arch not in configs:
        raise PeerUnavailable(f"set up here for {' and '.join(configs)} only: the device is {arch}")
    return arch, configs[arch]
