"""Campaigns in a file: what is killed goes on, shards are merged, and the table is that of an undisturbed run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cute_kernels.commands.cli import main
from cute_kernels.config import PatchEmbedProblem, Sm100PatchEmbedConfig
from cute_kernels.explore import sweep_table
from cute_kernels.explore.store import Store, merge
from cute_kernels.explore.sweep_outcomes import records
from cute_kernels.operations import compile

PROGRAM = Path(__file__).parents[2] / "docs" / "examples" / "sweep_bias_add.py"
SWEEP = [str(PROGRAM), "--arch", "sm_90a", "--arguments=--m 64", "--vary", "rows=16,24,32", "--vary", "stages=1,2"]
PROBLEM = PatchEmbedProblem(m=512, n=256, k=256)


def whole_rows(store: Path) -> int:
    return store.read_text().count('"versions"') if store.exists() else 0


def killed_after(rows: int, store: Path, words: list[str]) -> None:
    """Runs a campaign, and kills it as soon as the file has so many rows more."""
    before = whole_rows(store)
    command = [sys.executable, "-m", "cute_kernels", "sweep", *words, "--store", str(store)]
    process = subprocess.Popen(command, env=os.environ, stdout=subprocess.DEVNULL, start_new_session=True)
    while process.poll() is None and whole_rows(store) < before + rows:
        time.sleep(0.02)
    assert process.poll() is None, "the campaign came to its end"
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def test_a_campaign_that_was_killed_twice_and_resumed_on_two_shards_has_the_table_of_an_undisturbed_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUTE_KERNELS_CACHE_DIR", "off")  # no run comes from anywhere else
    main(["sweep", *SWEEP, "--jobs", "1", "--json", str(tmp_path / "undisturbed.json")])
    undisturbed = capsys.readouterr().out
    first, second, both = (tmp_path / f"{name}.jsonl" for name in ("first", "second", "both"))
    half = [*SWEEP, "--jobs", "1", "--shard", "1/2"]
    killed_after(1, first, half)
    with first.open("a") as file:
        file.write('{"schema": 1, "settings": {"ro')  # as if in the middle of a line
    killed_after(1, first, [*half, "--resume"])
    main(["sweep", *half, "--store", str(first), "--resume"])
    main(["sweep", *SWEEP, "--shard", "2/2", "--store", str(second)])
    said = capsys.readouterr().out.splitlines()
    assert [line.partition(" are in ")[0] for line in said] == ["3 of 6 rows", "3 of 6 rows"]
    assert main(["merge", str(both), str(first), str(second)]) == 0
    assert capsys.readouterr().out == f"6 rows in {both}\n"
    monkeypatch.setattr("cute_kernels.explore.sweep_program._facts", lambda *_: pytest.fail("run again"))
    again = [*SWEEP, "--jobs", "1", "--store", str(both), "--resume", "--json", str(tmp_path / "merged.json")]
    assert main(["sweep", *again]) == 0
    assert capsys.readouterr().out == undisturbed
    assert (tmp_path / "merged.json").read_text() == (tmp_path / "undisturbed.json").read_text()
    found = [json.loads(line) for line in both.read_text().splitlines()]
    assert {record["arch"] for record in found} == {"sm_90a"} and {record["schema"] for record in found} == {1}
    assert all(record["versions"]["nvidia-cutlass-dsl"] and len(record["digest"]) == 64 for record in found)
    assert sorted((r["settings"]["rows"], r["reason"] is None) for r in found)[2:4] == [("24", False)] * 2


def rows_of(store: Store | None, **how) -> list[sweep_table.Row]:
    settings = [None, *sweep_table.grid(stages=(2, 3, 99))]
    return sweep_table.sweep(PROBLEM, Sm100PatchEmbedConfig(tile_n=128), settings, store=store, **how)


def test_rows_of_a_kernel_are_not_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.jsonl"
    first = rows_of(Store(path))
    assert path.read_bytes().count(b"\n") == len(first) == 4
    compiled = []
    real = compile.compile_plan
    monkeypatch.setattr(compile, "compile_plan", lambda plan, **how: compiled.append(plan) or real(plan, **how))
    again = rows_of(Store(path, resume=True))
    assert again == first and records(again) == records(first) and not compiled
    assert all(isinstance(row.registers, int) for row in again[:3]) and again[3].reason
    # What is counted, or compiled for another problem, is another row.
    counted = rows_of(Store(path, resume=True), counted=True, compiled=False)
    assert counted[1].counts and counted[1].memory.accesses and path.read_bytes().count(b"\n") == 8
    assert rows_of(Store(path, resume=True), counted=True, compiled=False) == counted


def test_a_line_that_was_cut_off_costs_its_row_alone(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    first = rows_of(Store(path), compiled=False)
    path.write_bytes(path.read_bytes()[:-10])
    assert rows_of(Store(path, resume=True), compiled=False) == first
    kept = path.read_bytes()
    assert [line[-1:] == b"}" for line in kept.splitlines()] == [True] * 3 + [False, True]
    assert rows_of(Store(path, resume=True), compiled=False) == first and path.read_bytes() == kept


def test_rows_of_other_sources_are_evaluated_again(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    first = rows_of(Store(path), compiled=False)
    changed = path.read_text().replace('"package": "', '"package": "0')
    path.write_text(changed)
    assert rows_of(Store(path, resume=True), compiled=False) == first
    assert path.read_text().startswith(changed) and path.read_bytes().count(b"\n") == 8


def test_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.jsonl"
    rows_of(Store(path), compiled=False)
    with pytest.raises(FileExistsError, match="go on with it by --resume"):
        Store(path)
    with pytest.raises(ValueError, match="shard = 3/2: must be i/n"):
        Store(path, resume=True, shard=(3, 2))
    other = tmp_path / "other.jsonl"
    other.write_text(path.read_text().replace('"stack_bytes": null', '"stack_bytes": 8'))
    with pytest.raises(ValueError, match="must be what another file says"):
        merge([path, other], tmp_path / "both.jsonl")
    other.write_text('{"schema": 2}\n')
    kernel = ["sweep", "--vary", "stages=3", "--no-compile"]
    for words, message in (
        ([*kernel, "--resume"], "--resume and --shard are for --store FILE"),
        ([*kernel, "--store", str(path)], "exists; go on with it by --resume"),
        ([*kernel, "--store", str(other), "--resume"], "must have lines of schema 1"),
        (["merge", str(tmp_path / "both.jsonl"), str(other)], "must have lines of schema 1"),
        (["merge", str(tmp_path / "both.jsonl"), str(tmp_path / "no.jsonl")], "no.jsonl"),
    ):
        assert main(words) == 2
        assert message in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*kernel, "--shard", "0/2"])
    assert "0/2: must be I/N with 1 <= I <= N" in capsys.readouterr().err
