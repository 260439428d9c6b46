"""The page of a sweep: a table to sort and filter, memory maps, rooflines, waves and a timeline, in one HTML document.

Plain HTML and a short script. Libraries of tables and plots draw no memory map, know nothing of a row that is selected
everywhere at once, and have 0.7 MB (DataTables) to 4.5 MB (Plotly) that every page would carry.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cute_kernels.common.chips import CHIPS, DEFAULT_ARCH
from cute_kernels.common.words import counted
from cute_kernels.config import ITEMSIZE
from cute_kernels.explore import plan_facts, sweep_outcomes, sweep_text
from cute_kernels.explore.sweep_table import Row
from cute_kernels.plan.config_codec import spell

if TYPE_CHECKING:
    from cute_kernels.plan import Plan

_COLOURS = 9  # of the style sheet
_MOST_SLICES = 20_000


class Page(str):
    """An HTML document, which a notebook shows in a frame of its own."""

    def _repr_html_(self) -> str:
        style = "width:100%;height:85vh;border:1px solid #888"
        return f'<iframe title="Configurations of a kernel" style="{style}" srcdoc="{html.escape(self)}"></iframe>'


def page(
    rows: Sequence[Row],
    subject: Any = None,
    timeline: Mapping[str, Any] | None = None,
    beside: str | None = None,
) -> Page:
    """A table of configurations with all that is known of each row, without anything outside of it.

    ``rows``: of one sweep. ``subject``: of `cute_kernels.explore.subjects`; without it rows have no plan, no roofline
    and no code to copy. ``timeline``: of one row, as `cute_kernels.explore.explorer.timeline` gives it. ``beside``:
    name of the timeline's file for Perfetto in the folder of the page."""
    return _document(
        "Configurations of a kernel, side by side",
        _tag("p", _text(subject.title), id="subject") if subject else "",
        _tag("section", *_controls(rows), *_table(rows), id="table"),
        _tag("section", *(_details(row, number, subject) for number, row in _numbered(rows)), id="row"),
        _tag("section", *_answers(rows), id="answers"),
        _tag("section", *_maps(rows), id="maps"),
        _tag("section", *_layouts(rows), id="layouts"),
        _tag("section", *_timeline(timeline, beside), id="timeline") if timeline else "",
    )


def timeline_page(timeline: Mapping[str, Any], beside: str | None = None) -> Page:
    """A timeline alone; arguments as of `page`."""
    return _document("Who works, and who waits for whom", _tag("section", *_timeline(timeline, beside), id="timeline"))


def _document(title: str, *sections: str) -> Page:
    plain, script = (Path(__file__).with_suffix(suffix).read_text("utf-8") for suffix in (".css", ".js"))
    style = plain + "".join(f".b{bank} {{ background: hsl({11 * bank} 55% 78%); }}\n" for bank in range(32))
    head = f'<meta charset="utf-8"><title>{title}</title><meta name="viewport" content="width=device-width">'
    body = f"<main>\n<h1>{title}</h1>\n{''.join(sections)}</main>\n<script>\n{script}</script>"
    return Page(
        f'<!DOCTYPE html>\n<html lang="en"><head>{head}<style>\n{style}</style></head><body>{body}</body></html>\n'
    )


def _tag(name: str, *inside: str, **attributes: Any) -> str:
    """An element; of attributes None is left out, True has no value, underlines of names stand for hyphens."""
    keys = {key: key.strip("_").replace("_", "-") if key.isidentifier() else key for key in attributes}
    given = {keys[key]: value for key, value in attributes.items() if value is not None}
    written = (key if value is True else f'{key}="{html.escape(str(value))}"' for key, value in given.items())
    end = "" if name == "input" else f"</{name}>"
    return f"<{' '.join([name, *written])}>{''.join(inside)}{end}\n"


_text = html.escape


def _numbered(rows: Sequence[Row]) -> list[tuple[int, Row]]:
    numbers = sweep_outcomes.numbers(rows)
    return [(numbers[id(row)], row) for row in rows]


def _shown(value: Any) -> str:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return f"{value:,.1f}" if isinstance(value, float) and value % 1 else f"{value:,.0f}"
    return "" if value is None else spell(value)


# --- the table, and what chooses a row -------------------------------------------------------------------------------


def _controls(rows: Sequence[Row]) -> Iterator[str]:
    """A choice for each field; what the rows are filtered by; which columns are shown."""
    yield "<h2>Table</h2>\n"
    fields = []
    for field in dict.fromkeys(name for row in rows for name in row.settings):
        values = dict.fromkeys(spell(row.settings[field]) for row in rows if field in row.settings)
        options = (_tag("option", _text(value), value=value) for value in values)
        fields.append(_tag("label", _text(field), " ", _tag("select", *options, data_field=field)))
    first = '<button type="button" id="default">row 0, the default</button>\n' if not rows[0].settings else ""
    yield _tag("fieldset", "<legend>select a row by its settings</legend>", *fields, first)
    hint = "words, or column<number"
    yield _tag(
        "p", f'<label>filter <input type="search" id="filter" placeholder="{hint}"></label> ',
        '<label><input type="checkbox" id="legal"> legal rows alone</label> <output id="found"></output>',
    )  # fmt: skip


def _table(rows: Sequence[Row]) -> Iterator[str]:
    records = [{"row": r["row"], "refused": r["refused"], **r} for r in sweep_outcomes.records(rows)]
    hidden = _hidden(rows, records)
    columns = list(records[0])
    boxes = (
        _tag("label", _tag("input", type="checkbox", data_column=n, checked=n not in hidden or None), " ", _text(name))
        for n, name in enumerate(columns)
    )
    yield _tag("details", "<summary>columns</summary>", *boxes, id="columns")
    heads = (
        _tag("th", _tag("button", _text(name), type="button"), scope="col", hidden=n in hidden or None)
        for n, name in enumerate(columns)
    )
    lines = (_line(row, record, hidden) for row, record in zip(rows, records, strict=True))
    yield '<div class="wide" tabindex="0" role="region" aria-label="table of configurations">'
    caption = "<caption>Row 0 is what the problem gets by itself.</caption>" if not rows[0].settings else ""
    yield _tag("table", caption, _tag("thead", _tag("tr", *heads)), _tag("tbody", *lines)) + "</div>"


def _hidden(rows: Sequence[Row], records: Sequence[Mapping[str, Any]]) -> set[int]:
    """Columns that are not shown at first: counts of one unit, and what all rows share."""
    counts = dict.fromkeys(name for row in rows for name in row.counts)
    few = {"warp instructions", "shared: bank conflicts", "L2 bytes read"}
    names = {sweep_outcomes.tidy(name) for name in counts if name not in few}
    names |= {"modelled_us_least", "modelled_us_most"}
    names |= {name for name in ("design", "refused") if len({record[name] for record in records}) == 1}
    return {number for number, name in enumerate(records[0]) if name in names}


def _line(row: Row, record: Mapping[str, Any], hidden: set[int]) -> str:
    number = record["row"]
    cells = []
    for column, (name, value) in enumerate(record.items()):
        text = _text(_shown(value))
        if value is None and hasattr(row.config, name):  # of row 0
            text = _tag("i", _text(spell(getattr(row.config, name))), title="as the problem gets it")
        if name == "refused":
            text = _tag("div", text)
        elif name == "row":
            text = _tag("label", f'<input type="radio" name="row" value="{number}"> {number}')
            text += f'<a href="#row-{number}">plan</a>'
        elif name == "modelled_us" and row.prediction is not None:
            text += f" <small>{row.prediction.least:,.0f} to {row.prediction.most:,.0f}</small>"
        kind = "number" if isinstance(value, (int, float)) else None
        cells.append(_tag("td", text, data_v=value, class_=kind, hidden=column in hidden or None))
    names = ["refused"] * (row.reason is not None) + ["default"] * (not row.settings)
    settings = {f"data-set-{name}": spell(value) for name, value in row.settings.items()}
    title = f"not legal: {row.reason}" if row.reason is not None else "legal"
    return _tag("tr", *cells, data_row=number, class_=" ".join(names) or None, title=title, **settings)


# --- one row ---------------------------------------------------------------------------------------------------------


def _details(row: Row, number: int, subject: Any) -> str:
    """Everything about a row; the script shows that of the selected one, and puts its memory map in."""
    legal = "legal" if row.reason is None else f"not legal: {row.reason}"
    settings = sweep_outcomes.settings_text([row]) if row.settings else "the default"
    parts = [_tag("h2", f"Row {number}: {_text(settings)}"), _tag("p", _text(legal))]
    parts.append('<div class="map-of-row"></div>')
    plan = None
    if row.reason is None and subject is not None and row.config is not None:
        plan = row.plan(subject.problem)
        parts += [*_waves(plan), *_roofline(row, plan)]
    if row.memory is not None:
        parts.append(_accesses(row.memory))
    if row.prediction is not None:
        times = [(name, f"{time:,.1f} us") for name, time in row.prediction.parts.items() if time]
        parts.append(_pairs("Modelled time, by what takes it", times))
    if subject is not None:
        parts += [_tag("h3", "To copy"), _tag("div", _tag("pre", _text(subject.code(row))), class_="copy")]
    if plan is not None:
        parts.append(_pairs("Plan", plan_facts.described(plan)))
    return _tag("article", *parts, id=f"row-{number}", hidden=True)


def _pairs(title: str, pairs: Sequence[tuple[str, str]]) -> str:
    lines = (_tag("tr", _tag("th", _text(name), scope="row"), _tag("td", _text(value))) for name, value in pairs)
    return _tag("details", _tag("summary", _text(title)), _tag("table", *lines), open=True)


def _waves(plan: Plan) -> Iterator[str]:
    """How often all clusters get a tile, and how many get one the last time."""
    yield "<h3>Waves</h3>\n"
    for part in plan.launches:
        if not hasattr(part, "tiles"):
            continue
        tiles = part.tiles * getattr(part, "feature_groups", 1)  # each group of features takes all of them
        waves = -(-tiles // part.clusters)
        last = tiles - (waves - 1) * part.clusters
        rounds = -(-part.clusters * math.prod(part.cluster) // part.sm_count)  # of clusters that do not fit at once
        clusters = f"{counted(part.clusters, 'cluster')} of {counted(math.prod(part.cluster), 'CTA')}"
        text = f"{counted(tiles, 'tile')} over {clusters}: {counted(waves * rounds, 'wave')}"
        share = tiles / (waves * part.clusters)
        name = f"{part.operation}: " if len(plan.launches) > 1 else ""
        yield _tag("p", f"{name}{text}. A wave has a tile for each cluster; all of them together are {share:.1%} full")
        what = f"{last:,} of {part.clusters:,} clusters have a tile in the last wave"
        yield _bar([(what, 0, last, 1)], part.clusters)


def work_of(problem: Any) -> tuple[int, int]:
    """Operations of a problem, a multiplication and an addition each, and the bytes of both operands and the output."""
    out, item = ITEMSIZE[problem.out_dtype], ITEMSIZE[problem.in_dtype]
    if hasattr(problem, "positions"):
        rows, k = problem.batch * problem.positions, problem.channels * problem.patch**2
        first, weight = problem.batch * problem.channels * problem.height * problem.width, 1 if item == 1 else 2
    else:
        rows, k, weight = problem.m, problem.k, item
        first = rows * k
    batches = getattr(problem, "batches", 1)
    nbytes = first * item + problem.n * k * weight + rows * problem.n * out
    return 2 * rows * problem.n * k * batches, nbytes * batches


def _roofline(row: Row, plan: Plan) -> Iterator[str]:
    """The least time that arithmetic and device memory leave, beside the row's own."""
    operations, nbytes = work_of(plan.problem)
    yield _tag("h3", "Roofline")
    words = f"{operations / 1e9:,.1f} G operations, {nbytes / 1e6:,.1f} MB of operands and output"
    yield _tag("p", f"{words}: {operations / nbytes:,.0f} operations a byte")
    chip = CHIPS[plan.arch.name]
    if not chip.tensor_rate:
        yield _tag("p", f"The rates of {plan.arch.name} are not known here.")
        return
    rate = chip.tensor_rate * 2 / ITEMSIZE[plan.problem.in_dtype]
    known = [("tensor cores", 1e6 * operations / rate, None), ("device memory", 1e6 * nbytes / chip.memory_rate, None)]
    if row.prediction is not None:
        known.append(("modelled", row.prediction.microseconds, row.prediction))
    if row.measured is not None:
        known.append(("measured", row.measured, None))
    most = max(time if span is None else span.most for _, time, span in known)
    for colour, (name, time, span) in enumerate(known):
        text = f"{name}: {time:,.1f} us" + (f" ({span.least:,.0f} to {span.most:,.0f})" if span else "")
        ends = (span.least, span.most) if span else (time, time)
        yield _tag("p", text, class_="bar-name")
        yield _bar([("", 0, ends[0], colour), ("range", ends[0], ends[1] - ends[0], 8)][: 1 + bool(span)], most)
    bound = "tensor cores" if known[0][1] > known[1][1] else "device memory"
    yield _tag("p", f"By the data sheet of {chip.product} the problem takes no less time than its {bound}.")


# --- memory ----------------------------------------------------------------------------------------------------------


def _bar(parts: Sequence[tuple[str, float, float, int]], size: float, what: str = "") -> str:
    """Parts (name, start, length, colour) of something of a size."""
    places = (
        _tag(
            "span",
            _text(name),
            class_=f"c{colour % _COLOURS}",
            title=name or None,
            style=f"left:{100 * start / size:.4g}%;width:{100 * length / size:.4g}%",
        )  # fmt: skip
        for name, start, length, colour in parts
    )
    label = "; ".join([what, *(part[0] for part in parts)])
    return _tag("div", *places, class_="bar", role="img", aria_label=label)


def _layouts(rows: Sequence[Row]) -> Iterator[str]:
    """Banks of the tensors of rows, once for those that have the same; the script shows those of the selected row."""
    numbers, found = sweep_outcomes.numbers(rows), {}
    for row in rows:
        for tensor in row.memory.tensors if row.memory is not None else ():
            found.setdefault(tensor, []).append(numbers[id(row)])
    if not found:
        return
    yield "<h2>Layouts in shared memory</h2>\n<p>Of the selected row, where it was counted. A cell is the bank in "
    yield "which 16 bytes begin, or one element, where neighbours lie apart.</p>\n"
    for tensor, which in found.items():
        cells = ("".join(f'<td class="b{bank}">{bank}</td>' for bank in banks) for banks in tensor.banks)
        lines = (f"<tr><th>{number}</th>{row}</tr>\n" for number, row in enumerate(cells))
        caption = _tag("figcaption", _text(f"{_rows(which)}: {tensor.caption}"))
        yield _tag("figure", caption, _tag("table", *lines), class_="banks", data_rows=" ".join(map(str, which)))


def _rows(numbers: Sequence[int]) -> str:
    return f"row{'s' * (len(numbers) > 1)} {sweep_outcomes.spans(numbers)}"


def _accesses(memory: Any) -> str:
    """Costs of accesses to shared memory, by tensor and line."""
    import cute_kernels.explore.own_layouts as own_layouts  # the emulator

    titles = "".join(f"<th>{name}</th>" for name in ("tensor, line", "wavefronts", "bank conflicts"))
    lines = []
    for name, accesses in memory.by_tensor().items():
        heads = [(_tag("th", _text(name), scope="row"), own_layouts.costs(accesses))]
        heads += [
            (_tag("td", _text(f"{each.place} {', '.join(each.kinds)}"), _tag("code", _text(each.text))),
             own_layouts.costs([each]))
            for each in accesses
        ]  # fmt: skip
        for head, cost in heads:
            lines.append(_tag("tr", head, *(_tag("td", _shown(count), class_="number") for count in cost)))
    summary = "<summary>Accesses to shared memory, by tensor</summary>"
    return _tag("details", summary, _tag("table", f"<tr>{titles}</tr>\n", *lines), class_="accesses", open=True)


def _maps(rows: Sequence[Row]) -> Iterator[str]:
    """Maps of shared and tensor memory, one for the rows that have the same."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        if row.smem:
            groups.setdefault((row.arch, row.smem, row.smem_limit, row.tmem), []).append(row)
    if not groups:
        return
    yield "<h2>Memory of a CTA</h2>\n"
    numbers, colours = sweep_outcomes.numbers(rows), {}
    for row in rows:
        for region in (*row.smem, *row.tmem):
            colours.setdefault(_array(region.name), len(colours))
    for (arch, smem, limit, tmem), group in groups.items():
        which = [numbers[id(row)] for row in group]
        used = f"{group[0].smem_bytes:,} of {limit:,} B of shared memory"
        used += f", {group[0].tmem_columns} columns of tensor memory" if tmem else ""
        parts = [(f"{r.name}: {r.nbytes:,} B at {r.offset:,}", r.offset, r.nbytes, r.name) for r in smem if r.nbytes]
        columns = [(f"{r.name}: {r.columns} columns from {r.first}", r.first, r.columns, r.name) for r in tmem]
        bars = [
            _bar([(*part, colours[_array(name)]) for *part, name in some], size, what)
            for what, some, size in (
                ("shared memory", parts, limit),
                ("tensor memory", columns, CHIPS[arch or DEFAULT_ARCH].tmem_columns),
            )
            if some
        ]
        caption = _tag("figcaption", f"{_rows(which)}: {used}")
        yield _tag("figure", caption, *bars, data_rows=" ".join(map(str, which)))


def _array(name: str) -> str:
    """Name of an array without its stage or number."""
    return name.partition(":")[0].rstrip("0123456789 ")


# --- answers, timeline -----------------------------------------------------------------------------------------------


def _answers(rows: Sequence[Row]) -> Iterator[str]:
    """Which settings matter: levels of time, effects of fields, a plot of any two columns, and what is not known."""
    yield "<h2>Which settings matter</h2>\n"
    levels = "\n".join(sweep_text.ranking(rows, 3)).replace("\n    ", "; ")
    lines = [*levels.splitlines(), *sweep_outcomes.effects(rows)]
    yield _tag("ul", *(_tag("li", _text(line)) for line in lines))
    small = next((row.small for row in rows if row.small is not None), None)
    if small is not None:
        yield _tag(
            "p", "Counts are of ", _text(small.describe_problem()), ", which the kernel of the problem computes with ",
            f"tiles as full as there, on {small.sm_count} multiprocessors.",
        )  # fmt: skip
        missing = [number for number, row in _numbered(rows) if row.reason is None and not row.counts]
        if missing:
            yield _tag("p", f"No smaller problem shows {sweep_outcomes.spans(missing)} beside these.")
    if any(row.reason is None and row.microseconds is row.measured is None for row in rows):
        yield "<p>Where no time stands it is unknown: no model knows this kernel. Counts are work, and no time.</p>\n"
    for caveat in plan_facts.caveats(row.prediction for row in rows if row.measured is None):
        yield _tag("p", _text(caveat))
    yield '<p id="axes"></p><div id="plot"></div>\n'


def _timeline(found: Mapping[str, Any], beside: str | None) -> Iterator[str]:
    """Tracks and slices as SVG, which the script zooms; the axis counts steps."""
    tracks, slices = found["tracks"], found["slices"][:_MOST_SLICES]
    last = max(start + length for _, start, length, _, _ in slices)
    cut = f" These are the first {len(slices):,} of {len(found['slices']):,} slices." * (slices != found["slices"])
    yield _tag("h2", _text(f"A timeline of {found['of']}"))
    yield "<p>Under a random schedule. Its axis counts steps and is not time: who waits for whom is real, how long is "
    yield f"not. Drag, or use the keys ← → + − 0.{cut}"
    yield " Another row's: <code>cute-kernels explore .. --row N</code>, in a notebook "
    yield "<code>subject.timeline(rows, number=N)</code>."
    if beside is not None:
        yield f' <a href="{_text(beside)}" download>The file for ui.perfetto.dev</a> has all clusters.'
    yield '</p><p id="span" role="status"></p>\n'
    names = (_tag("li", _text(name)) for name in tracks)
    shapes = [
        f'<rect class="{kind}" x="{start}" y="{track + 0.1:g}" width="{length}" height=".8"><title>'
        f"{_text(words)}</title></rect>"
        for track, start, length, kind, words in sorted(slices, key=lambda each: each[3] == "instruction")
    ]
    arrows = (arrow for arrow in found["arrows"] if arrow[2] <= last)
    shapes += (f'<path d="M{start} {track + 0.5} L{end} {other + 0.5}"/>' for start, track, end, other in arrows)
    picture = _tag(
        "svg", *shapes, viewBox=f"0 0 {last} {len(tracks)}", preserveAspectRatio="none", tabindex=0, role="img",
        aria_label="who works and who waits for whom, in steps", style=f"height:{1.25 * len(tracks)}em",
    )  # fmt: skip
    keys = "work", "wait", "instruction", "unit"
    words = "work", "wait", "instruction that synchronises or starts something", "copy, MMA or commit under way"
    legend = (_tag("li", _tag("i", class_=key), " ", text) for key, text in zip(keys, words))
    yield _tag("ul", *legend, "<li>lines: a release, and the wait that it ends</li>", class_="legend")
    yield _tag("div", _tag("ol", *names), picture, class_="tracks")
