"""A fault as data, for all ways to write it down."""

from dataclasses import dataclass, field

from cute_kernels.emulator.facts import WarpName


@dataclass(frozen=True)
class SourceLine:
    """A line of the program.

    Attributes:
        path: of the file, as the compiler named it.
        line: 1-based.
        text: of the line, without indentation; "" where the file cannot be read.
        function: name of the innermost function around it, "" if that is not known.
    """

    path: str
    line: int
    text: str = ""
    function: str = ""


@dataclass(frozen=True)
class Place:
    """An instruction, and who executes it.

    Attributes:
        source: line of the program, None where the PTX does not say.
        inlined_at: the line that called the function that ``source`` is in, or None.
        ptx_line: of the PTX text, 1-based, or None.
        instruction: its text, or "".
        warps: who; none where that is not known.
        lanes: of the warp, those that are concerned; none where that is not known.
    """

    source: SourceLine | None = None
    inlined_at: SourceLine | None = None
    ptx_line: int | None = None
    instruction: str = ""
    warps: tuple[WarpName, ...] = ()
    lanes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Related:
    """Another place that a fault is about.

    Attributes:
        relation: what is to be said of it, e.g. "written at"
        places: one, or where it is not known which: all that it may be.
        what: how the detector calls the operation, or "".
    """

    relation: str
    places: tuple[Place, ...]
    what: str = ""


@dataclass(frozen=True)
class Barrier:
    """An mbarrier as it was.

    Attributes:
        name: its variable in the program, or "".
        cta: rank of the CTA in its cluster; ``offset``: in its shared memory.
        state: in words.
        live: False where there is no barrier.
        phase, expected, pending, tx: completed phases; arrivals of a phase, those still to come, bytes still to come.
        init: where it was initialised, or None.
        last_arrival: who arrived last, or None.
    """

    name: str
    cta: int
    offset: int
    state: str
    live: bool
    phase: int
    expected: int
    pending: int
    tx: int
    init: Place | None = None
    last_arrival: WarpName | None = None

    @property
    def title(self) -> str:
        """Name of the barrier, or where it is."""
        return self.name or f"the mbarrier at shared offset {self.offset}"


@dataclass(frozen=True)
class Waiting:
    """Warps of a kernel that hangs which stand at one place and wait for the same.

    Attributes:
        place: where, with all of the warps.
        what: they wait for, in words.
        barrier: that is, or None.
        phase: number of the phase whose end they wait for, as far as it is known.
        missing: warps that have not arrived at the barrier of the CTA or cluster that they wait at.
    """

    place: Place
    what: str
    barrier: Barrier | None = None
    phase: int | None = None
    missing: tuple[WarpName, ...] = ()


@dataclass(frozen=True)
class Diagnostic:
    """A report.

    Attributes:
        kind: name in the table of `cute_kernels.emulator.reports.kinds`.
        error: name of the class of the exception.
        sentence: what is wrong.
        message: all that the emulator says, without places.
        level: "error", or "warning" of what is not a fault for certain.
        place: where.
        related: other places.
        memory: bytes that it is about, in words, or "".
        barrier: that it is about, or None.
        waiting: of a hang: who waits for what; ``cycle``: how these hold each other up, a sentence per step.
        notes: further sentences.
        help: what usually causes it, and how it is mended; "" where nothing can be said.
        kernel: short name, or ""; ``kernel_name``: of the entry; ``launch``: number of the launch in the program.
        replay: the command that shows it again, as words.
        steps: of the schedule, the fewest that show it, in words, behind the options that choose them.
        seed, schedule: under which it was found: the seed, and options of the command.
    """

    kind: str
    error: str
    sentence: str
    message: str
    level: str = "error"
    place: Place = Place()
    related: tuple[Related, ...] = ()
    memory: str = ""
    barrier: Barrier | None = None
    waiting: tuple[Waiting, ...] = ()
    cycle: tuple[str, ...] = ()
    exited: tuple[WarpName, ...] = ()
    barriers: tuple[Barrier, ...] = ()
    notes: tuple[str, ...] = ()
    help: str = ""
    kernel: str = ""
    kernel_name: str = ""
    launch: int | None = None
    replay: tuple[str, ...] = ()
    seed: int | None = None
    schedule: tuple[str, ...] = field(default=())
    steps: tuple[str, ...] = ()
