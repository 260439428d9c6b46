"""`cute_kernels.patch_embed`, through its public function, with the default or a given configuration."""

from __future__ import annotations

import dataclasses

import torch

import cute_kernels
from bench.cases import SCALE_A, SCALE_B, Case, CaseData
from bench.peers import Candidate
from cute_kernels.compile import compile_plan
from cute_kernels.config import PatchEmbedProblem, Sm90PatchEmbedConfig
from cute_kernels.plan import make_plan


def parse_config(text: str) -> Sm90PatchEmbedConfig:
    """``"tile_rows=192,stages=7,pingpong=false"``: a configuration that differs from the defaults in these.

    Raises:
        ValueError: an unknown field, or a value of another type than the field's.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(Sm90PatchEmbedConfig)}
    values: dict[str, object] = {}
    for item in text.split(","):
        name, separator, value = (part.strip() for part in item.partition("="))
        if not separator or name not in defaults:
            raise ValueError(f"{item!r} in {text!r}, allowed: name=value with {', '.join(defaults)}")
        if isinstance(defaults[name], bool):
            if value not in ("true", "false"):
                raise ValueError(f"{item!r}: true or false")
            values[name] = value == "true"
        elif isinstance(defaults[name], int):
            values[name] = int(value)
        else:
            values[name] = value
    return Sm90PatchEmbedConfig(**values)


def compile_ahead(case: Case, config: Sm90PatchEmbedConfig | None, device: torch.device) -> None:
    """Compiles the kernel of a case into the in-memory cache, without its tensors.

    Raises:
        ValueError: the plan refuses the configuration.
    """
    major, minor = torch.cuda.get_device_capability(device)
    problem = PatchEmbedProblem(case.rows, case.n, case.k, table_rows=case.positions)
    sm_count = torch.cuda.get_device_properties(device).multi_processor_count
    compile_plan(make_plan(problem, config, f"sm_{major}{minor}a", sm_count=sm_count))


def build(data: CaseData, config: Sm90PatchEmbedConfig | None = None) -> Candidate:
    """Our kernel; its output is allocated by every call, as a user's is.

    Graphs are captured with frozen constants: the peers' tables, too, are built once and never again.
    """
    case = data.case
    inputs = [x.view(case.images, case.positions, case.k) for x in data.x]

    def launch(slot: int) -> torch.Tensor:
        return cute_kernels.patch_embed(
            inputs[slot], data.weight, data.bias, data.pos, scale_a=SCALE_A, scale_b=SCALE_B, config=config
        )

    return Candidate(launch, "default" if config is None else "", cute_kernels.frozen_constants)
