"""Configurations of our kernel over uint8 images of several models, all in turns in one run, on one GPU.

    python -m bench.image_variants --case base-p16 4736 default --case base-p14 4736 default raw_stages=2 rows \\
        --case vit-b32:last 4736 default cluster=1,stage_blocks=1 --launches 30

``--case MODEL IMAGES CONFIG ..``, any number of times, ``MODEL:last`` for channels that are last; a configuration is
``default``, ``rows`` (a pass in front) or FIELD=VALUE,... Where `bench.images` times one case after the other, times
here are ratios to the first configuration of the case and of the run, at the clocks of one run. Every bit of every
launch, ``--launches`` of each, is compared with the first launch of its case, and the last images with the exact
reference. Prints a table and writes every run to ``--output``. Returns 1 if a bit differs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from bench import image_cases
from bench.configs import parse_first
from bench.image_cases import ImagesCase, ImagesData
from bench.images import KINDS, architecture
from bench.peers import image_peers
from bench.timing import DeviceSampler, Protocol, Run, measure
from cute_kernels import Sm90PatchEmbedConfig
from cute_kernels.config import Config

_COMPARED = 512  # images at a time


@dataclasses.dataclass(frozen=True)
class Variants:
    """A case, and its configurations by their text; None: what the plan chooses."""

    case: ImagesCase
    configs: dict[str, Config | None]


@dataclasses.dataclass
class Variant:
    """One configuration of one case.

    Attributes:
        case, text: as `Variants` have them.
        launch: enqueues a launch on an input set; None where it is not possible.
        detail: the whole configuration, or why it is not possible.
        differing: of every launch that was compared, elements that differ from the first configuration's first.
        runs: timed ones.
    """

    case: ImagesCase
    text: str
    launch: Callable[[int], torch.Tensor] | None
    detail: str
    differing: list[int]
    runs: list[Run] = dataclasses.field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.case.name} | {self.text}"

    def milliseconds(self, mode: str) -> float:
        return statistics.median(run.ms for run in self.runs if run.mode == mode)


def parse_variants(words: Sequence[str]) -> Variants:
    """Of ``MODEL[:last] IMAGES CONFIG ..``.

    Raises:
        ValueError: what is wrong with them.
    """
    if len(words) < 3:
        raise ValueError(f"--case {' '.join(words)}, allowed: MODEL IMAGES CONFIG ..")
    model, separator, layout = words[0].partition(":")
    if separator and layout != "last" or not words[1].isdecimal():
        raise ValueError(f"--case {words[0]} {words[1]}, allowed: MODEL or MODEL:last, and a number of images")
    (case,) = image_cases.make_cases([model], [int(words[1])], "uint8", bool(separator))
    named: dict[str, Config | None] = {"default": None, "rows": Sm90PatchEmbedConfig()}
    kinds = KINDS[architecture()]["uint8"]
    return Variants(case, {text: named[text] if text in named else parse_first(text, kinds) for text in words[2:]})


def prepare(variants: Variants, data: ImagesData, launches: int) -> list[Variant]:
    """Builds the configurations of a case, and compares so many launches of each."""
    found: list[Variant] = []
    expected: torch.Tensor | None = None
    for text, config in variants.configs.items():
        try:
            candidate = image_peers.build_ours(data, config)
        except (ValueError, NotImplementedError) as reason:
            found.append(Variant(variants.case, text, None, str(reason), []))
            continue
        differing = []
        for _ in range(launches):
            data.poison()
            out = candidate.launch(0)
            expected = out.clone() if expected is None else expected
            differing.append(differing_elements(out, expected))
        found.append(Variant(variants.case, text, candidate.launch, candidate.detail, differing))
    return found


def differing_elements(out: torch.Tensor, expected: torch.Tensor) -> int:
    """How many elements have other bits: of two tensors of 16-bit elements, a part at a time."""
    pairs = zip(out.split(_COMPARED), expected.split(_COMPARED), strict=True)
    return sum(int((a.view(torch.int16) != b.view(torch.int16)).sum()) for a, b in pairs)


def table(found: Sequence[Variant]) -> list[str]:
    """A line for each: milliseconds sustained (in bursts), their ratios to the first of its case and of all."""
    lines = [f"{'':70} ms sustained (burst)   of its case     of the first    launches that differ"]
    timed = [variant for variant in found if variant.runs]
    firsts = {variant.case: variant for variant in reversed(timed)}
    for variant in found:
        if not variant.runs:
            lines.append(f"{variant.name:70} {variant.detail}")
            continue
        mine = [variant.milliseconds(mode) for mode in ("sustained", "burst")]
        words = f"{mine[0]:10.4f} ({mine[1]:.4f})    "
        for first in (firsts[variant.case], timed[0]):
            ratios = [ms / first.milliseconds(mode) for ms, mode in zip(mine, ("sustained", "burst"))]
            words += f"{ratios[0]:.3f} ({ratios[1]:.3f})   "
        differ = sum(count > 0 for count in variant.differing)
        lines.append(f"{variant.name:70} {words}{differ} of {len(variant.differing)}, {sum(variant.differing):,}")
    return lines


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line; ``cases`` and ``protocol`` of the result are ready to use."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", dest="cases", action="append", nargs="+", required=True, metavar="WORD")
    parser.add_argument("--launches", type=int, default=1, help="of each configuration that are compared")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sustained", type=float, default=0.2, metavar="SECONDS")
    parser.add_argument("--settle", type=float, default=0.1, metavar="SECONDS", help="untimed, before a sustained run")
    parser.add_argument("--output", type=Path, help="a file for all runs, .json")
    arguments = parser.parse_args(argv)
    if arguments.launches < 1:
        parser.error(f"--launches {arguments.launches}, allowed: at least 1")
    try:
        arguments.protocol = Protocol(
            rounds=arguments.rounds, sustained_s=arguments.sustained, settle_s=arguments.settle
        )
        arguments.cases = [parse_variants(words) for words in arguments.cases]
    except (ValueError, TypeError) as error:
        parser.error(str(error))
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0, or 1 if a bit differs."""
    arguments = parse_arguments(argv)
    if not torch.cuda.is_available():
        print("bench.image_variants: no CUDA device", file=sys.stderr)
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    found: list[Variant] = []
    for variants in arguments.cases:
        found += prepare(variants, ImagesData(variants.case, device, 0), arguments.launches)
    # A case with fewer input sets than another begins with its first again.
    launches = {
        v.name: lambda slot, launch=v.launch, own=v.case.slots: launch(slot % own)
        for v in found if v.launch is not None
    }  # fmt: skip
    slots = max(variants.case.slots for variants in arguments.cases)
    runs = measure(launches, arguments.protocol, DeviceSampler(device), slots, case="variants")
    for variant in found:
        variant.runs = runs.get(variant.name, [])
    if arguments.output is not None:
        entries = {
            v.name: {"detail": v.detail, "differing": v.differing, "runs": [vars(run) for run in v.runs]} for v in found
        }
        arguments.output.write_text(json.dumps({"device": torch.cuda.get_device_name(device), "variants": entries}))
    print("\n".join(table(found)))
    return int(any(any(variant.differing) for variant in found))


if __name__ == "__main__":
    sys.exit(main())
