"""``cute-kernels mutate`` on a kernel that is not this package's: score, survivors with their lines, exit status."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from cute_kernels.commands import cli, mutate
from cute_kernels.emulator.checking.mutation import judge as judge_module
from cute_kernels.emulator.reports.kinds import KINDS
from tests.emulator import exit_program
from tests.emulator.checking.planted import EXAMPLE, planted

EXITS = str(Path(exit_program.__file__))


def command(*arguments: str) -> int:
    try:
        return cli.main(["mutate", "--arch", "sm_90a", *arguments])
    except SystemExit as end:
        return end.code


def test_score_and_survivors_with_their_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two survive for good: barrier.sync orders the initialisation too, and bytes are announced to the own CTA."""
    file = tmp_path / "out.json"
    assert command("--output", str(file), "--fail-under", "90", str(EXAMPLE)) == 0
    out = capsys.readouterr().out
    result = json.loads(file.read_text())
    assert len(result["mutants"]) > 30
    survivors = [entry for entry in result["mutants"] if not entry["killer"]]
    assert {(entry["mutation"], entry["opcode"].partition(".shared")[0]) for entry in survivors} == {
        ("drop", "fence.mbarrier_init.release.cluster"), ("relaxed", "mbarrier.arrive.expect_tx"),
    }  # fmt: skip
    assert result["score"] == 1 - len(survivors) / len(result["mutants"])
    assert f"score {result['score']:.1%}" in out.splitlines()[-1]
    lines = EXAMPLE.read_text().splitlines()
    shown = re.findall(r"^  survives: (.+): PTX line \d+: (.*)\n    bias_add\.py:(\d+) \(add_bias\): (.*)$", out, re.M)
    assert len(shown) == len(survivors)
    for _, _, number, text in shown:
        assert lines[int(number) - 1].strip() == text
    killers = {entry["killer"] for entry in result["mutants"]} - {""}
    assert killers >= {"shared-race", "transaction-bytes", "first-parity", "proxy-fence", "launch-overlap"}
    assert killers <= {*KINDS, "wrong result"}  # words of `emulate`, and no names of exceptions


def test_a_campaign_goes_on_from_its_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of verdicts that were lost in the middle, these alone are judged again, and the list is the same."""
    store, words = tmp_path / "mutants.jsonl", ["--every", "4", "--jobs", "1", "--store"]
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    assert command(*words, str(store), "--output", str(first), str(EXAMPLE)) == 0
    said = capsys.readouterr().out
    lines = store.read_text().splitlines()
    assert len(lines) == len(json.loads(first.read_text())["mutants"]) > 5
    store.write_text("\n".join([*lines[:2], *lines[4:], lines[3][:40]]))
    judged = []
    judge = judge_module.judge
    monkeypatch.setattr(judge_module, "judge", lambda *given: judged.append(given[2].key) or judge(*given))
    assert command(*words, str(store), "--resume", "--output", str(second), str(EXAMPLE)) == 0
    assert judged == [json.loads(line)["mutant"] for line in lines[2:4]]
    without = [[{**each, "seconds": 0} for each in json.loads(f.read_text())["mutants"]] for f in (first, second)]
    assert without[0] == without[1]
    shown = [[line for line in text.splitlines() if "survives" in line] for text in (said, capsys.readouterr().out)]
    assert shown[0] == shown[1] != []
    assert command(*words, str(store), str(EXAMPLE)) == 2
    assert "exists; go on with it by --resume" in capsys.readouterr().err
    assert command("--resume", str(EXAMPLE)) == 2
    assert "--resume is for --store FILE" in capsys.readouterr().err
    # Another program, or the same one with other arguments, has other verdicts.
    judged.clear()
    others = ["--every", "40", "--jobs", "1", "--launches", "1", "--store", str(store), "--resume"]
    assert command(*others, str(EXAMPLE)) == 0
    assert len(judged) == 2


def test_an_unchanged_kernel_at_fault_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a fault that the program's own run does not show, too: one of the six schedules does."""
    assert command(str(planted("no proxy fence", tmp_path))) == 3
    assert "error[proxy-fence]" in capsys.readouterr().err
    assert command(str(planted("one try to wait", tmp_path))) == 3
    report = capsys.readouterr().err
    assert report.startswith("error[unfinished-copy]: ") and "  note: the kernel is unchanged\n" in report
    assert "  replay: cute-kernels check --arch sm_90a " in report


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        ([EXITS, "exit-7"], 7, ""),
        ([EXITS, "raise"], 1, "ValueError: the program's own"),
        ([EXITS, "refused"], 4, "opcode 'alloca.u32' is not implemented"),
        ([EXITS, "normal"], 2, "no mutant is there: the kernels' PTX has no such synchronisation"),
        (["--kernel", "gemm", EXITS, "normal"], 2, "no kernel has such a name; the program launched kernel_cutlass_"),
        (["--jobs", "0", EXITS], 2, "'0': must be a positive integer"),
        (["--fail-under", "101", EXITS], 2, "'101': must be a percentage from 0 to 100"),
        (["--output", "no/such/folder.json", EXITS], 2, "no/such to write"),
        (["no such.py"], 2, "no file no such.py"),
    ],
)
def test_exit_status(arguments: list[str], status: int, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(*arguments) == status
    assert words in capsys.readouterr().err


def test_a_score_below_what_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("--match", "fence.mbarrier_init", "--fail-under", "1", str(EXAMPLE)) == mutate.BELOW == 5
    assert "mutated: 1 mutant in" in capsys.readouterr().out
