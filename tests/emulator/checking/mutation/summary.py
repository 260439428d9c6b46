"""Verdicts to a score, a list of complaints, Markdown and JSON."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from cute_kernels.emulator.checking.mutation.judge import Verdict
from tests.emulator.checking.mutation.reviewed import REVIEWS, Review, review_of


@dataclass(frozen=True)
class Summary:
    """Verdicts beside the reviews of the survivors.

    Attributes:
        killed, gaps, equivalent, unreviewed, refused: verdicts by what became of them; ``gaps`` are reviewed
            survivors that are not equivalent.
        contradictions: killed although a review calls them equivalent: a false alarm or a wrong review.
    """

    killed: list[Verdict]
    gaps: list[Verdict]
    equivalent: list[Verdict]
    unreviewed: list[Verdict]
    refused: list[Verdict]
    contradictions: list[Verdict]
    reviews: Sequence[Review]

    @property
    def score(self) -> float:
        """Share of the mutants killed among those that are not equivalent; an unreviewed survivor counts against it."""
        total = len(self.killed) + len(self.gaps) + len(self.unreviewed)
        return len(self.killed) / total if total else 1.0

    def complaints(self, *, least: float, complete: bool) -> list[str]:
        """Why a run fails. ``complete``: all targets ran, so that a review that matches nothing is out of date."""
        found = [f"not reviewed: {v.target}: {v.key} at {v.place}" for v in self.unreviewed]
        found += [
            f"reviewed as equivalent, but killed ({v.killer}): {v.target}: {v.key} at {v.place}: {v.message}"
            for v in self.contradictions
        ]
        survivors = [*self.gaps, *self.equivalent]
        if complete:
            found += [
                f"matches no survivor any more: {review.mutation} {review.opcode} at {review.place}"
                for review in self.reviews
                if not any(review_of(verdict, self.reviews) is review for verdict in survivors)
            ]
        found += [f"crashes the emulator: {v.target}: {v.key}" for v in self.killed if v.killer == "internal error"]
        if self.score < least:
            found.append(f"the score {self.score:.1%} is below {least:.0%}")
        return found


def summarise(verdicts: Sequence[Verdict], reviews: Sequence[Review] = REVIEWS) -> Summary:
    killed = [v for v in verdicts if v.killed]
    survivors = [(v, review_of(v, reviews)) for v in verdicts if v.survived]
    judged = [(v, review_of(v, reviews)) for v in killed]
    return Summary(
        killed=killed,
        gaps=[v for v, review in survivors if review is not None and not review.equivalent],
        equivalent=[v for v, review in survivors if review is not None and review.equivalent],
        unreviewed=[v for v, review in survivors if review is None],
        refused=[v for v in verdicts if v.refused],
        contradictions=[v for v, review in judged if review is not None and review.equivalent],
        reviews=reviews,
    )


def markdown(summary: Summary, verdicts: Sequence[Verdict]) -> str:
    """Table per target, table of killers, and the survivors with their reasons."""
    targets = list(dict.fromkeys(v.target for v in verdicts))
    groups = ("killed", "gaps", "unreviewed", "equivalent", "refused")
    counts = {name: Counter(v.target for v in getattr(summary, name)) for name in groups}
    lines = [
        f"{len(verdicts)} verdicts on mutants, {len(summary.killed)} killed, score {summary.score:.1%} "
        "(killed / all that are not equivalent).",
        "",
        "| target | mutants | killed | known gaps | not reviewed | equivalent | refused | score |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for target in targets:
        row = [counts[name][target] for name in groups]
        score = row[0] / max(sum(row[:3]), 1)
        lines.append(f"| {target} | {sum(row)} | {' | '.join(map(str, row))} | {score:.1%} |")
    lines += ["", "| killed by | mutants | of these under eager completion |", "|---|---|---|"]
    killers = Counter(v.killer for v in summary.killed)
    eager = Counter(v.killer for v in summary.killed if v.schedule == "eager")
    lines += [f"| {killer} | {count} | {eager[killer]} |" for killer, count in killers.most_common()]
    for title, group in (
        ("Not reviewed", summary.unreviewed),
        ("Known gaps", summary.gaps),
        ("Equivalent", summary.equivalent),
        ("Refused by the emulator", summary.refused),
    ):
        if group:
            lines += ["", f"## {title}", "", *_grouped(group, summary.reviews)]
    return "\n".join(lines) + "\n"


def _grouped(verdicts: Sequence[Verdict], reviews: Sequence[Review]) -> list[str]:
    """One row per mutation and place; equal ones of unrolled code and of several targets together."""
    rows: dict[tuple[str, str, str], list[Verdict]] = {}
    for verdict in verdicts:
        rows.setdefault((verdict.mutation, verdict.opcode, verdict.place), []).append(verdict)
    lines = ["| mutation | DSL source | PTX lines | why |", "|---|---|---|---|"]
    for (mutation, opcode, place), group in rows.items():
        targets = dict.fromkeys(v.target for v in group)
        lines_of = {t: dict.fromkeys(str(v.line) for v in group if v.target == t) for t in targets}
        where = "; ".join(f"{target}: {', '.join(numbers)}" for target, numbers in lines_of.items())
        review = review_of(group[0], reviews)
        why = review.reason if review is not None and group[0].survived else group[0].message
        cells = [f"{mutation} `{opcode}`", place, where, why]
        lines.append("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |")
    return lines


def as_json(summary: Summary, verdicts: Sequence[Verdict]) -> dict:
    def entry(verdict: Verdict) -> dict:
        review = review_of(verdict, summary.reviews) if verdict.survived else None
        status = "gap" if review and not review.equivalent else "equivalent" if review else "unreviewed"
        if not verdict.survived:
            status = "refused" if verdict.refused else "killed"
        return {**dataclasses.asdict(verdict), "status": status, "reason": review.reason if review else ""}

    return {"score": summary.score, "mutants": [entry(verdict) for verdict in verdicts]}
