"""What `bench.choices` has timed: the fits of SM90's choosers, and how near to the fastest their choice is.

The models are those of `cute_kernels.plan`, given tensors for numbers. A fit looks for the constants, and of the GEMM
for three factors of each candidate, with which the ratios of modelled times within a shape are nearest to those that
were timed, and with which little is lost where the least modelled time is chosen. Constants stay near their start, and
factors near 1, where timings say little.
"""

from __future__ import annotations

import contextlib
import csv
import io
import math
import statistics
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import torch

from bench import archive
from cute_kernels.config import Config, GemmProblem, Problem, Sm90GemmConfig
from cute_kernels.plan import Plan, gemm_sm90_fit, make_plan, predict
from cute_kernels.plan import gemm_sm90 as sm90

MODES = {"sustained": 1.0, "burst": 0.5}
"""Ways of timing, and what each counts in a fit."""

Constants = Mapping[str, Sequence[float]]

START: Constants = {
    "launch": (2100, -400, -480, 29),
    "tile": (41, 144, 71),
    "epilogue": (32, 10, 16, 9, 13.5, 50, 31, 110, 48, -60, 95),
    "rates": (57, 1300, 0.1, 0.0135, 0.0037, 0.115, 0.9, 0.5, 0.5, 0.2),
}
"""What the constants of the model are where timings say nothing; their signs stay."""

CLOSENESS = 3
"""Power of (fastest / time) by which a timing counts: what matters is that the best are ranked well."""

FAR = 0.05
"""Relative error from where on an error counts in proportion, not squared."""

SOFTNESS = 0.03
"""Relative differences of modelled times below which a fit takes the choice for a matter of chance."""

CHOSEN_WEIGHT = 0.1
"""What the time lost by choosing counts beside errors."""

FACTOR_WEIGHT = 3e-4
CONSTANT_WEIGHT = 1e-4
"""What the logarithm of a factor, or of a constant over that of `START`, costs when it is squared."""

FOLDS = 5


@dataclass
class Timed:
    """A shape: microseconds by way of timing of each candidate, and of the fastest peer."""

    kind: str
    problem: Problem
    times: dict[str, dict[Config, float]] = field(default_factory=lambda: {mode: {} for mode in MODES})
    peers: dict[str, float] = field(default_factory=dict)

    def choice(self, mode: str, top: int = 1) -> Config:
        """What the chooser would take of that which was timed, or the fastest of the ``top`` that it finds best."""
        times = self.times[mode]
        own = make_plan(self.problem, arch="sm_90a").config
        if top == 1 and own in times:
            return own
        known = list(filter(is_candidate, times)) or list(times)  # other tiles were timed, too, and are never chosen
        return min(sorted(known, key=self.modelled)[:top], key=times.__getitem__)

    def modelled(self, config: Config) -> float:
        return predict(make_plan(self.problem, config, "sm_90a")).microseconds

    def regret(self, mode: str, choice: Config) -> float:
        return self.times[mode][choice] / min(self.times[mode].values())


def is_candidate(config: Config) -> bool:
    """Whether the chooser may take it: of the GEMM's tiles only those that have factors."""
    return not isinstance(config, Sm90GemmConfig) or sm90.tile(config) in gemm_sm90_fit.CANDIDATES


Parse = Callable[[dict[str, str]], tuple[Problem, Config | None]]
"""Problem and configuration of a row of a file; None of a peer's."""


def read(files: Iterable[Path], parse: Parse) -> list[Timed]:
    """Every shape of which two candidates or more were timed."""
    shapes: dict[tuple[str, str], Timed] = {}
    for file in files:
        for row in csv.DictReader(io.StringIO(archive.read_text(file))):
            if not row["mode"]:  # it failed
                continue
            problem, config = parse(row)
            timed = shapes.setdefault((str(file), row["number"]), Timed(row["kind"], problem))
            value = float(row["microseconds"])
            if config is None:
                timed.peers[row["mode"]] = min(value, timed.peers.get(row["mode"], math.inf))
            else:
                timed.times[row["mode"]][config] = value
    return [timed for timed in shapes.values() if len(timed.times["sustained"]) > 1]


def files_of(paths: Iterable[Path], pattern: str) -> list[Path]:
    """Files as they are; of archives, those whose names are like the pattern."""
    return [each for path in paths for each in archive.expand(path / pattern if path.suffix == ".xz" else path)]


# --- fitting ---------------------------------------------------------------------------------------------------------


class Data:
    """Candidates of shapes as tensors: what a model takes, and by way of timing what was timed."""

    start: ClassVar[Constants]
    factors: ClassVar[int] = 0
    """Candidates that have factors of their own."""

    def __init__(self, shapes: Sequence[Timed]) -> None:
        self.shapes, self.plans = shapes, list[Plan]()
        owners = []
        for number, shape in enumerate(shapes):
            for config in shape.times["sustained"]:
                if is_candidate(config):
                    self.plans.append(make_plan(shape.problem, config, "sm_90a"))
                    owners.append(number)
        self.owners = torch.tensor(owners)
        self.slower: dict[str, torch.Tensor] = {}
        for mode in MODES:
            times = [shapes[owner].times[mode] for owner in owners]
            slower = [
                times.get(plan.config, math.nan) / min(times.values(), default=math.nan)
                for plan, times in zip(self.plans, times, strict=True)
            ]
            self.slower[mode] = tensor(slower).log()

    def clocks(self, constants: Mapping[str, Sequence[torch.Tensor]], factors: torch.Tensor) -> torch.Tensor:
        """Modelled time of every candidate."""
        raise NotImplementedError

    def loss(self, modelled: torch.Tensor, used: torch.Tensor) -> torch.Tensor:
        """Of the logarithms of modelled times: errors, and the time that is lost where they choose."""
        total = torch.zeros(())
        for mode, weight in MODES.items():
            timed = used & ~self.slower[mode].isnan()
            owners, slower, logs = self.owners[timed], self.slower[mode][timed], modelled[timed]

            def sums(values: torch.Tensor, owners=owners) -> torch.Tensor:
                """Of the same shape, for each of its candidates."""
                return torch.zeros(len(self.shapes)).scatter_add(0, owners, values)[owners]

            share = torch.exp(-CLOSENESS * slower)
            share = share / sums(share)
            level = logs - sums(share * (logs - slower))  # what is the same for all candidates does not count
            errors = 2 * FAR**2 * (torch.sqrt(1 + ((level - slower) / FAR) ** 2) - 1)
            chance = torch.exp(-level / SOFTNESS)
            lost = chance / sums(chance) * slower.expm1().clamp(max=1)
            total = total + weight * (share * errors + CHOSEN_WEIGHT * lost).sum() / len(owners.unique())
        return total


class GemmData(Data):
    start = START
    factors = len(gemm_sm90_fit.CANDIDATES)

    def __init__(self, shapes: Sequence[Timed]) -> None:
        super().__init__(shapes)
        plans, known = self.plans, {tile: place for place, tile in enumerate(gemm_sm90_fit.CANDIDATES)}
        self.tiles = torch.tensor([known[sm90.tile(plan.config)] for plan in plans])
        columns = [zip(*rows, strict=True) for rows in zip(*map(sm90.parts, plans), strict=True)]
        self.parts = tuple(tuple(map(tensor, part)) for part in columns)
        ratios = [plan.tiles / plan.most_clusters for plan in plans]
        self.blocks = tensor(-(-plan.k_blocks // plan.config.split_k) for plan in plans)
        self.waves, self.fill = tensor(map(sm90.waves, ratios)), tensor(min(1.0, ratio) for ratio in ratios)
        row_bytes = [plan.problem.k * plan.in_bytes for plan in plans]
        self.inside_line = tensor(each % sm90.LINE_BYTES > 0 for each in row_bytes)
        self.inside_sector = tensor(each % sm90.SECTOR_BYTES > 0 for each in row_bytes)
        self.memory = tensor(map(sm90.memory_clocks, plans))

    def clocks(self, constants: Mapping[str, Sequence[torch.Tensor]], factors: torch.Tensor) -> torch.Tensor:
        """Modelled time of every candidate, and of memory, which is the same for all of a shape and hides the rest."""
        of_plans = sm90.terms(self.parts, constants, tuple(factors[self.tiles].unbind(1)))
        of_lines, of_sectors = constants["rates"][7:9]
        stretch = 1 + of_lines * self.inside_line + of_sectors * self.inside_sector
        return (sm90.clocks(of_plans, self.blocks, self.waves, self.fill, stretch) ** 4 + self.memory**4) ** 0.25


def tensor(values: Iterable[float]) -> torch.Tensor:
    return torch.tensor([float(value) for value in values])


Model = tuple[dict[str, tuple[float, ...]], list[tuple[float, ...]]]
"""Constants, and the factors of each candidate."""


def fit(data: Data, used: torch.Tensor, iterations: int = 400) -> Model:
    """The model that suits the used candidates best; of ``bool [plans]``."""
    start = {name: torch.tensor(values) for name, values in data.start.items()}
    logs = {name: torch.zeros(len(values), requires_grad=True) for name, values in data.start.items()}
    own = torch.zeros(data.factors, 3, requires_grad=True)
    solver = torch.optim.LBFGS(
        [*logs.values(), own], max_iter=iterations, history_size=20, line_search_fn="strong_wolfe",
        tolerance_change=1e-9,
    )  # fmt: skip

    def constants() -> dict[str, torch.Tensor]:
        return {name: start[name] * logs[name].exp() for name in start}

    def step() -> torch.Tensor:
        solver.zero_grad()
        loss = data.loss(data.clocks(constants(), own.exp()).log(), used)
        loss = loss + FACTOR_WEIGHT * own.square().sum()
        loss = loss + CONSTANT_WEIGHT * sum(value.square().sum() for value in logs.values())
        loss.backward()
        return loss

    solver.step(step)
    found = {name: tuple(float(f"{value:.4g}") for value in values) for name, values in constants().items()}
    return found, [tuple(round(value, 3) for value in row) for row in own.exp().tolist()]


def chosen_regrets(data: Data, model: Model) -> dict[str, list[float]]:
    """By way of timing, of each shape, what a model would lose; NaN where nothing was timed so."""
    constants = {name: torch.tensor(values) for name, values in model[0].items()}
    modelled = data.clocks(constants, torch.tensor(model[1]))
    found = {}
    for mode, slower in data.slower.items():
        least: dict[int, tuple[float, float]] = {}
        rows = zip(data.owners.tolist(), modelled.tolist(), slower.tolist(), strict=True)
        for owner, clocks, lost in rows:
            if not math.isnan(lost):
                least[owner] = min(least.get(owner, (math.inf, 0.0)), (clocks, lost))
        found[mode] = [math.exp(least.get(number, (0, math.nan))[1]) for number in range(len(data.shapes))]
    return found


def sizes_of(problem: Problem) -> str:
    """What shapes of one problem, or of one model at several numbers of images, have in common."""
    first = problem.m if isinstance(problem, GemmProblem) else problem.table_rows
    return f"{first} {problem.n} {problem.k}"


def held_out(problem: Problem) -> bool:
    """No fit may see it: one in three, whatever its kind."""
    return zlib.crc32(sizes_of(problem).encode()) % 3 == 0


def cross_validated(data: Data) -> dict[str, list[float]]:
    """As `chosen_regrets`, each shape by a model that has seen other sizes."""
    folds = torch.tensor([sum(map(ord, sizes_of(s.problem))) % FOLDS for s in data.shapes])
    found: dict[str, list[float]] = {mode: [math.nan] * len(data.shapes) for mode in MODES}
    for fold in range(FOLDS):
        regrets = chosen_regrets(data, fit(data, (folds != fold)[data.owners]))
        for mode in MODES:
            for number in (folds == fold).nonzero().flatten().tolist():
                found[mode][number] = regrets[mode][number]
    return found


@contextlib.contextmanager
def doubles() -> Iterator[None]:
    """Tensors have FP64 elements meanwhile."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def report_fit(data: Data, module: Path, text: Callable[[Data, Model], str]) -> None:
    """Fits, writes the module of the model, and prints the regret: of the fit, and cross-validated."""
    model = fit(data, torch.ones(len(data.plans), dtype=torch.bool))
    lines = summary("fitted", chosen_regrets(data, model)) + summary("cross-validated", cross_validated(data))
    module.write_text(text(data, model))
    print("\n".join(lines))


def between_marks(module: Path, text: str) -> str:
    """A module with its numbers replaced, which the formatter leaves alone."""
    before, _, rest = module.read_text().partition("# fmt: off\n")
    _, _, after = rest.partition("# fmt: on\n")
    return f"{before}# fmt: off\n{text}# fmt: on\n{after}"


def constants_text(model: Model) -> str:
    return "CONSTANTS = {\n" + "".join(f'    "{name}": {values},\n' for name, values in model[0].items()) + "}\n"


def gemm_text(data: Data | None, model: Model) -> str:
    """The module `cute_kernels.plan.gemm_sm90_fit` of a model."""
    rows = zip(gemm_sm90_fit.CANDIDATES.items(), model[1], strict=True)
    candidates = [f"{tuple(map(int, tile))}: ({stores}, {factors})," for (tile, (stores, _)), factors in rows]
    pairs = [" ".join(candidates[i : i + 2]) for i in range(0, len(candidates), 2)]
    table = "CANDIDATES = {\n" + "".join(f"    {pair}\n" for pair in pairs) + "}\n"
    return between_marks(Path(gemm_sm90_fit.__file__), constants_text(model) + table)


# --- regret ----------------------------------------------------------------------------------------------------------


def regrets(shapes: Sequence[Timed], top: int = 1) -> dict[str, list[float]]:
    """By way of timing, of each shape, time of the chooser's choice over that of the fastest; NaN where none is."""
    return {
        mode: [shape.regret(mode, shape.choice(mode, top)) if shape.times[mode] else math.nan for shape in shapes]
        for mode in MODES
    }


def report_regrets(shapes: Sequence[Timed], top: int = 1) -> None:
    """Prints mean, 95th percentile and most of the regrets, of all and of each kind, and peers' times over ours."""
    found = regrets(shapes, top)
    print("\n".join(summary("all", found)))
    for kind in dict.fromkeys(shape.kind for shape in shapes):
        own = {mode: [v for v, shape in zip(found[mode], shapes) if shape.kind == kind] for mode in MODES}
        print("\n".join(summary(kind, own)))
    own = [make_plan(shape.problem, arch="sm_90a").config for shape in shapes]
    missed = {mode: sum(config not in s.times[mode] for config, s in zip(own, shapes)) for mode in MODES}
    counts = ", ".join(f"{mode} {count}" for mode, count in missed.items())
    print(f"shapes whose choice was not timed, so that the next one was judged: {counts} of {len(shapes)}")
    for mode in MODES:
        ratios = defaultdict(list)
        for shape in shapes:
            if mode in shape.peers and shape.times[mode]:
                ratios[shape.kind].append(shape.peers[mode] / shape.times[mode][shape.choice(mode, top)])
        for kind, values in ratios.items():
            mean, least = statistics.geometric_mean(values), min(values)
            print(f"peer / chosen, {mode:9} {kind:16} {len(values):4} shapes: mean {mean:.3f}, least {least:.3f}")


def summary(name: str, found: dict[str, list[float]]) -> list[str]:
    lines = []
    for mode, values in found.items():
        timed = sorted(value for value in values if not math.isnan(value))
        if timed:
            mean, most = statistics.mean(timed), timed[-1]
            lines.append(
                f"chosen / fastest, {mode:9} {name:16} {len(timed):4} shapes: mean {mean:.3f}, "
                f"95% {percentile(timed):.3f}, most {most:.3f}"
            )
    return lines


def percentile(ordered: Sequence[float], share: float = 0.95) -> float:
    """Between neighbours in proportion."""
    place = share * (len(ordered) - 1)
    lower = math.floor(place)
    upper = min(lower + 1, len(ordered) - 1)
    return ordered[lower] + (place - lower) * (ordered[upper] - ordered[lower])
