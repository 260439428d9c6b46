"""Everything worth knowing of a GPU that has kernels, in one command of at most half an hour: `make kit`.

    python -m bench.kit --output kit              # on any GPU since Ampere, with the kernels that it gets
    python -m bench.kit --output kit              # again: goes on where it was cut off
    python -m bench.kit --output kit --again tune # this step once more
    python -m bench.kit --output kit --brief      # a rehearsal: every step, little of each, at most eight minutes

Each step is a command of its own with a log in the output folder, so that one that hangs or fails costs its own time
only. What it has found by then stands in the folder's results. At the end everything is in OUTPUT.tar.gz, to be sent
back. The steps, most valuable first: the doctor's report; the tests on silicon; all designs and tunables of the patch
embed at the headline size beside cuBLASLt and a copy of the same bytes; images; the dense GEMM; what the kernels of
mma.sync reach of its bare rate; clocks of every role and phase and the counters of Nsight Compute beside the
emulator's, where kernels and machine have them; the tuners; the host's time per call.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.configs import arch_of, rows_type
from cute_kernels.config import PatchEmbedProblem, Sm80Config
from cute_kernels.plan import ARCHS, PLANNERS
from cute_kernels.plan.config_codec import spell

ROOT = Path(__file__).resolve().parent.parent

_PEERS = ("cuBLASLt position-major", "cuBLASLt", "scaled_mm", "copy of the same bytes")

DESIGNS: dict[str, tuple[str, ...]] = {
    "sm_100a": (
        "weight=tmem", "weight=smem", "weight=tmem,tmem_load_width=64", "weight=tmem,cta_group=1", "order=position",
        "order=flat", "order=flat,table=row_major", "epilogue=bf16x2",
    ),
    "sm_90a": (
        "weight=registers", "weight=streamed", "weight=registers,order=flat", "weight=registers,cluster=1",
        "weight=registers,tile_rows=96",
    ),
}  # fmt: skip
"""Of the patch embed of rows, by architecture: what differs in where the weight is and which rows make a tile."""

TUNABLES: dict[str, tuple[str, ...]] = {
    "sm_100a": (
        "stages=3", "stages=5,store_buffers=2", "stages=6,store_buffers=1", "epilogue_warps=4", "tmem_load_width=16",
        "tmem_load_width=64", "tile_n=128", "cta_group=1,tile_n=128", "stagger_clocks=0", "snake=false",
    ),
    "sm_90a": ("stages=4", "pingpong=false", "warpgroups=3,tile_rows=64", "stage_blocks=1", "epilogue=bf16x2"),
}  # fmt: skip
"""Of the same, one or two fields that differ from the default."""


SHOWN_TILES = 3
"""Tiles of ``mma.sync`` that are designs; those of longer modelled times are tunables."""


def tiles(arch: str) -> tuple[str, ...]:
    """Tiles of the patch embed of rows by ``mma.sync``, the one of the least modelled time left out: the default."""
    planner, (images, positions, n, k) = PLANNERS["patch_embed"], TUNED_ROWS[0]
    problem = PatchEmbedProblem(images * positions, n, k, table_rows=positions, in_dtype=rows_type(arch))
    names = [field.name for field in dataclasses.fields(Sm80Config)]
    configs = [plan.config for plan in planner.search(problem, ARCHS[arch], ARCHS[arch].sm_count)]
    texts = [",".join(f"{name}={spell(getattr(config, name))}" for name in names) for config in configs]
    return tuple(dict.fromkeys(texts))[1:]


def designs(arch: str) -> tuple[str, ...]:
    """Configurations of the patch embed of rows that differ in kind."""
    return DESIGNS[arch] if arch in DESIGNS else tiles(arch)[:SHOWN_TILES]


def tunables(arch: str) -> tuple[str, ...]:
    """More of them, which differ less, or are expected to take longer."""
    return TUNABLES[arch] if arch in TUNABLES else tiles(arch)[SHOWN_TILES:]


@dataclass(frozen=True)
class Step:
    """One command.

    Attributes:
        name: of its log and of its entry in the state.
        command: behind the interpreter.
        seconds: after which it is stopped.
        needs: a program that has to be there, or it is left out.
    """

    name: str
    command: tuple[str, ...]
    seconds: int
    needs: str = ""


def steps(arch: str, output: Path) -> list[Step]:
    """The steps on a device of an architecture, results in ``output / "results"``."""
    results, short = str(output / "results"), ("--rounds", "3", "--sustained", "0.3")

    def bench(name: str, module: str, seconds: int, *arguments: str) -> Step:
        return Step(name, ("-m", f"bench.{module}", "--output", results, "--name", name, *short, *arguments), seconds)

    def module(name: str, seconds: int, *arguments: str, needs: str = "") -> Step:
        return Step(name, ("-m", *arguments), seconds, needs)

    emulated, profiled = str(output / "emulated.json"), str(output / "profiled.json")
    of_mma_sync = [bench("mma.sync", "mma_sync", 240, "--limit", "220")]
    inside = [  # of kernels whose counters were compared
        module("counters emulated", 120, "bench.counters", "emulate", emulated, "--arch", arch),
        module("counters", 180, "bench.counters", "profile", profiled, needs="ncu"),
        module("counters compared", 60, "bench.counters", "table", emulated, profiled, needs="ncu"),
    ]
    return [
        module("doctor", 60, "cute_kernels", "doctor"),
        module("tests", 420, "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu"),
        bench("designs", "patch_embed", 180, "--peers", *_PEERS, "--configs", *designs(arch)),
        bench("tunables", "patch_embed", 210, "--peers", "copy of the same bytes", "--configs", *tunables(arch)),
        bench("images", "images", 120, "--batches", "4736", "64", "1", "--peers", "patch_embed on FP8 rows",
              "pass + rows"),
        bench("gemm", "gemm", 120, "--sizes", "4096", "8192", "--peers", "torch linear"),
        *(inside if arch in DESIGNS else of_mma_sync),
        module("tune", 210, "bench.kit", "--tune", str(output / "tuned")),
        module("host time", 60, "bench.host_time", "--runs", "2", "--rounds", "100"),
    ]  # fmt: skip


BRIEF_MINUTES = 8
"""Of a rehearsal."""

_TESTED_BRIEFLY = ("tests/gpu/test_kernel.py", "-k", "test_variant")


Fewer = Callable[[tuple[str, ...]], tuple[str, ...]]
"""Arguments of a step to those of its short form."""


def brief_steps(arch: str, output: Path) -> list[Step]:
    """As `steps`, each with little to do: whether all of them work on the machine, not what it can do."""
    fewer: dict[str, tuple[int, Fewer]] = {
        "doctor": (30, tuple),
        "tests": (100, lambda words: (*words[:-1], *_TESTED_BRIEFLY)),
        "designs": (70, lambda words: _first_configs(words, 2)),
        "tunables": (70, lambda words: _first_configs(words, 2)),
        "images": (60, lambda words: _without(words, "4736", "1")),
        "gemm": (45, lambda words: _without(words, "8192")),
        "mma.sync": (60, lambda words: (*words[:-1], "45", "--parts", "uint8")),
        "counters emulated": (60, tuple),
        "counters compared": (30, tuple),
        "tune": (60, lambda words: (*words, "--brief")),
        "host time": (40, lambda words: (*words[:-4], "--runs", "1", "--rounds", "50")),
    }
    whole = (60, tuple)
    return [
        dataclasses.replace(
            step, seconds=min(step.seconds, fewer.get(step.name, whole)[0]),
            command=fewer.get(step.name, whole)[1](step.command),
        )
        for step in steps(arch, output)
    ]  # fmt: skip


def _first_configs(words: tuple[str, ...], count: int) -> tuple[str, ...]:
    """Fewer configurations, which are the last of a bench's arguments."""
    return words[: words.index("--configs") + 1 + count]


def _without(words: tuple[str, ...], *left_out: str) -> tuple[str, ...]:
    return tuple(word for word in words if word not in left_out)


# --- running ---------------------------------------------------------------------------------------------------------

Runner = Callable[[Step, Path, float], int]
"""``(step, log, seconds) -> exit status``; 124 if it was stopped."""


def run_step(step: Step, log: Path, seconds: float) -> int:
    """As a process of its own, output into the log."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *_path()])}
    with log.open("w") as file:
        try:
            command = [sys.executable, *step.command]
            return subprocess.run(
                command, stdout=file, stderr=subprocess.STDOUT, timeout=seconds, cwd=ROOT, env=environment, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            file.write(f"\nstopped after {seconds:.0f} s\n")
            return 124


def _path() -> list[str]:
    return [value] if (value := os.environ.get("PYTHONPATH")) else []


def is_there(program: str) -> bool:
    """Whether a program can be called."""
    return any((Path(folder) / program).is_file() for folder in os.environ.get("PATH", "").split(os.pathsep))


def run_all(
    todo: Sequence[Step],
    output: Path,
    minutes: float,
    runner: Runner = run_step,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, dict[str, object]]:
    """Runs the steps that have no result yet, and returns what is known of all.

    The state is written after each step, so that a run that is cut off is continued by calling this again. A step that
    failed or was stopped has a result, too; one for which there was no time has none.

    Args:
        todo: in this order.
        output: folder of logs and state.
        minutes: of this call; a step that would go beyond is stopped there, or not begun with under 10 s left.
        runner, clock: replaceable.
    """
    output.mkdir(parents=True, exist_ok=True)
    (output / "results").mkdir(exist_ok=True)
    state_file = output / "state.json"
    state: dict[str, dict[str, object]] = json.loads(state_file.read_text()) if state_file.exists() else {}
    deadline = clock() + 60 * minutes
    for step in todo:
        left = deadline - clock()
        if step.name in state:
            continue
        if left < 10:
            print(f"{step.name}: no time left; the same command goes on here", flush=True)
            break
        if step.needs and not is_there(step.needs):
            state[step.name] = {"status": None, "text": f"left out: no {step.needs} on this machine"}
        else:
            began = clock()
            status = runner(step, output / f"{step.name.replace(' ', '-')}.log", min(step.seconds, left))
            if status == 124 and left < step.seconds:
                print(f"{step.name}: stopped by the limit of this call; the same command begins it again", flush=True)
                break
            text = {0: "done", 124: f"stopped after {step.seconds} s"}.get(status, f"failed with status {status}")
            state[step.name] = {"status": status, "text": text, "seconds": round(clock() - began, 1)}
        print(f"{step.name}: {state[step.name]['text']}", flush=True)
        temporary = state_file.with_suffix(".new")
        temporary.write_text(json.dumps(state, indent=1) + "\n")
        temporary.replace(state_file)
    return state


def pack(output: Path) -> Path:
    """Everything in the folder as one archive beside it."""
    archive = output.with_name(output.name + ".tar.gz")
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(output, output.name)
    return archive


# --- the tuners ------------------------------------------------------------------------------------------------------

TUNED_ROWS = ((4736, 196, 768, 768), (64, 196, 768, 768), (1, 196, 768, 768), (64, 576, 1152, 768))
"""(images, positions, N, K) of the patch embed, the headline problem first."""

TUNED_PRODUCTS = ((4096, 4096, 4096), (16, 4096, 4096), (12544, 768, 3072))
"""(M, N, K) of the dense GEMM."""


def tune(folder: Path, brief: bool = False) -> None:
    """Finds the fastest configurations, and keeps a copy of their files for other machines of this kind.

    Args:
        folder: for the copies.
        brief: one problem of each operation, and few candidates.
    """
    import shutil

    import torch

    import cute_kernels
    import cute_kernels.operations.runtime.tuned as tuned

    problems = 1 if brief else None
    dtype = getattr(torch, rows_type(architecture()))
    for sizes in TUNED_ROWS[:problems]:
        found = cute_kernels.tune_patch_embed(*sizes, dtype=dtype, candidates=3 if brief else 12)
        print(sizes, found, flush=True)
    for sizes in TUNED_PRODUCTS[:problems]:
        print(sizes, cute_kernels.tune_gemm(*sizes, candidates=3 if brief else 8), flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    for path in tuned.files():
        shutil.copy(path, folder)


# --- the command -----------------------------------------------------------------------------------------------------


def architecture() -> str:
    """That of the current device.

    Raises:
        SystemExit: there is none, or none that has kernels.
    """
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("the kit needs a CUDA device; tests/bench/test_kit.py rehearses it without one")
    try:
        return arch_of(torch.cuda.get_device_capability())
    except ValueError as error:
        raise SystemExit(str(error)) from None


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="folder, default kit-DATE")
    parser.add_argument("--minutes", type=float, help=f"of this call (default: 30, or {BRIEF_MINUTES} with --brief)")
    parser.add_argument("--brief", action="store_true", help="a rehearsal: every step, with little to do in each")
    parser.add_argument("--again", nargs="+", default=[], metavar="STEP", help="steps to run once more")
    parser.add_argument("--tune", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.tune is not None:
        tune(options.tune, options.brief)
        return 0
    arch = architecture()
    output = (options.output or Path(f"kit-{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d}")).absolute()
    todo = (brief_steps if options.brief else steps)(arch, output)
    if unknown := set(options.again) - {step.name for step in todo}:
        parser.error(f"no step {', '.join(sorted(unknown))}: must be one of {', '.join(step.name for step in todo)}")
    state_file = output / "state.json"
    if options.again and state_file.exists():
        state = json.loads(state_file.read_text())
        state_file.write_text(json.dumps({name: entry for name, entry in state.items() if name not in options.again}))
    state = run_all(todo, output, options.minutes or (BRIEF_MINUTES if options.brief else 30))
    print(f"send back: {pack(output)}")
    return int(any(entry["status"] for entry in state.values()) or len(state) < len(todo))


if __name__ == "__main__":
    sys.exit(main())
