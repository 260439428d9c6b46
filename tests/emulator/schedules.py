"""One run of a kernel under one schedule, as a command that replays it.

    python -m tests.emulator.schedules --kernel sm100 --batch 4 --seed 7 --completion lazy --interleave starve

prints "as expected", or what the emulator reports or how the result differs, and exits with 1. With ``--mutant KEY``
(the keys of `tests.emulator.checking.mutation`) one synchronisation instruction is dropped or weakened first.
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import sys
from dataclasses import dataclass

from cute_kernels.emulator.checking.mutation.mutants import mutants
from cute_kernels.emulator.errors import EmulatorError
from cute_kernels.emulator.machine.launch import schedule
from cute_kernels.emulator.machine.launch.schedule import Schedule
from tests.emulator.checking.mutation.targets import TARGETS


@dataclass(frozen=True)
class Run:
    """A kernel (a name of `TARGETS`), its sizes, and a schedule."""

    kernel: str
    batch: int
    positions: int
    n: int
    k: int
    schedule: Schedule = Schedule()
    detectors: bool = True
    strict: bool = False
    mutant: str = ""

    def command(self) -> str:
        """A shell command that repeats this run, without what is the default."""
        words = ["python", "-m", "tests.emulator.schedules"]
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            option = f"--{field.name.replace('_', '-')}"
            if field.name == "schedule":
                words += value.arguments()
            elif field.name == "detectors":
                words += [] if value else ["--no-detectors"]
            elif value is True:
                words.append(option)
            elif value != field.default:
                words += [option, str(value)]
        return shlex.join(words)

    def execute(self) -> str:
        """What went wrong: the emulator's report or how the result differs from the reference; "" if nothing.

        Raises:
            ValueError: no such kernel or mutant, or sizes that the kernel does not take.
        """
        if self.kernel not in TARGETS:
            raise ValueError(f"kernel {self.kernel!r}; there are {', '.join(TARGETS)}")
        sizes = {"batch": self.batch, "positions": self.positions, "n": self.n, "k": self.k}
        target = dataclasses.replace(TARGETS[self.kernel], **sizes)
        ptx = target.ptx
        if self.mutant:
            found = {mutant.key: mutant.ptx for mutant in mutants(ptx)}
            if self.mutant not in found:
                raise ValueError(f"{self.kernel} has no mutant {self.mutant!r}")
            ptx = found[self.mutant]
        options = self.schedule.options(
            detectors=self.detectors,
            strict=self.strict,
            max_warp_instructions=20_000_000,
        )
        try:
            return target.run(ptx, options, 2 if self.schedule.overlap else 1).difference
        except EmulatorError as error:
            return f"{type(error).__name__}: {error}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.emulator.schedules", description="Repeats one run of a kernel under one schedule."
    )
    parser.add_argument("--kernel", required=True, choices=TARGETS)
    for name in ("batch", "positions", "n", "k"):
        parser.add_argument(f"--{name}", type=int, help="default: as in tests/emulator/checking/mutation/targets.py")
    schedule.add_arguments(parser)
    parser.add_argument("--strict", action="store_true", help="as mutants are judged")
    parser.add_argument("--no-detectors", dest="detectors", action="store_false")
    parser.add_argument("--mutant", default="", metavar="KEY")
    parsed = parser.parse_args(arguments)
    chosen = schedule.of_arguments(parsed)
    given = {name: value for name, value in vars(parsed).items() if not hasattr(chosen, name)}
    for name in ("batch", "positions", "n", "k"):
        given[name] = given[name] or getattr(TARGETS[given["kernel"]], name)
    try:
        problem = Run(**given, schedule=chosen).execute()
    except ValueError as error:
        parser.error(str(error))
    print(problem or "as expected")
    return int(bool(problem))


if __name__ == "__main__":
    sys.exit(main())
