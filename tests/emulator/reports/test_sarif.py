"""SARIF: where a report is, as code hosts read it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from cute_kernels.emulator import Options, run
from cute_kernels.emulator.errors import Hang, IllegalAccess
from cute_kernels.emulator.reports import sarif
from cute_kernels.emulator.reports.diagnosis import diagnose
from cute_kernels.emulator.reports.document import Outcome
from cute_kernels.emulator.reports.model import Place, SourceLine
from cute_kernels.testing.ptx import module


@pytest.mark.parametrize(
    "path, line, uri, base",
    [
        ("/elsewhere/a kernel.py", 7, "file:///elsewhere/a%20kernel.py", None),
        ("{here}/sub/a kernel.py", 7, "sub/a%20kernel.py", "ROOT"),
        ("sub/kernel.py", 1, "sub/kernel.py", "ROOT"),
        ("/elsewhere/kernel.py", 0, "file:///elsewhere/kernel.py", None),
    ],
)
def test_places(path: str, line: int, uri: str, base: str | None, tmp_path: Path, monkeypatch) -> None:
    """Files below the current folder relative to it, others absolute; lines begin with 1 (SARIF 2.1.0)."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(IllegalAccess) as caught:
        text = module("ld.param.u64 %d0, [p0]; st.global.u32 [%d0+4096], 1; ret;", parameters=1)
        run(text, grid=1, block=1, args=[np.zeros(4, np.uint32)])
    place = Place(SourceLine(path.format(here=tmp_path), line))
    found = dataclasses.replace(diagnose(caught.value), place=place)
    [written] = sarif.log(Outcome("emulate", [], "program", "sm_90a"), [found])["runs"]
    assert written["originalUriBaseIds"] == {"ROOT": {"uri": tmp_path.as_uri() + "/"}}
    where = written["results"][0]["locations"][0]["physicalLocation"]
    assert where["artifactLocation"] == {"uri": uri} | ({"uriBaseId": base} if base else {})
    assert where["region"] == {"startLine": max(line, 1)}


def test_bytes_that_never_come_are_named_whoever_else_waits() -> None:
    """One warp waits for the bytes, and another one at the barrier of the CTA for that warp."""
    body = """mov.u32 %r1, %tid.x; setp.ge.u32 %p1, %r1, 32; @%p1 bra LAST; setp.ne.u32 %p2, %r1, 0; @%p2 bra W;
    mbarrier.init.shared.b64 [dynamic], 1; mbarrier.arrive.expect_tx.shared.b64 %d1, [dynamic], 64;
    W: bar.warp.sync -1; L: mbarrier.try_wait.parity.shared.b64 %p3, [dynamic], 0; @!%p3 bra L;
    LAST: bar.sync 0; ret;"""
    with pytest.raises(Hang) as caught:
        run(module(body, parameters=0), grid=1, block=64, dynamic_smem=1024, options=Options())
    found = diagnose(caught.value)
    assert len(found.waiting) == 2 and found.kind == "transaction-bytes"
