"""Launches of several threads at the same time, and processes that are forked meanwhile."""

from __future__ import annotations

import collections
import os
import sys
import threading
from collections.abc import Iterator

import pytest
import torch

from cute_kernels import Sm90GemmConfig, Sm90PatchEmbedConfig, Sm100PatchEmbedConfig, gemm, patch_embed
from cute_kernels.config import PatchEmbedProblem
from cute_kernels.emulator import Options, default_options
from cute_kernels.operations import compile
from cute_kernels.plan import make_plan
from tests.nightly import examples
from tests.processes import run_python

OPTIONS = (
    Options(), Options(detectors=False), Options(completion="random", interleave="random", seed=3),
    Options(counters=True),
)  # fmt: skip


@pytest.fixture
def threads_change_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def calls() -> list:
    torch.manual_seed(0)
    f8 = torch.float8_e4m3fn
    rows, weight = torch.randn(1, 64, 256).to(f8), torch.randn(256, 256).to(f8)
    bias, pos = torch.zeros(256), torch.ones(64, 256)
    a, b = torch.randn(100, 64).bfloat16(), torch.randn(64, 64).bfloat16()

    def embed(config: object) -> torch.Tensor:
        return patch_embed(rows, weight, bias, pos, scale_a=1.0, scale_b=1.0, config=config, backend="emulator")

    return [
        lambda: embed(Sm100PatchEmbedConfig(epilogue_warps=4)),
        lambda: embed(Sm90PatchEmbedConfig()),
        lambda: gemm(a, b, config=Sm90GemmConfig(), backend="emulator"),
    ]


@pytest.mark.usefixtures("threads_change_often")
def test_correct_kernels_are_correct_in_eight_threads() -> None:
    """The same kernel under other options, and other kernels, at the same time: no race is seen that is none."""
    launches = calls()
    expected, seen = [call().view(torch.int16) for call in launches], collections.Counter()

    def work(thread: int) -> None:
        for turn in range(examples(3, 60)):
            which = (thread + turn) % len(launches)
            with default_options(OPTIONS[(thread + turn // 3) % len(OPTIONS)]):
                try:
                    right = torch.equal(launches[which]().view(torch.int16), expected[which])
                    seen["right" if right else "wrong"] += 1
                except BaseException as error:
                    seen[f"{type(error).__name__}: {error}"] += 1

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {"right": 8 * examples(3, 60)}


PROGRAM = """
import collections, sys, threading
import cutlass, cutlass.cute as cute, torch
from cutlass.cute.runtime import from_dlpack
sys.setswitchinterval(1e-6)

@cute.kernel
def turn(x: cute.Tensor, y: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    shared = cute.make_tensor(cute.arch.alloc_smem(cutlass.Int32, 256), cute.make_layout(256))
    shared[thread] = x[thread]
    cute.arch.sync_threads()
    y[thread] = shared[255 - thread]

@cute.jit
def call(x: cute.Tensor, y: cute.Tensor):
    turn(x, y).launch(grid=(1, 1, 1), block=(256, 1, 1))

x = torch.arange(256, dtype=torch.int32, device="cuda")
run = cute.compile(call, from_dlpack(x), from_dlpack(x))
seen = collections.Counter()
def work():
    for _ in range(15):
        y = torch.zeros_like(x)
        try:
            run(from_dlpack(x), from_dlpack(y))
            seen[bool((y == x.flip(0)).all())] += 1
        except BaseException as error:
            seen[type(error).__name__] += 1
threads = [threading.Thread(target=work) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(dict(seen))
"""


def test_threads_of_a_program(tmp_path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    done = run_python("-m", "cute_kernels", "emulate", "--arch", "sm_90a", "--quiet", str(tmp_path / "program.py"))
    assert done.returncode == 0 and f"{{True: {8 * 15}}}" in done.stdout, done.stdout + done.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked where the system forks them")
def test_a_process_that_is_forked_while_another_thread_compiles(monkeypatch) -> None:
    """A worker of a data loader: it launches what is in memory, and compiles what is not."""
    monkeypatch.setenv("CUTE_KERNELS_CACHE_DIR", "off")
    launch = calls()[1]
    expected, under_way = launch(), threading.Event()
    original = compile.build

    def compiling(plan):
        under_way.set()
        return original(plan)

    monkeypatch.setattr(compile, "build", compiling)
    problem = PatchEmbedProblem(64, 256, 256, 64)
    plans = [make_plan(problem, Sm90PatchEmbedConfig(tile_rows=rows, stages=5)) for rows in (48, 80)]
    thread = threading.Thread(target=compile.compile_plan, args=(plans[0],), kwargs={"emulated": True})
    thread.start()
    under_way.wait()
    process = os.fork()
    if process == 0:
        status = 1
        try:
            same = torch.equal(launch(), expected)
            compile.compile_plan(plans[1], emulated=True)
            status = 0 if same else 2
        finally:
            os._exit(status)
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0


FORKED = PROGRAM.split("seen =")[0] + """
import faulthandler, os, time
@cute.kernel
def spin(x: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    for i in cutlass.range(1 << 30, unroll=1):
        x[thread] = x[thread] * 3 + 1
        cute.arch.sync_threads()

@cute.jit
def never(x: cute.Tensor):
    spin(x).launch(grid=(1, 1, 1), block=(32, 1, 1))

endless = cute.compile(never, from_dlpack(x))
threading.Thread(target=endless, args=(from_dlpack(torch.zeros_like(x)),), daemon=True).start()
time.sleep(0.2)
process = os.fork()
if process == 0:
    faulthandler.dump_traceback_later(20, exit=True)
    try:
        run(from_dlpack(torch.zeros_like(x)), from_dlpack(x))
    except RuntimeError as error:
        os._exit(7 if "this process was forked from one that uses CUDA" in str(error) else 8)
    os._exit(9)
print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
os._exit(0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked where the system forks them")
def test_a_program_forks_while_another_thread_launches(tmp_path) -> None:
    """What the new process is told, as by a GPU, does not wait for the thread that it has not."""
    (tmp_path / "program.py").write_text(FORKED)
    words = ["emulate", "--arch", "sm_90a", "--quiet", str(tmp_path / "program.py")]
    done = run_python("-m", "cute_kernels", *words, timeout=60)
    assert done.stdout == "7\n", done.stdout + done.stderr
