"""Code that launches kernels, in the emulator under one schedule."""

import contextlib
from collections.abc import Iterator

from cute_kernels.common.chips import DEFAULT_ARCH
from cute_kernels.emulator.machine.launch import schedule as schedules
from cute_kernels.emulator.machine.launch.schedule import Schedule
from cute_kernels.emulator.programs.capturing import Session, capture


@contextlib.contextmanager
def emulation(
    arch: str = DEFAULT_ARCH,
    schedule: Schedule | None = None,
    *,
    strict: bool = False,
    max_warp_instructions: int = 10**8,
) -> Iterator[Session]:
    """Runs what is launched inside in the emulator, with tensors on "cuda" in host memory; for tests with ``@given``.

    Functions that were compiled inside for the same architecture run inside of any later one.

    Args:
        arch: a key of `cute_kernels.common.chips.CHIPS`.
        schedule: the default one if None.
        strict: as `Options.strict`.
        max_warp_instructions: per cluster; a kernel that executes more has hung.

    Yields:
        The session, with the launches so far.

    Raises:
        ValueError: an architecture that is not known.
        TypeError: a schedule that is none.
        EmulatorError: out of the call that launches a kernel that is at fault.
    """
    schedule = Schedule() if schedule is None else schedule
    if not isinstance(schedule, Schedule):
        raise TypeError(f"schedule {schedule!r} is a {type(schedule).__name__}: must be Schedule(..)")
    options = schedule.options(strict=strict, max_warp_instructions=max_warp_instructions)
    with capture(arch, options, overlap=schedule.overlap) as session:
        yield session


def assert_certified(session: Session) -> None:
    """Asserts that the run of each launch so far stands for every schedule of it, see docs/emulator/contract.md.

    Raises:
        AssertionError: it names the launches, and what stands against their certificates; or nothing was launched.
    """
    if not session.launches:
        raise AssertionError("nothing was launched, of which there could be a certificate")
    without = []
    for each in session.launches:
        certificate = each.report.certificate
        if certificate is None or not certificate.given:
            first, *rest = ["it ran without detectors"] if certificate is None else certificate.lines()
            without.append("\n  ".join([f"launch {each.number} {each.launch.kernel_name}: {first}", *rest]))
    if without:
        raise AssertionError("\n".join(without))


def schedules_for(
    *given: Schedule, warps: int = 0, ctas: int = 1, overlap: bool = False, random: int = 0
) -> list[Schedule]:
    """The default schedule, and others: what the marker ``schedules`` takes, and each of its tests runs under one.

    Args:
        given: particular ones.
        warps: of a CTA; if not 0, systematic schedules that starve each in turn.
        ctas: of a cluster.
        overlap: launches may overlap in some.
        random: how many random ones.

    Raises:
        TypeError: ``given`` is not made of schedules.
        ValueError: a number is negative, or ``ctas`` is 0.
    """
    for each in given:
        if not isinstance(each, Schedule):
            raise TypeError(f"schedules: {each!r} is a {type(each).__name__}: must be Schedule(..)")
    for name, value, least in (("warps", warps, 0), ("ctas", ctas, 1), ("random", random, 0)):
        if value < least:
            raise ValueError(f"{name} = {value}: must be at least {least}")
    found = [Schedule(), *given]
    if warps:
        found += schedules.systematic(ctas, warps, overlaps=overlap)
    found += [schedules.drawn(number, overlaps=overlap) for number in range(1, random + 1)]
    return list(dict.fromkeys(found))
