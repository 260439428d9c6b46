"""A schedule: what of the order of events a run may choose, and the options of a command that choose it."""

from __future__ import annotations

import argparse
import dataclasses
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from cute_kernels.emulator.machine.state.async_engine import cluster_random
from cute_kernels.emulator.machine.state.warp import WarpState
from cute_kernels.emulator.options import (
    CLUSTERS,
    COMPLETIONS,
    INTERLEAVES,
    ClusterOrder,
    Completion,
    Interleave,
    Options,
)
from cute_kernels.emulator.steps import Step


@dataclass(frozen=True)
class Schedule:
    """One order of events, of which all fields but ``overlap`` are `Options` of the same meaning.

    Attributes:
        seed, completion, interleave: as in `Options`.
        spurious_timeouts: `Options.spurious_try_wait_failures`.
        interleave_clusters, steps: as in `Options`.
        overlap: launches with programmatic stream serialisation may begin before the launch before them is over.

    Raises:
        TypeError: a seed that is no int, or a field that is no bool.
        ValueError: a seed below 0, another completion or interleaving.
    """

    seed: int = 0
    completion: Completion = "eager"
    interleave: Interleave = "round_robin"
    spurious_timeouts: bool = False
    overlap: bool = False
    interleave_clusters: ClusterOrder = "in_turn"
    steps: tuple[Step, ...] = ()

    def __post_init__(self) -> None:
        for name in ("spurious_timeouts", "overlap"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} = {getattr(self, name)!r}: must be a bool")
        self.options()  # checks the others

    def options(self, **others: object) -> Options:
        """The schedule as options of a run; ``others`` are further fields of `Options`."""
        return Options(
            seed=self.seed, completion=self.completion, interleave=self.interleave,
            spurious_try_wait_failures=self.spurious_timeouts, interleave_clusters=self.interleave_clusters,
            steps=self.steps, **others,
        )  # fmt: skip

    @property
    def draws(self) -> bool:
        """Whether the seed says anything: there is a random order, or spurious timeouts."""
        orders = (self.interleave, self.interleave_clusters)
        return self.completion == "random" or self.spurious_timeouts or orders != ("round_robin", "in_turn")

    def departures(self) -> dict[str, object]:
        """The fields that differ from the default schedule."""
        values = {field.name: (getattr(self, field.name), field.default) for field in dataclasses.fields(self)}
        return {name: value for name, (value, default) in values.items() if value != default}

    def arguments(self) -> list[str]:
        """Words of a command line for the parser of `add_arguments`, without what is the default."""
        words = []
        for name, value in self.departures().items():
            option = f"--{name.replace('_', '-')}"
            text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
            words += [option] if value is True else [option, text]
        return words

    def __str__(self) -> str:
        return " ".join(self.arguments()) or "the default schedule"

    def simpler(self) -> Iterator[Schedule]:
        """Schedules with fewer departures from the default, or with as many and a smaller seed; the simplest first."""
        departures = self.departures()
        names = [name for name in departures if name != "seed"]
        subsets = [
            [name for place, name in enumerate(names) if chosen >> place & 1] for chosen in range(1 << len(names))
        ]
        for kept in sorted(subsets, key=len):
            changes = {name: departures[name] for name in kept}
            drawn = Schedule(**changes).draws
            seeds = range(min(self.seed, _SMALL_SEEDS)) if drawn else (0,)
            for seed in dict.fromkeys((*seeds, *((self.seed,) if drawn else ()))):
                schedule = Schedule(seed=seed, **changes)
                if schedule != self:
                    yield schedule


_SMALL_SEEDS = 6


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=seed_of, default=0, help="seed of the schedule (default: %(default)s)")
    parser.add_argument(
        "--completion", choices=COMPLETIONS, default="eager",
        help="when asynchronous work takes effect: eager: at once; lazy: as late as possible (default: %(default)s)",
    )
    parser.add_argument(
        "--interleave", choices=INTERLEAVES, default="round_robin",
        help="which warp runs next; starve: one role or warp runs only when nothing else can (default: %(default)s)",
    )
    parser.add_argument(
        "--interleave-clusters",
        choices=CLUSTERS,
        default="in_turn",
        help="which cluster runs next; in_turn: the same until it ends or waits for another; starve: one of the first "
        "runs only when no other can (default: %(default)s)",
    )
    parser.add_argument(
        "--spurious-timeouts", action="store_true",
        help="mbarrier.try_wait sometimes reports a timeout, clusterlaunchcontrol.try_cancel that no cluster is left",
    )
    parser.add_argument(
        "--overlap",
        action="store_true",
        help="a launch with programmatic stream serialisation may begin before the previous launch is over: report "
        "accesses that griddepcontrol.wait does not order",
    )
    parser.add_argument(
        "--steps", type=steps_of, default=(), metavar="STEP,..",
        help="steps that come first, as check prints them; 0w3:14: 14 basic blocks of warp 3 of cluster 0",
    )


def steps_of(text: str) -> tuple[Step, ...]:
    """Steps with commas between them, as argparse's ``type``."""
    try:
        return tuple(map(Step.of, text.split(",")))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def seed_of(text: str) -> int:
    """A seed, as argparse's ``type``."""
    if not text.isdecimal() or int(text) >= 1 << 63:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer from 0 to 2**63 - 1")
    return int(text)


def of_arguments(parsed: argparse.Namespace) -> Schedule:
    return Schedule(**{field.name: getattr(parsed, field.name) for field in dataclasses.fields(Schedule)})


class _Warp(NamedTuple):
    """CTA and track of a warp that is only numbered."""

    cta: int
    track: str


W = TypeVar("W", WarpState, _Warp)


def draw_starved(rng: random.Random, warps: Sequence[W]) -> frozenset[W]:
    """Draws warps of a cluster: all of one role, those of one role in one CTA, or a single one."""
    victim = rng.choice(warps)
    kinds = (
        [warp for warp in warps if warp.track == victim.track],
        [warp for warp in warps if warp.track == victim.track and warp.cta is victim.cta], [victim],
    )
    return frozenset(rng.choice(kinds))


def seeds_for_each_warp(ctas: int, warps: int) -> list[int]:
    """The least seeds that starve, in the first cluster of a launch, warp 0 of all CTAs, warp 1 of all CTAs, ...
    ``ctas``: of a cluster; ``warps``: of a CTA; none of them has a role."""
    cluster = [_Warp(cta, f"warp {index}") for cta in range(ctas) for index in range(warps)]
    wanted = {frozenset(warp for warp in cluster if warp.track == f"warp {index}"): index for index in range(warps)}
    found: dict[int, int] = {}
    seed = 0
    while len(found) < warps:
        starved = draw_starved(cluster_random(seed, 0)[0], cluster)
        if starved in wanted:
            found.setdefault(wanted[starved], seed)
        seed += 1
    return [found[index] for index in range(warps)]


def systematic(ctas: int, warps: int, *, overlaps: bool, meets: bool = False) -> list[Schedule]:
    """Schedules that show most of what a schedule can show, the cheap ones first; the default is not among them.
    ``ctas``: of a cluster. ``warps``: of a CTA; each is starved in turn (in all CTAs), with asynchronous work early and
    late. ``overlaps``: whether the launch may overlap the one before it. ``meets``: whether its clusters may see what
    others do while both run."""
    starved = seeds_for_each_warp(ctas, warps) if ctas * warps > 1 else []
    return [
        *([Schedule(overlap=True)] if overlaps else []),
        Schedule(completion="lazy"),
        Schedule(spurious_timeouts=True),
        *(Schedule(seed, interleave_clusters=order) for seed in range(3) for order in CLUSTERS[1:] if meets),
        *(Schedule(seed, interleave="starve") for seed in starved),
        *(Schedule(seed, completion="lazy", interleave="starve") for seed in starved),
        Schedule(1, completion="lazy", interleave="random"),
        *([Schedule(2, "random", "random", overlap=True)] if overlaps else []),
    ]


def drawn(number: int, *, overlaps: bool, meets: bool = False) -> Schedule:
    """Random schedule ``number``, from 1 on; the same for the same number. The others as for `systematic`."""
    rng = random.Random(number)
    return Schedule(
        seed=number, completion=rng.choice(COMPLETIONS), interleave=rng.choice(INTERLEAVES[1:]),
        spurious_timeouts=rng.random() < 0.5, overlap=overlaps and rng.random() < 0.25,
        interleave_clusters=rng.choice(CLUSTERS) if meets else "in_turn",
    )
