"""What the emulator does now is what it did when tests/emulator/oracle/data was recorded, to the word and the byte."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from cute_kernels.config import Sm80Config
from cute_kernels.emulator import EmulatorError, Hang
from cute_kernels.emulator.programs.recorded import Relocation
from tests.emulator.checking.mutation.targets import TARGETS, KernelTarget
from tests.emulator.oracle import __main__ as command
from tests.emulator.oracle import launches, records
from tests.emulator.oracle.launches import Buffer
from tests.emulator.oracle.outcomes import Outcome, reported
from tests.emulator.oracle.records import Run, differences, outcome_now, without_repeated_reports
from tests.nightly import nightly

RECORDED = records.names()
DAILY = ("sm90-one-cta", "sm100-one-cta")


def check(name: str, runs: list[Run]) -> None:
    expected = records.read(name).outcomes
    different = {run: differences(expected[run], outcome_now(name, run)) for run in runs}
    assert not {run: change for run, change in different.items() if change}


def daily_runs(name: str) -> list[Run]:
    """The unchanged kernel, also with counters, and of each kind of error the first mutant."""
    outcomes, first = records.read(name).outcomes, {}
    for run, outcome in outcomes.items():
        if run.mutant and run.schedule == "eager" and "error" in outcome:
            first.setdefault(outcome["error"], run)
    return [Run("", "eager"), Run("", "counters"), *first.values()]


@pytest.mark.parametrize("name", DAILY)
def test_a_sample(name: str) -> None:
    check(name, daily_runs(name))


@nightly
@pytest.mark.parametrize("name", RECORDED)
def test_everything(name: str) -> None:
    check(name, list(records.read(name).outcomes))


def test_every_target_is_recorded_with_every_schedule_and_mutants_that_are_reported() -> None:
    kernels = {name for name, target in TARGETS.items() if isinstance(target, KernelTarget)}  # whose PTX may change
    without_mbarriers = {name for name in kernels if isinstance(TARGETS[name].config, Sm80Config)}
    # Those have none of the errors below; one recorded kernel is no longer compiled.
    assert RECORDED == sorted(kernels - without_mbarriers | {"sm100-coalesced"})
    for name in RECORDED:
        record = records.read(name)
        unchanged = [run for run in record.outcomes if not run.mutant]
        assert unchanged == records.runs(record.launch, most=1)[: len(unchanged)]
        assert all("error" not in record.outcomes[run] for run in unchanged), name
        digests = {record.outcomes[run]["digest"] for run in unchanged}
        assert len(digests) == 1, f"{name}: results under other schedules"
        errors = {outcome["error"] for outcome in record.outcomes.values() if "error" in outcome}
        assert {"BarrierMisuse", "Hang", "SharedMemoryRace"} <= errors, name
        reports = [outcome["report"] for outcome in record.outcomes.values() if "report" in outcome]
        assert reports and all("waits" in "\n".join(lines) for lines in reports), name


def test_whatever_differs_is_named() -> None:
    executed = {"digest": "12", "counts": {"warp_instructions": 7, "by_role": {"load": 7}}}
    assert differences(executed, dict(executed)) == {}
    counts = {"warp_instructions": 8, "by_role": {"load": 8}}
    assert differences(executed, executed | {"counts": counts}) == {"counts": (executed["counts"], counts)}
    assert differences(executed, executed | {"digest": "13"}) == {"digest": ("12", "13")}
    reported = {"error": "Hang", "words": "cluster 0 hangs", "text": "ab", "report": ["cluster 0 hangs", "CTA 0"]}
    assert differences(reported, executed).keys() == {"counts", "digest", "error", "report", "text", "words"}
    assert differences(reported, reported | {"report": ["cluster 0 hangs"]}).keys() == {"report"}
    short = {name: value for name, value in reported.items() if name != "report"}
    assert differences(short, reported) == {}  # of this one the digest of all lines is what was kept
    assert differences(short, reported | {"text": "ac"}) == {"text": ("ab", "ac")}


def test_one_report_of_each_error_is_kept_whole() -> None:
    lines = ["cluster 0 hangs", "CTA 0 waits"]
    hangs = [(Run(key, "eager"), {"error": "Hang", "report": list(lines)}) for key in ("a", "b")]
    short = (Run("c", "eager"), {"error": "IllegalAccess", "report": ["one line"]})
    kept = without_repeated_reports([*hangs, short])
    assert ["report" in outcome for outcome in kept.values()] == [True, False, False]


def test_words_are_those_of_every_process() -> None:
    """An address of a buffer is the file's, long instructions are cut short, and nothing is lost to the digest."""
    moved = Relocation(((launches.address_of(0), 0x7F1234560000, 4096),))
    instruction = "tcgen05.ld.sync.aligned.32x32b.x32.b32 {%r1, %r2, %r3}, [%r4]"
    error = EmulatorError(f"byte 0x7f1234560010, mask 0x1234, of `{instruction}`")
    error.at(SimpleNamespace(line=5, text="ld.b32", source="load.py:3"), "CTA 0 warp 1")
    outcome = reported(error, moved)
    short = "tcgen05.ld.sync.aligned.32x32b.x32.b32 {%r1, %r2"
    assert outcome.words == f"byte 0x5eed000000000010, mask 0x1234, of `{short}...`"
    assert (outcome.error, outcome.line, outcome.place) == ("EmulatorError", 5, "load.py:3, CTA 0 warp 1")
    other = reported(EmulatorError(error.message.replace("%r3", "%r9"), ptx_line=5, instruction="ld.b32"), moved)
    assert other.words == outcome.words and other.text != outcome.text
    hang = reported(Hang("cluster 0 hangs", "CTA 0 warp 1 waits"), moved)
    assert hang.report == ("cluster 0 hangs", "CTA 0 warp 1 waits") and hang.words == "cluster 0 hangs"


def test_buffers_are_filled_alike_everywhere() -> None:
    """Digits of the first elements, which any implementation of the Mersenne Twister gives."""
    values = Buffer("x", "float32", 1000, written=False).fill(seed=3).view(np.float32)
    scaled = values * 1024
    assert np.array_equal(scaled, np.round(scaled)) and np.abs(values).max() <= 4 and len(np.unique(values)) > 200
    assert values[:4].tolist() == [0.046875, 3.78125, 0.0234375, 0.125]
    bf16 = Buffer("x", "bfloat16", 8, written=True).fill(seed=3)
    assert bf16.tolist() == [255] * 16
    whole = Buffer("x", "uint8", 4096, written=False).fill(seed=1)
    assert set(whole.tolist()) == set(range(256))


def test_recorded_files_read_back_as_they_were_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = records.read(RECORDED[0])
    monkeypatch.setattr(records, "ARCHIVE", tmp_path / "data.tar.xz")
    record.write()
    ((name, written),) = launches.read_archive(tmp_path / "data.tar.xz").items()
    assert written == launches.read_archive(launches.ARCHIVE)[name]
    records.read.cache_clear()
    again = records.read(RECORDED[0])
    records.read.cache_clear()
    assert again.launch == record.launch and again.outcomes == record.outcomes


def test_more_mutants_keep_those_that_were_chosen_before() -> None:
    launch = records.read(RECORDED[0]).launch
    few, more, every = (
        {run.mutant for run in records.runs(launch, most) if run.schedule == "eager"} for most in (10, 30, None)
    )
    assert few < more < every and (len(few), len(more)) == (11, 31)


def test_the_command_compares_and_says_what_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """On one run, with stand-ins for what is found: as recorded, and with another verdict."""
    record = records.read(DAILY[0])
    run = Run("", "eager")
    monkeypatch.setattr(records, "names", lambda: [DAILY[0]])
    monkeypatch.setattr(records, "read", lambda name: dataclasses.replace(record, outcomes={run: record.outcomes[run]}))
    monkeypatch.setattr(command, "processes", lambda jobs: Here())
    for found, status in ((record.outcomes[run], 0), (Outcome(error="Hang", words="hangs").entry(), 1)):
        monkeypatch.setattr(records, "outcome_now", lambda name, run, found=found: found)
        assert command.main(["compare"]) == status
        printed = capsys.readouterr().out
        assert ("error: recorded None" in printed) == bool(status)
        assert f"{DAILY[0]}: 1 runs" in printed


class Here:
    """Takes the place of a pool of processes."""

    def __enter__(self) -> Here:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    map = staticmethod(map)


@pytest.mark.parametrize("arguments", [["record", "--mutants", "0"], ["compare", "--jobs", "0"], ["forget"]])
def test_bad_arguments(arguments: list[str], capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        command.main(arguments)
    assert "error" in capsys.readouterr().err


def test_no_path_and_no_address_of_a_machine_is_kept() -> None:
    for name in RECORDED:
        launch = records.read(name).launch
        files = [line for line in launch.ptx.splitlines() if ".file" in line]
        assert files and all('"/cute_kernels/' in line or '"/site-packages/' in line for line in files), name
        data = [bytes.fromhex(value) for value in launch.params]
        words = np.concatenate([np.frombuffer(value[: len(value) // 8 * 8], np.uint64) for value in data])
        assert not ((words >= 5 << 44) & (words < 1 << 47)).any(), f"{name}: an address of a process"
