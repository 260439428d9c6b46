"""``cute-kernels same``: programs and configurations whose bits are equal, or differ at a place that is known."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import numpy as np
import pytest

from cute_kernels.commands import cli
from tests.emulator.checking.test_reduction import HEAD

#: y[row] = the sum of four numbers of x[row], from left to right, or in pairs for all rows from `PAIRED` on.
SUMS = HEAD.replace("p)", "p, .param .u64 q)") + """
.reg .b64 %rd<6>; .reg .b32 %r<3>; .reg .f32 %f<8>; .reg .pred %p<2>;
ld.param.u64 %rd1, [p];
ld.param.u64 %rd2, [q];
mov.u32 %r1, %ctaid.x;
mul.wide.u32 %rd3, %r1, 16;
add.u64 %rd1, %rd1, %rd3;
mul.wide.u32 %rd4, %r1, 4;
add.u64 %rd2, %rd2, %rd4;
ld.global.v4.f32 {%f1, %f2, %f3, %f4}, [%rd1];
setp.ge.u32 %p1, %r1, PAIRED;
@%p1 bra PAIRS;
add.f32 %f5, %f1, %f2;
add.f32 %f5, %f5, %f3;
add.f32 %f5, %f5, %f4;
bra STORE;
PAIRS:
add.f32 %f5, %f1, %f2;
add.f32 %f6, %f3, %f4;
add.f32 %f5, %f5, %f6;
STORE:
st.global.f32 [%rd2], %f5;
ret;
}
"""


def program(folder: Path, name: str, rows: int, paired: int, launches: int = 1, seed: int = 0) -> str:
    """Its words on a command line."""
    folder.joinpath(f"{name}.ptx").write_text(SUMS.replace("PAIRED", str(paired)))
    fill = np.random.default_rng(seed).standard_normal(4 * rows).tolist()  # the first rows are those of fewer
    arrays = {"x": {"shape": [rows, 4], "fill": fill}, "y": {"shape": [rows]}, "z": {"shape": [rows]}}
    made = [{"grid": rows, "block": 1, "arguments": ["x", "yz"[n % 2]]} for n in range(launches)]
    folder.joinpath(f"{name}.json").write_text(json.dumps({"arrays": arrays, "launches": made}))
    return shlex.join([str(folder / f"{name}.ptx"), str(folder / f"{name}.json")])


def rows_that_differ(rows: int, first: int) -> list[int]:
    """Rows of which the two orders of adding give another sum, in NumPy."""
    x = np.random.default_rng(0).standard_normal(4 * rows).astype(np.float32).reshape(rows, 4)
    in_turn = ((x[:, 0] + x[:, 1]) + x[:, 2]) + x[:, 3]
    paired = (x[:, 0] + x[:, 1]) + (x[:, 2] + x[:, 3])
    return [row for row in np.flatnonzero(in_turn != paired).tolist() if row >= first]


def same(folder: Path, a: str, b: str, *options: str) -> tuple[int, dict]:
    answer = folder / "answer.json"
    status = cli.main(["same", "--arch", "sm_90a", "--json", str(answer), *options, a, b])
    return status, json.loads(answer.read_text()) if answer.exists() else {}


def test_two_versions_of_a_kernel(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first row whose sum is another one is named, in the first launch that has it."""
    a, b = program(tmp_path, "a", 16, 16, launches=2), program(tmp_path, "b", 16, 3, launches=2)
    assert same(tmp_path, a, program(tmp_path, "c", 16, 16, launches=2))[0] == 0
    assert capsys.readouterr().out == "same: 2 launches, bit by bit\n"
    status, answer = same(tmp_path, a, b)
    first = answer["first_difference"]
    assert (status, answer["same"], answer["launches"]) == (1, False, [2, 2])
    assert (first["launch"], first["other"], first["kernel"], first["array"]) == (1, 1, "k", "array 2")
    assert first["byte"] // 4 == rows_that_differ(16, 3)[0] and first["inputs"] == ""
    assert bytes.fromhex(first["a"]) != bytes.fromhex(first["b"])
    assert f"array 2 differs in {first['bytes_differ']} of 64 bytes, first at byte {first['byte']}" in (
        capsys.readouterr().out
    )


@pytest.mark.parametrize("failure", ["assert False", "raise SystemExit(7)"])
def test_programs_that_fail_their_own_assertion(
    failure: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The launches before it are compared, however many the other program makes behind them."""
    sides = []
    for name, paired, behind in (("a", 16, failure), ("b", 16, "pass"), ("c", 0, "pass")):
        (tmp_path / f"{name}.ptx").write_text(SUMS.replace("PAIRED", str(paired)))
        (tmp_path / f"{name}.py").write_text(f"""
import torch

def launches():
    x = (torch.arange(64, device="cuda") ** 3 % 101 / 7).reshape(16, 4)
    y = torch.zeros(16, device="cuda")
    for _ in range(2):
        yield {{"kernel": "k", "grid": 16, "block": 1, "arguments": [x, y]}}
        {behind}
""")
        sides.append(shlex.join([str(tmp_path / f"{name}.ptx"), f"{tmp_path / name}.py:launches"]))
    a, b, c = sides
    status, answer = same(tmp_path, a, b)
    assert (status, answer["launches"], answer["failed"]) == (0, [1, 1], [a])
    assert f"{a} failed, after its launches: 1 of A and of B are compared" in capsys.readouterr().out
    x = ((np.arange(64) ** 3 % 101).astype(np.float32) / np.float32(7)).reshape(16, 4)
    differ = np.flatnonzero(((x[:, 0] + x[:, 1]) + x[:, 2]) + x[:, 3] != (x[:, 0] + x[:, 1]) + (x[:, 2] + x[:, 3]))
    status, answer = same(tmp_path, c, a)
    first = answer["first_difference"]
    assert (status, first["launch"], first["byte"] // 4) == (1, 1, differ[0])


def test_rows_of_a_larger_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A batch of 8 is compared with the first rows of one of 16, whose kernel adds the same way or not."""
    small = program(tmp_path, "small", 8, 16)
    invariant, other = program(tmp_path, "large", 16, 16), program(tmp_path, "other", 16, 0)
    assert same(tmp_path, small, invariant, "--prefix")[0] == 0
    status, answer = same(tmp_path, small, other, "--prefix")
    assert status == 1 and answer["first_difference"]["nbytes"] == 32
    assert answer["first_difference"]["byte"] // 4 == rows_that_differ(8, 0)[0]
    assert same(tmp_path, small, invariant)[0] == 2
    assert "array 1 has 128 bytes in A and 256 in B; --prefix compares the first 128" in capsys.readouterr().err


def test_other_inputs_are_named(tmp_path: Path) -> None:
    status, answer = same(tmp_path, program(tmp_path, "a", 4, 4), program(tmp_path, "b", 4, 4, seed=1))
    assert status == 1 and answer["first_difference"]["inputs"] == "array 1 from byte 0 on"


IN_PLACE = HEAD + """
.reg .b64 %rd<2>; .reg .b32 %r<2>;
ld.param.u64 %rd1, [p];
ld.global.s32 %r1, [%rd1];
max.s32 %r1, %r1, 0;
st.global.s32 [%rd1], %r1;
ret;
}
"""


def test_other_inputs_that_a_launch_leaves_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing changes in either run; memory differs nevertheless: that is no answer."""
    tmp_path.joinpath("k.ptx").write_text(IN_PLACE)
    sides = []
    for value in (1, 2):
        array = {"dtype": "int32", "shape": [1], "fill": value}
        made = {"arrays": {"x": array}, "launches": [{"grid": 1, "block": 1, "arguments": ["x"]}]}
        tmp_path.joinpath(f"{value}.json").write_text(json.dumps(made))
        sides.append(shlex.join([str(tmp_path / "k.ptx"), str(tmp_path / f"{value}.json")]))
    status, answer = same(tmp_path, *sides)
    assert status == 2 and not answer["same"] and answer["inputs"] == "array 1 from byte 0 on"
    assert "not comparable: not the same inputs" in capsys.readouterr().out
    assert same(tmp_path, sides[0], sides[0])[1]["inputs"] == ""


def test_runs_of_another_number_of_launches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What the last launches leave is compared, all of it that has been written since the beginning."""
    a = program(tmp_path, "a", 8, 8, launches=2)
    assert same(tmp_path, a, program(tmp_path, "b", 8, 8, launches=3))[0] == 0
    assert capsys.readouterr().out == "same: the last of 2 launches and of 3, bit by bit\n"
    status, answer = same(tmp_path, a, program(tmp_path, "c", 8, 0, launches=3))
    assert (status, answer["first_difference"]["other"]) == (1, 3)


def test_configurations_of_a_kernel(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tiles do not change sums of whole rows of K; a split of K does."""
    problem = ["--m", "64", "--n", "64", "--k", "512", "--arch", "sm_80"]
    problem += ["--in-dtype", "float32", "--out-dtype", "float32"]

    tiles = "tile_m=64,tile_n=64,row_bytes=128"

    def run(a: str, b: str) -> int:
        return cli.main(["same", "gemm", a, b, *problem])

    assert run(f"{tiles},stages=3", f"{tiles},stages=2") == 0
    assert run(f"{tiles},stages=3", f"{tiles},stages=3,split_k=2") == 1
    assert "different: launch 1 (gemm): out differs in " in capsys.readouterr().out


def test_what_cannot_be_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = program(tmp_path, "a", 4, 4)
    for b, words in (
        ("default", "one is a program and one is a configuration"),
        ("nosuch.py", "no file nosuch.py"),
        (f"{__file__}", "launched no kernel"),
    ):
        assert same(tmp_path, a, b)[0] == 2
        assert words in capsys.readouterr().err


def test_a_fault_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = program(tmp_path, "b", 4, 4)
    path = tmp_path / "b.ptx"
    path.write_text(path.read_text().replace("[%rd2], %f5", "[%rd2+4096], %f5"))
    assert same(tmp_path, program(tmp_path, "a", 4, 4), broken)[0] == 3
    assert "error[out-of-bounds]" in capsys.readouterr().err
