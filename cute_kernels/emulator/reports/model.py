"""A fault as data, for all ways to write it down."""

from dataclasses import dataclass, field

from cute_kernels.emulator.facts import WarpName


@dataclass(frozen=True)
class SourceLine:
    """A line of the program."""

    path: str  # of the file, as the compiler named it
    line: int  # 1-based
    text: str = ""  # of the line, without indentation; "" where the file cannot be read
    function: str = ""  # name of the innermost function around it, "" if that is not known


@dataclass(frozen=True)
class Place:
    """An instruction, and who executes it."""

    source: SourceLine | None = None  # line of the program, None where the PTX does not say
    inlined_at: SourceLine | None = None  # the line that called the function that ``source`` is in, or None
    ptx_line: int | None = None  # of the PTX text, 1-based, or None
    instruction: str = ""  # its text, or ""
    warps: tuple[WarpName, ...] = ()  # who; none where that is not known
    lanes: tuple[int, ...] = ()  # of the warp, those that are concerned; none where that is not known


@dataclass(frozen=True)
class Related:
    """Another place that a fault is about."""

    relation: str  # what is to be said of it, e.g. "written at"
    places: tuple[Place, ...]  # one, or where it is not known which: all that it may be
    what: str = ""  # how the detector calls the operation, or ""


@dataclass(frozen=True)
class Barrier:
    """An mbarrier as it was."""

    name: str  # its variable in the program, or ""
    cta: int  # rank of the CTA in its cluster
    offset: int  # in its shared memory
    state: str  # in words
    live: bool  # False where there is no barrier
    # phase, expected, pending, tx: completed phases; arrivals of a phase, those still to come, bytes still to come
    phase: int
    expected: int
    pending: int
    tx: int
    init: Place | None = None  # where it was initialised, or None
    last_arrival: WarpName | None = None  # who arrived last, or None

    @property
    def title(self) -> str:
        """Name of the barrier, or where it is."""
        return self.name or f"the mbarrier at shared offset {self.offset}"


@dataclass(frozen=True)
class Waiting:
    """Warps of a kernel that hangs which stand at one place and wait for the same."""

    place: Place  # where, with all of the warps
    what: str  # they wait for, in words
    barrier: Barrier | None = None  # that is, or None
    phase: int | None = None  # number of the phase whose end they wait for, as far as it is known
    # warps that have not arrived at the barrier of the CTA or cluster that they wait at
    missing: tuple[WarpName, ...] = ()


@dataclass(frozen=True)
class Diagnostic:
    """A report."""

    kind: str  # name in the table of `cute_kernels.emulator.reports.kinds`
    error: str  # name of the class of the exception
    sentence: str  # what is wrong
    message: str  # all that the emulator says, without places
    level: str = "error"  # "error", or "warning" of what is not a fault for certain
    place: Place = Place()  # where
    related: tuple[Related, ...] = ()  # other places
    memory: str = ""  # bytes that it is about, in words, or ""
    barrier: Barrier | None = None  # that it is about, or None
    waiting: tuple[Waiting, ...] = ()  # of a hang: who waits for what
    cycle: tuple[str, ...] = ()  # how these hold each other up, a sentence per step
    exited: tuple[WarpName, ...] = ()
    barriers: tuple[Barrier, ...] = ()
    notes: tuple[str, ...] = ()  # further sentences
    help: str = ""  # what usually causes it, and how it is mended; "" where nothing can be said
    kernel: str = ""  # short name, or ""
    kernel_name: str = ""  # of the entry
    launch: int | None = None  # number of the launch in the program
    replay: tuple[str, ...] = ()  # the command that shows it again, as words
    # seed, schedule: under which it was found: the seed, and options of the command
    seed: int | None = None
    schedule: tuple[str, ...] = field(default=())
    # of the schedule, the fewest that show it, in words, behind the options that choose them
    steps: tuple[str, ...] = ()
