"""`bench.patchify` with the emulator in place of the GPU: every case is computed and compared, no time is taken."""

from __future__ import annotations

import pytest
import torch

from bench import patchify
from bench.timing import Protocol
from tests.bench.test_capability_10 import NoSampler, launched_once
from tests.gpu import emulated


def test_all_cases_are_compared_and_printed(monkeypatch, capsys) -> None:
    monkeypatch.setattr(patchify, "DeviceSampler", NoSampler)
    monkeypatch.setattr(patchify, "measure", launched_once)
    with emulated.device("sm_90a"):
        for names, side in (([name for name in patchify.CASES if "14" not in name], "32"), (["uint8, p = 14"], "28")):
            assert patchify.main(["--images", "2", "--side", side, "--cases", *names]) == 0
            lines = capsys.readouterr().out.splitlines()
            assert lines[2:] == [f"| {name} | 1.000 | 1.000 |" for name in names]


def test_a_wrong_row_is_not_timed(monkeypatch) -> None:
    monkeypatch.setattr(patchify, "measure", lambda *_, **__: pytest.fail("timed"))
    monkeypatch.setattr(patchify, "build", lambda plan, images, rows: lambda _: rows)
    with emulated.device("sm_90a"), pytest.raises(AssertionError, match=r"1,5\d\d of 1,536 elements are wrong"):
        patchify.run_case("uint8, p = 16", patchify.problem_of("uint8, p = 16", 2, 16), Protocol(), NoSampler(None))


def test_sizes_that_are_refused(capsys) -> None:
    for arguments, message in ((["--side", "100"], "100"), (["--rounds", "0"], "rounds = 0"), (["--images", "0"], "0")):
        with pytest.raises(SystemExit) as end:
            patchify.main(arguments)
        assert end.value.code == 2 and message in capsys.readouterr().err
    assert torch.cuda.is_available() or patchify.main(["--images", "1"]) == 2
