"""docs/performance.md: tables of the recorded results, and the index of the archives that they come from.

    python -m bench.performance        writes the page, without a GPU, in seconds

The text is in performance_page.md beside this file; a name in braces on a line of its own is a table of `TABLES`.
"""

from __future__ import annotations

import dataclasses
import json
import re
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from bench import archive, overview, tune_gemm
from bench.image_cases import ImagesCase, make_cases, problem
from bench.peers import OURS
from bench.results import HEADER, CaseResult, PeerResult, Results, case_rows, from_json, markdown, reference_ms
from bench.timing import Run
from cute_kernels.plan import ARCHS, make_plan

TEXT = Path(__file__).with_name("performance_page.md")
PAGE = TEXT.parents[1] / "docs" / "performance.md"

DAY = "2026-11-21-h200"


def read(name: str) -> Results:
    """A recorded document, ``"2026-11-21-h200/headline.json"``."""
    return from_json(archive.read_text(archive.recorded(name)))


# --- patch_embed -----------------------------------------------------------------------------------------------------


def headline() -> str:
    """Every peer at the headline size."""
    (result,) = read(f"{DAY}/headline.json").cases
    dropped = {HEADER.index(name) for name in ("TB/s", "row error")}
    shown = [[cell for i, cell in enumerate(row) if i not in dropped] for row in (HEADER, *case_rows(result, OURS))]
    return markdown(shown[0], shown[1:])


def designs() -> str:
    """Other configurations at the headline size, each beside the default of its own run."""
    found = []
    for name in ("headline-variants", "headline-configs", "headline-clusters"):
        (result,) = read(f"{DAY}/{name}.json").cases
        default = reference_ms(result, OURS) or 0
        for peer in result.peers:
            summary = peer.summary("sustained")
            if peer.name.startswith(f"{OURS} ") and summary:
                settings = peer.name.removeprefix(f"{OURS} ")
                found.append((summary.median / default, settings, summary.median, default, f"{name}.json"))
    lines = [
        (f"`{settings}`", f"{ms:.3f}", f"{default:.3f}", f"{ratio:.3f}", file)
        for ratio, settings, ms, default, file in sorted(found)
    ]
    return markdown(("configuration", "ms, sustained", "default, same run", "ratio", "file"), lines)


def model_rows() -> list[overview.Row]:
    """The cases of `python -m bench.overview` over all runs of models."""
    paths = archive.expand(archive.recorded(f"{DAY}/models*.json"))
    return overview.collect(sorted((from_json(archive.read_text(path)) for path in paths), key=lambda run: run.date))


def models() -> str:
    """A line per case: ours, and the nearest peer that computes the same and the fastest GEMM alone, in both modes."""
    lines = []
    for row in model_rows():
        cells = [row.result.case.name]
        for mode in overview.MODES:
            ours = reference_ms(row.result, OURS, mode) or 0
            name, ratio = min(row.ratios(mode, "complete").items(), key=lambda item: item[1])
            gemm = min(row.ratios(mode, "GEMM only").values())
            nearest = f"{ratio:.2f}" if ratio > 1 else f"**{ratio:.3f}**"
            cells += [f"{1e3 * ours:.1f}", f"{nearest} {name}", f"{gemm:.2f}"]
        lines.append(cells)
    columns = ("ours, us", "nearest complete peer", "GEMM alone")
    return markdown(("case", *(f"{mode}: {what}" for mode in overview.MODES for what in columns)), lines)


def models_by_images() -> str:
    """The least ratio by number of images, and which peers were not timed."""
    return overview.by_images(model_rows())


def launches() -> str:
    """Host time of a call and time of a launch in a CUDA graph, at one and eight images."""
    lines = []
    for result in read(f"{DAY}/models-small-batches.json").cases:
        if result.case.name in ("base-p16/196 x 1", "base-p16/196 x 8"):
            costs = [(peer.name, peer.cost) for peer in result.peers if peer.cost and peer.cost.graph]
            lines += [(result.case.name, name, f"{cost.host:.1f}", f"{cost.graph:.2f}") for name, cost in costs]
    return markdown(("case", "peer", "host, us per call", "us per launch in a graph"), lines)


# --- patch_embed_images ----------------------------------------------------------------------------------------------

COLUMNS = {
    "rows that exist": ("patch_embed on FP8 rows", "gemm on BF16 rows"),
    "`bf16`, normalised images": ("bf16 on normalised pixels",),
    "pass + rows": ("pass + rows",),
    "one kernel": ("one kernel",),
    "compiled preparation + `patch_embed`": ("prepare compiled + patch_embed",),
    "compiled patchify + linear": ("patchify + linear compiled",),
    "compiled convolution": ("conv compiled",),
}
"""Columns of the table of images, and the peers that may stand in each."""

FEW_IMAGES = 64
"""Up to which a launch is so short that its time is shown in a CUDA graph, without the host."""

SUPERSEDED = ("images-p14-held.json",)
"""Times of a kernel that lacked a fence."""

EARLIER = {
    "8 images x 14 patches, 2 warpgroups, cluster 2, 6 stages": "source strips, tile_patches 14, tile_images 8, "
    "warpgroups 2, cluster 2, stages 6, stage_blocks 2, pingpong True, order row, weight registers",
}
"""How the first run wrote a configuration."""


def today(case: ImagesCase) -> dict[str, str]:
    """The configuration that a case gets now, by field, with ``source`` even where a pass lays out rows in front."""
    plan = make_plan(problem(case), None, "sm_90a", sm_count=ARCHS["sm_90a"].sm_count)
    settings = {name: str(value) for name, value in dataclasses.asdict(plan.config).items()}
    return settings | ({"pass": "True"} if len(plan.launches) > 1 else {})


def recorded_settings(detail: str) -> dict[str, str]:
    """The configuration that a run recorded of itself."""
    detail = next((new for old, new in EARLIER.items() if detail.startswith(old)), detail)
    parts = detail.split(", ")
    settings = dict(part.split(" ", 1) for part in parts if " in front" not in part and " " in part)
    return settings | ({"pass": "True"} if " in front" in parts[0] else {})


def is_today(detail: str, case: ImagesCase) -> bool:
    """Whether a recorded configuration is the one that the case gets now.

    A field that did not exist yet counts as what the kernel did then: no repacking, and all steps of K multiplied,
    also those of zeros, which patches of 16 do not have.
    """
    now, then = today(case), recorded_settings(detail)
    skipped = now.get("skip_zeros") if case.patch == 16 else "False"
    defaults = {"raw_stages": "0", "repack_pairs": "0", "skip_zeros": skipped}
    if now.keys() - then.keys() - defaults.keys() or then.get("pass") != now.get("pass"):
        return False
    return all(then.get(name, defaults.get(name)) == value for name, value in now.items())


@dataclass(frozen=True)
class ImageRow:
    """A case of images, the run that it is shown from, and ours there; ``current`` as `is_today` says."""

    file: str
    date: str
    result: CaseResult
    ours: PeerResult
    current: bool

    @property
    def rank(self) -> tuple[bool, int, str]:
        """The row of a case is the one of today's configuration with most peers, the latest of those."""
        peers = {peer.name for peer in self.result.peers if peer.runs}
        return self.current, self.current * sum(bool(peers & set(names)) for names in COLUMNS.values()), self.date

    @property
    def kernel(self) -> str:
        """What reads the images."""
        settings = recorded_settings(self.ours.detail)
        return "a pass, then rows" if "pass" in settings else settings.get("source", "16-bit gather")

    def graph(self, peer: PeerResult) -> float | None:
        """Microseconds of a launch in a CUDA graph, of few images."""
        return peer.cost.graph if peer.cost and self.result.case.images <= FEW_IMAGES else None

    def cells(self) -> Iterator[str]:
        yield f"{self.result.case.images:,}{'' if self.current else ' *'}"
        yield self.kernel
        burst, sustained = (self.ours.summary(mode) for mode in overview.MODES)
        graph = self.graph(self.ours)
        yield f"*{graph / 1e3:.4f}*" if graph else f"{sustained.median:.3g} ({burst.median:.3g})"
        own = "pass + rows" if "pass" in recorded_settings(self.ours.detail) else "one kernel"
        peers = {peer.name: peer for peer in self.result.peers if peer.runs and peer.name != own}
        for names in COLUMNS.values():
            yield next((self.ratio(peers[name]) for name in names if name in peers), "")
        yield self.file

    def ratio(self, peer: PeerResult) -> str:
        """Time over ours: in a CUDA graph where both are, else sustained and in a burst."""
        graphs = self.graph(peer), self.graph(self.ours)
        if all(graphs):
            return f"*{graphs[0] / graphs[1]:.2f}*"
        summaries = [(peer.summary(mode), self.ours.summary(mode)) for mode in ("sustained", "burst")]
        sustained, burst = (other.median / ours.median for other, ours in summaries)
        return f"{sustained:.2f} ({burst:.2f})"


def _of_variants(text: str) -> Iterator[CaseResult]:
    """The runs of `bench.image_variants` as cases: its ``auto`` is ours, ``rows`` a pass and rows."""
    names = {"auto": OURS, "rows": "pass + rows"}
    found: dict[str, CaseResult] = {}
    for group in json.loads(text)["groups"].values():
        for key, info in group["info"].items():
            label, _, variant = key.partition(" | ")
            model, _, images = label.removesuffix(", channels last").partition(" x ")
            (case,) = make_cases([model], [int(images)], channels_last=label.endswith(", channels last"))
            runs = [Run(**run) for run in group["runs"].get(key, ())]
            peer = PeerResult(names.get(variant, f"{OURS} {variant}"), "complete", info["detail"], runs=runs)
            found.setdefault(label, CaseResult(case)).peers.append(peer)
    yield from found.values()


def image_rows() -> list[ImageRow]:
    """Every case that was timed, once, in the order of patches, layout and images."""
    rows: dict[ImagesCase, ImageRow] = {}
    for day in sorted(archive.index()):
        for path in archive.expand(archive.recorded(f"{day}/images*.json")):
            text = archive.read_text(path)
            if path.name in SUPERSEDED or "variants" in json.loads(text):
                continue
            run = from_json(text) if "schema" in json.loads(text) else None
            for result in run.cases if run else _of_variants(text):
                mine = [p for p in result.peers if p.runs and re.match(rf"{OURS}\b|one kernel|pass \+ rows", p.name)]
                current = [peer for peer in mine if is_today(peer.detail, result.case)]
                default = [peer for peer in mine if peer.name == OURS]
                for ours in (current or default)[:1]:
                    row = ImageRow(f"{day[:10]} {path.name}", run.date if run else day, result, ours, bool(current))
                    rows[result.case] = max(row, rows.get(result.case, row), key=lambda row: row.rank)

    def order(row: ImageRow) -> tuple[object, ...]:
        case = row.result.case
        return case.dtype != "uint8", case.multiplied, case.patch, case.channels_last, case.n, case.images

    return sorted(rows.values(), key=order)


def images() -> str:
    """A table per kind of images and patches."""
    tables: dict[str, list[ImageRow]] = {}
    for row in image_rows():
        case = row.result.case
        layout = ", channels_last" if case.channels_last else ""
        title = f"`{case.dtype}` images{layout}, patches of {case.patch}, `{case.multiplied}`, {case.n} features"
        tables.setdefault(title, []).append(row)
    header = ("images", "reads by", "ours, ms", *COLUMNS, "file")
    shown = {title: _used(header, [list(row.cells()) for row in rows]) for title, rows in tables.items()}
    return "\n\n".join(f"{title}\n\n{table}" for title, table in shown.items())


def _used(header: Iterable[str], rows: list[list[str]]) -> str:
    """A table without its empty columns."""
    kept = [i for i, _ in enumerate(header) if any(row[i] for row in rows)]
    return markdown([name for i, name in enumerate(header) if i in kept], [[row[i] for i in kept] for row in rows])


# --- gemm ------------------------------------------------------------------------------------------------------------


def products(*files: str) -> str:
    """A line per case: cuBLAS is the faster of torch's linear and the best of cuBLASLt's algorithms."""
    lines = []
    for result in (case for file in files for case in read(f"{DAY}/{file}.json").cases):
        times = {(peer.name, mode): peer.summary(mode) for peer in result.peers for mode in overview.MODES}
        ours = {mode: times[OURS, mode].median for mode in overview.MODES}

        def ratio(mode: str, *names: str) -> str:
            found = [times[name, mode].median for name in names if times.get((name, mode))]  # noqa: B023
            return f"{min(found) / ours[mode]:.3f}" if found else ""  # noqa: B023

        rate = result.case.flops / ours["sustained"] / 1e9
        cublas = ("torch linear", "cuBLASLt")
        lines.append([
            result.case.name, f"{ours['sustained']:.4f}", f"{rate:.0f}", ratio("burst", *cublas),
            ratio("sustained", *cublas), ratio("sustained", "quack"), ratio("sustained", "torch.compile"),
        ])  # fmt: skip
    header = ("case", "ours, ms sustained", "TFLOP/s", "cuBLAS, burst", "cuBLAS", "quack", "torch.compile")
    columns = [[float(line[i]) for line in lines if line[i]] for i in range(3, len(header))]
    for name, function in (("geometric mean", statistics.geometric_mean), ("least", min), ("most", max)):
        lines.append([f"**{name}**", "", "", *(f"{function(column):.3f}" if column else "" for column in columns)])
    return _used(header, lines)


def few_rows() -> str:
    """M x N x K of few rows, in bursts, as the chooser would have them."""
    lines = []
    for entry in tune_gemm.read(archive.recorded("2026-11-22-h200/gemm-few-rows.json")):
        regret = tune_gemm.regret(entry)
        chosen = (regret or 1) * entry.ours[0][0]
        lines.append((entry.case.name, f"{chosen:.2f}", f"{entry.torch:.2f}", f"{entry.torch / chosen:.2f}"))
    return markdown(("M x N x K", "ours, us", "torch (cuBLAS), us", "torch / ours"), lines)


def choice() -> str:
    """Time of the chosen configuration over that of the fastest that was timed."""
    longer = tune_gemm.read_bench(archive.recorded(f"{DAY}/gemm-configs.json"))
    tuned = [case for case in tune_gemm.read(archive.recorded(f"{DAY}/gemm-tune.json")) if case.case.m > 64]
    groups = {
        "`gemm`, timed for longer, bursts": longer[::2],
        "`gemm`, timed for longer, sustained": longer[1::2],
        "`gemm`, tuner, more than 64 rows": tuned,
    }
    lines = []
    for name, group in groups.items():
        found = [value for entry in group if (value := tune_gemm.regret(entry)) is not None]
        lines.append((name, str(len(found)), f"{statistics.mean(found):.3f}", f"{max(found):.3f}"))
    return markdown(("what", "cases", "mean", "most"), lines)


# --- host and archives -----------------------------------------------------------------------------------------------


def host() -> str:
    """Microseconds of Python from the call to the launch in the queue."""
    text = archive.read_text(archive.recorded("2026-11-24-h200/host-time.txt"))
    found = re.findall(r"^(.+?) +there.* here +([\d.]+) us \(([\d.]+) to ([\d.]+)\)", text, re.MULTILINE)
    return markdown(("call", "us", "range"), ((name, us, f"{low} to {high}") for name, us, low, high in found))


def archives() -> str:
    """Every recorded file and what it shows."""
    lines = []
    for name, files in archive.index().items():
        for file, entry in files.items():
            program = re.match(r"python -m ([\w.]+)", entry["command"])
            lines.append((name, f"`{file}`", f"`{program[1] if program else entry['command']}`", entry["shows"]))
    return markdown(("archive", "file", "made by", "shows"), lines)


TABLES: dict[str, Callable[[], str]] = {
    "headline": headline,
    "designs": designs,
    "models": models,
    "models_by_images": models_by_images,
    "launches": launches,
    "images": images,
    "gemm": lambda: products("gemm-squares", "gemm-layers"),
    "tf32": lambda: products("gemm-tf32"),
    "few_rows": few_rows,
    "choice": choice,
    "host": host,
    "archives": archives,
}


def render() -> str:
    """The page.

    Raises:
        KeyError: the text asks for a table that there is not.
    """
    return re.sub(r"^\{(\w+)\}$", lambda match: TABLES[match[1]](), TEXT.read_text(), flags=re.MULTILINE)


if __name__ == "__main__":
    PAGE.write_text(render())
