"""``cute-kernels layout``: what it prints and refuses; tests/explore/test_layout_view.py has its numbers."""

from __future__ import annotations

import json

import pytest

from cute_kernels.commands.cli import main


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["layout", "(8,64):(64,1)", "--swizzle", "3,4,3", "--lanes", "(8,8):(1,8)"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["0", "8", "16", "24", "32", "40", "48", "56"]
    assert lines[3].split() == ["1", "144:4", "128:0", "176:12", "160:8", "208:20", "192:16", "240:28", "224:24"]
    assert lines[-1] == "1 request of a warp, 1 wavefront, 0 bank conflicts"
    assert main(["layout", "(8,64):(64,1)", "--lanes", "(8,8):(1,8)", "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found[65] == {"row": 1, "column": 1, "byte": 130, "bank": 0, "lane": 1}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["(8,64)"], "layout = (8,64)"),
        (["(8,64):(64,99999999999999999999)"], "must have strides of 64 bits"),
        (["(100000,100000):(1,1)"], "must have at most 1,048,576 coordinates; it has 10,000,000,000"),
        (["(8,?):(64,1)"], "layout = (8,?):(64,1): must have numbers for extents and strides"),
        (["(8,64):(-64,1)"], "layout = (8,64):(-64,1): must have no element before its first byte; one is 448 before"),
        (["S<3,4,3> o -1 o (8,64):(64,1)"], "must have no element before its first byte; one is 1 before"),
        (["(8,64):(64,1)", "--lanes", "(32,1):(-1,0)"], "to coordinates 0 to 511; it has shape (32, 1), "),
        (["(8,64):(64,1)", "--swizzle", "3,4"], "swizzle = 3,4: must be three numbers, B,M,S"),
        (["(8,64):(64,1)", "--dtype", "f3"], "dtype = f3: must be one of "),
        (["(8,2):(2,1)"], "lanes = (32,1):(1,0): must be (lane, value), of at most 32 lanes, to coordinates 0 to 15"),
    ],
)
def test_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["layout", *words]) == 2
    assert message in capsys.readouterr().err
