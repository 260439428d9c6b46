"""`tune`: which of several values of its constexpr parameters a CuTe DSL function of anybody's is best with."""

import contextlib
import hashlib
import inspect
import itertools
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import cutlass.cute as cute
import torch
from cutlass.cute.runtime import from_dlpack

from cute_kernels.common import extras
from cute_kernels.common.chips import DEFAULT_ARCH, check_arch
from cute_kernels.common.words import counted
from cute_kernels.emulator import Options
from cute_kernels.emulator.programs import capturing
from cute_kernels.explore import sweep_program, sweep_text
from cute_kernels.explore.sweep_table import Row, grid
from cute_kernels.explore.tuning import search
from cute_kernels.operations.runtime import devices

Results = Sequence[torch.Tensor]


@dataclass(frozen=True)
class Tuned:
    """The best configuration of a function, and how it was found.

    ``settings``: by parameter. ``by``: what was least: ``"time on .."``, or a count of the emulator, which is none.
    ``least``: microseconds, or that count. ``rows``: every configuration that was tried, with the reason where it was
    refused; none where the answer was kept on disk. ``ties``: how many others have as little. ``str()``: rows as
    ``cute-kernels sweep`` prints them."""

    settings: dict[str, Any]
    by: str
    least: float
    ties: int = 0
    rows: tuple[Row, ...] = ()

    def __str__(self) -> str:
        lines = sweep_text.lines_of(self.rows) if self.rows else ["kept from an earlier search"]
        settings = ", ".join(f"{name}={value!r}" for name, value in self.settings.items())
        ties = f"; {counted(self.ties, 'other')} of the same" if self.ties else ""
        return "\n".join([*lines, f"least {self.by}, {self.least:,.1f}: {settings}{ties}"])


def tune(
    function: Callable[..., Any],
    space: Mapping[str, Sequence[Any]],
    arguments: Sequence[Any] | Callable[[], Sequence[Any]] = (),
    *,
    arch: str | None = None,
    count: str = "warp instructions",
    expected: Results | None = None,
    tolerance: float = 0.0,
    trials: int | None = None,
    seed: int = 0,
    cached: bool = True,
) -> Tuned:
    """Calls ``function(*arguments, **settings)`` with combinations of values, and says with which it is best.

    On a GPU calls are timed by CUDA events, in turn; what the host needs for a call is in them. Without one kernels run
    in the emulator, detectors on, and something that it counts is least, which need not be fastest on a GPU. A call
    that raises, a kernel at fault and a result that differs refuse a configuration. The winner is kept on disk by the
    text of the program and of what it imports, what the function has of the scopes around it, types and shapes of the
    arguments, contents of ``expected``, versions, and GPU or architecture.

    Args:
        function: of CuTe DSL, as ``@cute.jit`` makes it, or around such, that launches kernels.
        space: values by keyword parameter, at least one of each.
        arguments: others, in their order, or a function that makes them. Tensors are copied to the device for every
            configuration, and given as tensors of CuTe where a parameter is annotated ``cute.Tensor``.
        arch: emulate for this key of `CHIPS`; when None the GPU at hand, in an emulated program its architecture, or
            without either the emulator's default.
        count: what is least without a GPU: a count of `cute_kernels.explore.plan_facts`.
        expected: contents of the result's tensors, and behind them of the arguments'; when None those of the first
            configuration that is legal.
        tolerance: norm of the difference over that of ``expected``, up to which results agree; 0: in every bit.
        trials: how many combinations are tried, which Optuna chooses where it is installed, else chance; None: all.
        seed: of that choice.
        cached: look for the answer on disk.

    Raises:
        ValueError: no such parameter, no values of one, ``trials`` below 1, no such count or architecture, no tensor
            to compare, another number of them than ``expected`` has, or no legal configuration, with all reasons.
        MissingExtra: the extra ``emulator`` is not installed.
    """
    extras.require("emulator", "a tuner")
    known = inspect.signature(function).parameters
    takes_all = any(each.kind is each.VAR_KEYWORD for each in known.values())
    for name, values in space.items():
        if name not in known and not takes_all:
            raise ValueError(f"space has {name!r}: must be parameters of the function, {', '.join(known)}")
        if not values:
            raise ValueError(f"space[{name!r}] = {values!r}: must have a value")
    if trials is not None and trials < 1:
        raise ValueError(f"trials = {trials}: must be at least 1")
    emulated = devices.is_emulated()
    timed = arch is None and torch.cuda.is_available() and not emulated
    arch = arch or (devices.device_facts(torch.cuda.current_device())[0] if emulated else DEFAULT_ARCH)
    check_arch(arch)
    where = torch.cuda.get_device_name() if timed else arch
    by = f"time on {where} in us" if timed else f"{count} in the emulator ({where})"
    bench = _Bench(function, arguments, arch, timed, count, expected, tolerance)
    found: list[Tuned] = []

    def run() -> dict[str, Any]:
        rows = bench.timed_together(_searched(space, trials, seed, bench))
        legal = [row for row in rows if row.reason is None]
        if not legal:
            raise ValueError("space: must have a legal configuration\n" + "\n".join(sweep_text.lines_of(rows)))
        best = min(legal, key=bench.score)
        ties = sum(bench.score(row) == bench.score(best) for row in legal) - 1
        found.append(Tuned(dict(best.settings), by, bench.score(best), ties, tuple(rows)))
        sweep_program.note_imported()
        place = {name: list(space[name]).index(one) for name, one in best.settings.items()}
        return {"place": place, "least": found[0].least, "ties": ties}

    file = _file_of(function)
    if not cached or file is None:
        run()
        return found[0]
    about = [function.__qualname__, _around(function), space, bench.described(), by, tolerance, trials, seed]
    about.append(torch.__version__)
    kept = sweep_program.cached(file, [json.dumps(about, default=repr)], arch, run)
    settings = {name: space[name][n] for name, n in kept["place"].items()}
    return found[0] if found else Tuned(settings, by, kept["least"], kept["ties"])


def _file_of(function: Callable[..., Any]) -> str | None:
    try:
        return inspect.getsourcefile(inspect.unwrap(function))
    except TypeError:  # made of no text
        return None


def _around(function: Callable[..., Any], known: tuple[Any, ...] = ()) -> list[str]:
    """Values that a function has of the scopes around it, of its object and as defaults, in words."""
    plain = inspect.unwrap(function)
    found = [cell.cell_contents for cell in getattr(plain, "__closure__", None) or ()]
    found += [getattr(plain, name, None) for name in ("__self__", "__defaults__", "__kwdefaults__")]
    functions = [inspect.isfunction(each) and each not in known for each in found]
    return [
        f"{one.__module__}.{one.__qualname__} {_around(one, (*known, function, one))}" if is_function else repr(one)
        for one, is_function in zip(found, functions)
    ]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor in the order of its elements, uint8 of one dimension, on the host."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


@dataclass
class _Bench:
    """Evaluates configurations; arguments as of `tune`."""

    function: Callable[..., Any]
    arguments: Sequence[Any] | Callable[[], Sequence[Any]]
    arch: str
    timed: bool
    count: str
    expected: Results | None
    tolerance: float
    first: str = "what is expected"

    def given(self) -> list[Any]:
        """Arguments of one configuration, on the device."""
        made = self.arguments() if callable(self.arguments) else self.arguments
        return [each.to("cuda", copy=True) if isinstance(each, torch.Tensor) else each for each in made]

    def described(self) -> list[str]:
        """Facts of the arguments that the answer depends on."""
        contents = hashlib.sha256()
        for each in self.expected or ():
            contents.update(f"{each.dtype} {tuple(each.shape)}".encode() + _bytes(each).numpy().tobytes())
        with contextlib.nullcontext() if self.timed else capturing.capture(self.arch):
            made = self.arguments() if callable(self.arguments) else self.arguments
            return [contents.hexdigest()] + [
                f"{each.dtype} {tuple(each.shape)} {each.stride()}"
                if isinstance(each, torch.Tensor) else f"{type(each).__name__} {each}"
                for each in made
            ]

    def score(self, row: Row) -> float:
        """A number of a legal row of which less is better."""
        if self.timed:
            return row.measured
        if self.count not in row.counts:
            raise ValueError(f"count = {self.count!r}: must be one of {', '.join(row.counts)}")
        return row.counts[self.count]

    def __call__(self, settings: Mapping[str, Any]) -> Row:
        """A row that is legal or has a reason, with a time of a few calls or counts."""
        row = Row(dict(settings), arch=self.arch)
        if self.timed:
            reason = self._refusal(settings)
            return replace(row, reason=reason, measured=None if reason else 1e3 * self._timer(settings)())
        with capturing.capture(self.arch, Options(counters=True)) as session:
            reason = self._refusal(settings, session)
        return sweep_program.row_of(row, sweep_program.facts_of(session, reason))

    def _refusal(self, settings: Mapping[str, Any], session: capturing.Session | None = None) -> str | None:
        """Why a configuration is refused; None where its results are right. ``session``: of the emulator."""
        given = self.given()
        try:
            returned = self._call(given, settings)
            if session is not None:
                session.threads.wait()
            returned = returned if isinstance(returned, (tuple, list)) else [returned]
            results = [each.cpu() for each in (*returned, *given) if isinstance(each, torch.Tensor)]
        except Exception as error:
            return sweep_program.reason_of(error)
        if not results:
            raise ValueError("arguments: must have a tensor of torch, or the function return one, to be compared")
        if session is not None and (reason := sweep_program.without_launch(session, None)) is not None:
            return reason
        if self.expected is None:
            self.expected, self.first = results, f"what {dict(settings)} computes"
        if len(self.expected) != len(results):
            raise ValueError(f"expected has {len(self.expected)} tensors: must have {len(results)}, one of each result")
        for number, (result, wanted) in enumerate(zip(results, self.expected)):
            if not self._agree(result, wanted):
                return f"tensor {number} of the results differs from {self.first}"
        return None

    def _call(self, given: Sequence[Any], settings: Mapping[str, Any]) -> Any:
        """Calls the function, with tensors of CuTe where it says so."""
        return self.function(*map(_as_annotated, given, self._kinds()), **settings)

    def _kinds(self) -> Iterator[Any]:
        """Annotations of the function's parameters."""
        parameters = inspect.signature(self.function).parameters.values()
        return itertools.chain((each.annotation for each in parameters), itertools.repeat(None))

    def _agree(self, result: torch.Tensor, wanted: torch.Tensor) -> bool:
        if (result.shape, result.dtype) != (wanted.shape, wanted.dtype):
            return False
        if not self.tolerance:
            return torch.equal(_bytes(result), _bytes(wanted))
        a, b = result.double(), wanted.cpu().double()
        # Norms tell nothing where one number is infinite: these have to be the same.
        finite = b.isfinite()
        if not torch.equal(a.isfinite(), finite) or not torch.equal(a[~finite].nan_to_num(), b[~finite].nan_to_num()):
            return False
        return bool((a - b)[finite].norm() <= self.tolerance * b[finite].norm())

    def _timer(self, settings: Mapping[str, Any]) -> search.Timer:
        given = self.given()
        return search.call_timer(lambda: self._call(given, settings))

    def timed_together(self, rows: list[Row]) -> list[Row]:
        """On a GPU, the legal rows timed in turn."""
        timers = {n: self._timer(row.settings) for n, row in enumerate(rows) if self.timed and row.reason is None}
        times = search.interleaved(timers, search.ROUNDS)
        return [replace(row, measured=1e3 * times[n]) if n in times else row for n, row in enumerate(rows)]


def _as_annotated(argument: Any, kind: Any) -> Any:
    if kind in (cute.Tensor, "cute.Tensor") and isinstance(argument, torch.Tensor):
        return from_dlpack(argument, assumed_align=16 if argument.data_ptr() % 16 == 0 else argument.element_size())
    return argument


def _searched(
    space: Mapping[str, Sequence[Any]], trials: int | None, seed: int, evaluate: Callable[[Mapping[str, Any]], Row]
) -> list[Row]:
    """Rows of all combinations, or of those that Optuna or chance chooses."""
    every = grid(**space)
    if trials is None or trials >= len(every):
        return [evaluate(settings) for settings in every]
    try:
        import optuna
    except ModuleNotFoundError:
        return [evaluate(settings) for settings in random.Random(seed).sample(every, trials)]
    study, rows = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed)), {}
    for _ in range(trials):
        trial = study.ask()
        place = {name: trial.suggest_categorical(name, list(range(len(values)))) for name, values in space.items()}
        key = tuple(place.values())
        if key not in rows:
            rows[key] = evaluate({name: space[name][n] for name, n in place.items()})
        legal = rows[key].reason is None
        state = None if legal else optuna.trial.TrialState.FAIL
        study.tell(trial, evaluate.score(rows[key]) if legal else None, state=state)
    return list(rows.values())
