"""docs/performance.md: tables of the recorded results.

    python -m bench.performance        writes the page, without a GPU, in seconds

The text is in performance_page.md beside this file; a name in braces on a line of its own is a table of `TABLES`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from bench import archive, choices, choices_fit, choices_images, overview
from bench.image_cases import ImagesCase, make_cases, problem
from bench.peers import OURS
from bench.results import HEADER, CaseResult, PeerResult, Results, case_rows, from_json, markdown, reference_ms
from bench.timing import Run
from cute_kernels.plan import ARCHS, make_plan
from cute_kernels.plan.images_sm90 import REPACK_PAIRS

TEXT = Path(__file__).with_name("performance_page.md")
PAGE = TEXT.parents[1] / "docs" / "performance.md"

DAY = "2026-11-21-h200"
LAYERS = "2026-11-30-h200"
"""Archive of the last measurement of the layers of towers."""

CHOICES, LATER = "2026-11-29-h200.tar.xz", "2026-11-30-h200.tar.xz"
"""Archives of the shapes that were drawn for the chooser of the GEMM, and of a day later."""

CHOICE_FILES = {
    "one in three": (f"{CHOICES}/choices.csv", f"{CHOICES}/choices-?.csv", f"{CHOICES}/choices-??.csv"),
    "few columns or rows": (f"{CHOICES}/choices-narrow*.csv",),
    "drawn after the last fit": (f"{CHOICES}/after-wide*.csv", f"{LATER}/after-wide*.csv"),
    "drawn after it, also in 80 other tiles": (f"{LATER}/after-tiles*.csv", f"{CHOICES}/after-narrow*.csv"),
}
"""Files of shapes, of which no fit of numbers has seen one in three, or, of those drawn after it, any."""


def read(name: str) -> Results:
    """A recorded document, ``"2026-11-21-h200/headline.json"``."""
    return from_json(archive.read_text(archive.recorded(name)))


# --- patch_embed -----------------------------------------------------------------------------------------------------


def headline() -> str:
    """Every peer at the headline size."""
    (result,) = read(f"{DAY}/headline.json").cases
    names = ("peer", "computes", "burst ms", "sustained ms", "vs ours", "TFLOP/s", "mJ")
    shown = [HEADER.index(name) for name in names]
    rows = [[row[i].partition(" [")[0] for i in shown] for row in (HEADER, *case_rows(result, OURS))]
    return markdown(rows[0], rows[1:])


def model_rows() -> list[overview.Row]:
    """The cases of `python -m bench.overview` over all runs of models."""
    paths = archive.expand(archive.recorded(f"{DAY}/models*.json"))
    return overview.collect(sorted((from_json(archive.read_text(path)) for path in paths), key=lambda run: run.date))


def models() -> str:
    """A row per model: our burst, and the nearest peer that computes the same in a burst and sustained, by images."""
    rows: dict[str, dict[int, str]] = {}
    for row in model_rows():
        case = row.result.case
        ratios = [min(row.ratios(mode, "complete").values()) for mode in overview.MODES]
        shown = [f"{ratio:.2f}" if ratio > 1 else f"**{ratio:.2f}**" for ratio in ratios]
        ours = 1e3 * (reference_ms(row.result, OURS, "burst") or 0)
        cell = f"{ours:.{1 if ours < 100 else 0}f}: {', '.join(shown)}"
        rows.setdefault(case.name.rpartition(" x ")[0], {})[case.requested_images] = cell
    images = sorted({count for cells in rows.values() for count in cells})
    lines = [[name, *(cells[count] for count in images)] for name, cells in rows.items()]
    return markdown(("model/positions", *map(str, images)), lines)


# --- patch_embed_images ----------------------------------------------------------------------------------------------

PEERS = {
    "rows that exist": ("patch_embed on FP8 rows", "gemm on BF16 rows"),
    "compiled preparation + `patch_embed`": ("prepare compiled + patch_embed",),
    "compiled patchify + linear": ("patchify + linear compiled",),
    "compiled convolution": ("conv compiled",),
}
"""Columns of the table of what else embeds images, and the peers that may stand in each."""

IMAGES = (1, 8, 64, 512, 4736)
"""Numbers of images that the table of times shows."""

FEW_IMAGES = 64
"""Up to which a launch is so short that its time is shown in a CUDA graph, without the host."""

MODES = ("sustained", "burst")

KIND = ("pixels", "precision", "patch", "features")

SUPERSEDED = ("images-p14-held.json", "images-int16.json")
"""Times of a kernel that lacked a fence; times of 16-bit weights, which no kernel has any more."""

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


FIELDS_WENT = "2026-11-27"
"""Runs from this day on have the pairs of rows and the products of zeros that are no fields any more."""


def is_today(detail: str, case: ImagesCase, date: str) -> bool:
    """Whether a configuration that was recorded on a day is the one that the case gets now.

    A field that did not exist yet counts as what the kernel did then: no repacking, and all steps of K multiplied,
    also those of zeros, which patches of 16 do not have.
    """
    now, then = today(case), recorded_settings(detail)
    if date < FIELDS_WENT and "raw_stages" in now:  # what these were, while they were fields
        now |= {"repack_pairs": str(REPACK_PAIRS if now["source"] == "repack" else 0), "skip_zeros": "True"}
    skipped = now.get("skip_zeros") if case.patch == 16 else "False"
    defaults = {"raw_stages": "0", "repack_pairs": "0", "skip_zeros": skipped}
    if now.keys() - then.keys() - defaults.keys() or then.get("pass") != now.get("pass"):
        return False
    return all(then.get(name, defaults.get(name)) == value for name, value in now.items())


@dataclass(frozen=True)
class ImageRow:
    """A case of images, the run that it is shown from, and ours there; ``current`` as `is_today` says."""

    date: str
    result: CaseResult
    ours: PeerResult
    current: bool

    @property
    def rank(self) -> tuple[bool, int, str]:
        """The row of a case is the one of today's configuration with most peers, the latest of those."""
        peers = {peer.name for peer in self.result.peers if peer.runs}
        return self.current, self.current * sum(bool(peers & set(names)) for names in PEERS.values()), self.date

    @property
    def kind(self) -> tuple[str, ...]:
        """Pixels, patch and features, as the tables have them."""
        case = self.result.case
        layout = " channels_last" if case.channels_last else ""
        return f"{case.dtype}{layout}", f"`{case.multiplied}`", str(case.patch), str(case.n)

    def graph(self, peer: PeerResult) -> float | None:
        """Microseconds of a launch in a CUDA graph, of few images."""
        return peer.cost.graph if peer.cost and self.result.case.images <= FEW_IMAGES else None

    def time(self) -> str:
        """Microseconds sustained and in a burst, or in a graph."""
        graph = self.graph(self.ours)
        shown = (1e3 * summary.median for mode in MODES if (summary := self.ours.summary(mode)))
        sustained, burst = (f"{us:,.{0 if us >= 100 else 1}f}" for us in shown)
        text = f"*{graph:.1f}*" if graph else f"{sustained} ({burst})"
        return text if self.current else f"{text} \\*"

    def ratios(self) -> list[str]:
        """A cell for each column of `PEERS`."""
        peers = {peer.name: peer for peer in self.result.peers if peer.runs}
        return [next((self.ratio(peers[name]) for name in names if name in peers), "") for names in PEERS.values()]

    def ratio(self, peer: PeerResult) -> str:
        """Time over ours: in a CUDA graph where both are, else sustained and in a burst."""
        graphs = self.graph(peer), self.graph(self.ours)
        if all(graphs):
            return f"*{graphs[0] / graphs[1]:.2f}*"
        summaries = [(peer.summary(mode), self.ours.summary(mode)) for mode in MODES]
        sustained, burst = (other.median / ours.median for other, ours in summaries)
        return f"{sustained:.2f} ({burst:.2f})"


def _of_variants(text: str) -> Iterator[CaseResult]:
    """Runs of a bench that no longer exists as cases: its ``auto`` is ours, ``rows`` a pass and rows."""
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
                date = run.date if run else day
                mine = [p for p in result.peers if p.runs and re.match(rf"{OURS}\b|one kernel|pass \+ rows", p.name)]
                current = [peer for peer in mine if is_today(peer.detail, result.case, date)]
                default = [peer for peer in mine if peer.name == OURS]
                for ours in (current or default)[:1]:
                    row = ImageRow(date, result, ours, bool(current))
                    rows[result.case] = max(row, rows.get(result.case, row), key=lambda row: row.rank)

    def order(row: ImageRow) -> tuple[object, ...]:
        case = row.result.case
        return case.dtype != "uint8", case.multiplied, case.patch, case.channels_last, case.n, case.images

    return sorted(rows.values(), key=order)


def images() -> str:
    """A row per kind of pixels, patch and features: our times by the number of images."""
    rows: dict[tuple[str, ...], dict[int, str]] = {}
    for row in image_rows():
        rows.setdefault(row.kind, {})[row.result.case.images] = row.time()
    lines = [[*kind, *(cells.get(count, "") for count in IMAGES)] for kind, cells in rows.items()]
    return markdown((*KIND, *(f"{count:,}" for count in IMAGES)), lines)


def images_peers() -> str:
    """A row per case of patches of 16 and 768 features in which something else was timed: its time over ours."""
    rows = [(row, row.ratios()) for row in image_rows() if row.kind[2:] == ("16", "768")]
    lines = [[row.kind[0], f"{row.result.case.images:,}", *ratios] for row, ratios in rows if any(ratios)]
    return markdown(("pixels", "images", *PEERS), lines)


# --- gemm ------------------------------------------------------------------------------------------------------------


def layers() -> str:
    """Ratios of `bench.gemm_layers`, as it printed them: layers of towers, then few rows beside cuBLAS."""
    text = archive.read_text(archive.recorded(f"{LAYERS}/gemm-layers.txt"))
    found = re.findall(r"^(\w+), (.*): ([\d.]+) geometric mean, ([\d.]+) least, ([\d.]+) most$", text, re.MULTILINE)
    ratios = {(mode, what): f"{float(mean):.2f} ({least} to {most})" for mode, what, mean, least, most in found}
    names = dict.fromkeys(what for _, what in ratios if not re.match(r"few rows, .* / (without|our INT8)$", what))
    return markdown(
        ("ratio of times", "back to back", "bursts"),
        [(name, ratios["sustained", name], ratios["burst", name]) for name in names],
    )


def unseen(name: str) -> list[choices_fit.Timed]:
    """Shapes of `CHOICE_FILES` that no fit has seen."""
    files = (archive.expand(archive.RESULTS / file) for file in CHOICE_FILES[name])
    shapes = choices.read([path for paths in files for path in paths])
    kept = (s for s in shapes if name.startswith("drawn") or choices_fit.held_out(s.problem))
    return [s for s in kept if s.problem not in choices.OUT_OF_REACH]  # which are in every file


def choice() -> str:
    """Of shapes that no fit has seen: time of the chosen configuration over that of the fastest that was timed, and
    time of cuBLAS over the chosen one's."""
    lines = []
    for name in CHOICE_FILES:
        shapes = unseen(name)
        cells = [name, str(len(shapes))]
        for values in (*choices_fit.regrets(shapes).values(), *choices_fit.regrets(shapes, 2).values()):
            found = sorted(value for value in values if not math.isnan(value))
            cells.append(f"{statistics.mean(found):.3f}, {choices_fit.percentile(found):.2f}, {found[-1]:.2f}")
        for mode in choices_fit.MODES:
            beside = [s for s in shapes if s.kind == "bf16" and mode in s.peers and s.times[mode]]
            ratios = [s.peers[mode] / s.times[mode][s.choice(mode)] for s in beside]
            cells.append(f"{statistics.geometric_mean(ratios):.2f} ({min(ratios):.2f})")
        lines.append(tuple(cells))
    header = (
        "shapes",
        "count",
        "mean, 95%, most",
        "bursts",
        "faster of two",
        "bursts",
        "cuBLAS / ours, BF16 (least)",
        "bursts",
    )
    return markdown(header, lines)


def image_choice() -> str:
    """As `choice`, of drawn models of patch embeddings: those that were kept out of the fit, and later ones."""
    kept = [s for s in choices_images.read(choices_images.RECORDED) if choices_fit.held_out(s.problem) and s.peers]
    cells: dict[str, list[str]] = {kind: [kind] for kind in choices_images.KINDS}
    for shapes in (kept, choices_images.read(choices_images.AFTER)):
        for kind, own in cells.items():
            of_kind = [shape for shape in shapes if shape.kind == kind]
            regrets = sorted(choices_fit.regrets(of_kind)["sustained"])
            mode = "sustained"
            ratios = [s.peers[mode] / s.times[mode][s.choice(mode)] for s in of_kind if mode in s.peers]
            own.append(f"{len(regrets)}: {statistics.mean(regrets):.3f} ({regrets[-1]:.2f})")
            own.append(f"{statistics.geometric_mean(ratios):.2f} ({min(ratios):.2f})")
    header = "", "kept out: choice / fastest (most)", "peer / choice (least)", "drawn after", "peer / choice"
    return markdown(header, list(cells.values()))


TABLES: dict[str, Callable[[], str]] = {
    "headline": headline,
    "models": models,
    "images": images,
    "images_peers": images_peers,
    "layers": layers,
    "choice": choice,
    "image_choice": image_choice,
}


def render() -> str:
    """The page.

    Raises:
        KeyError: the text asks for a table that there is not.
    """
    return re.sub(r"^\{(\w+)\}$", lambda match: TABLES[match[1]](), TEXT.read_text(), flags=re.MULTILINE)


if __name__ == "__main__":
    PAGE.write_text(render())
