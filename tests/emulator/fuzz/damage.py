"""Damage to programs, drawn from a seed: their text, shape, parameters, tensor maps and options."""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Callable

from cute_kernels.emulator.options import DETECTORS
from tests.emulator.fuzz.program import Program, is_map
from tests.emulator.fuzz.programs import programs
from tests.emulator.oracle.launches import address_of

LIMITS = (
    "0", "-1", "1", "2", "3", "7", "15", "31", "32", "33", "63", "64", "127", "128", "255", "256", "1023", "1024",
    "65535", "2147483647", "-2147483648", "4294967295", "4294967296", "9223372036854775807", "18446744073709551615",
    "18446744073709551616", "0x7FFFFFFF", "0xFFFFFFFFFFFFFFFF", "0f7FC00000", "0f7F800000", "0dFFF0000000000000",
    "1e999", "1" * 40, "0x", "0b2", "08",
)  # fmt: skip
SIZES = (-(2**31), -1, 0, 1, 2, 3, 31, 33, 64, 128, 1024, 1025, 65_535, 65_536, 2**31 - 1, 2**31, 2**63, 2**64)
#: Of the kinds of programs: those of our kernels take longest.
_WEIGHTS = {
    "arithmetic": 20, "instructions": 22, "wgmma": 14, "tensor copies": 14, "tcgen05": 12, "clusters": 10,
    "synchronisation": 6, "kernels": 2,
}  # fmt: skip
_TOKEN = re.compile(r"\s+|[%$\w][\w.$%:]*|\.[\w:.]+|\S")
_REGISTER = re.compile(r"%[a-z]+\d+$")
_ADDRESS = address_of(0).to_bytes(8, "little")[6:]  # what addresses of buffers end with
_NUMBER = re.compile(r"-?(0[xX][0-9a-fA-F]+|\d+)$")

Draw = random.Random
Damage = Callable[[Draw, Program], Program]


def _integer(token: str) -> int:
    return int(token, 0 if "x" in token.lower() else 10)


def _places(draw: Draw, tokens: list[str], count: int = 1) -> list[int]:
    """Of tokens that are more than space, close to each other."""
    solid = [i for i, token in enumerate(tokens) if not token.isspace()]
    first = draw.randrange(len(solid))
    return [solid[min(first + k, len(solid) - 1)] for k in range(count)]


def _delete(draw: Draw, tokens: list[str]) -> None:
    del tokens[_places(draw, tokens)[0]]


def _duplicate(draw: Draw, tokens: list[str]) -> None:
    at = _places(draw, tokens)[0]
    tokens.insert(at, tokens[at])


def _swap(draw: Draw, tokens: list[str]) -> None:
    a, b = _places(draw, tokens, 2)
    tokens[a], tokens[b] = tokens[b], tokens[a]


def _exchange(draw: Draw, tokens: list[str]) -> None:
    a, b = _places(draw, tokens)[0], _places(draw, tokens)[0]
    tokens[a] = tokens[b]


def _of_kind(draw: Draw, tokens: list[str], kind: re.Pattern[str]) -> int | None:
    found = [i for i, token in enumerate(tokens) if kind.match(token)]
    return draw.choice(found) if found else None


def _register(draw: Draw, tokens: list[str]) -> None:
    at, other = (_of_kind(draw, tokens, _REGISTER) for _ in range(2))
    if at is not None:
        new = re.sub(r"\d+$", draw.choice(LIMITS), tokens[at])
        tokens[at] = draw.choice([tokens[other], new, tokens[at] + tokens[other]])


def _number(draw: Draw, tokens: list[str]) -> None:
    at = _of_kind(draw, tokens, _NUMBER)
    if at is not None:
        flipped = str(_integer(tokens[at]) ^ 1 << draw.randrange(64))
        tokens[at] = draw.choice([flipped, draw.choice(LIMITS)])


def _qualifier(draw: Draw, tokens: list[str]) -> None:
    """An opcode loses a qualifier, or gets one of another instruction."""
    found = [i for i, token in enumerate(tokens) if "." in token and token[0].isalpha()]
    if found:
        parts = tokens[at := draw.choice(found)].split(".")
        others = tokens[draw.choice(found)].split(".")
        place = draw.randrange(len(parts))
        new = draw.choice([[], [draw.choice(others)], parts[place : place + 1] * 2])
        parts[place : place + draw.randrange(2)] = new
        tokens[at] = ".".join(parts)


def _character(draw: Draw, tokens: list[str]) -> None:
    at = _places(draw, tokens)[0]
    cut = draw.randrange(len(tokens[at]) + 1)
    tokens[at] = tokens[at][:cut] + draw.choice(";,{}[]()@!%$.:|+-*/\"'\\\0\n\x80~é") + tokens[at][cut:]


def _truncate(draw: Draw, tokens: list[str]) -> None:
    del tokens[_places(draw, tokens)[0] :]


def _statements(draw: Draw, tokens: list[str]) -> None:
    """A statement is lost, repeated, or moved elsewhere."""
    ends = [i for i, token in enumerate(tokens) if token == ";"]
    if len(ends) < 3:
        return
    which = draw.randrange(len(ends) - 1)
    start, end = ends[which] + 1, ends[which + 1] + 1
    statement = tokens[start:end]
    if draw.random() < 0.7:
        del tokens[start:end]
    if draw.random() < 0.6:
        places = [i for i, token in enumerate(tokens) if token == ";"]
        place = draw.choice(places) + 1
        tokens[place:place] = statement


Change = Callable[[Draw, list[str]], None]
_TOKENS: tuple[Change, ...] = (_delete, _duplicate, _swap, _exchange, _character, _truncate)


def _text(*changes: Change) -> Damage:
    """Damage to the text by some of these changes."""

    def damage(draw: Draw, program: Program) -> Program:
        tokens = _TOKEN.findall(program.text)
        for _ in range(draw.choice((1, 1, 1, 2, 3, 8))):
            if tokens and not all(map(str.isspace, tokens)):
                kind = draw.choice(changes)
                if kind is not _truncate or draw.random() < 0.3:  # a truncated text says little
                    kind(draw, tokens)
        return dataclasses.replace(program, text="".join(tokens))

    return damage


def _flipped(draw: Draw, value: int) -> int:
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        value ^= 1 << draw.randrange(64)
    return value


def _damage_descriptors(draw: Draw, program: Program) -> Program:
    """Bits of a matrix or instruction descriptor: a large number of the text, or a parameter that is no address."""
    places = [i for i, value in enumerate(program.params) if len(value) == 8 and value[6:] != _ADDRESS]
    if places and draw.random() < 0.5:
        at = draw.choice(places)
        value = _flipped(draw, int.from_bytes(program.params[at], "little"))
        params = [*program.params[:at], value.to_bytes(8, "little"), *program.params[at + 1 :]]
        return dataclasses.replace(program, params=tuple(params))
    tokens = _TOKEN.findall(program.text)
    found = [i for i, token in enumerate(tokens) if _NUMBER.match(token) and abs(_integer(token)) >= 1 << 12]
    if not found:
        return _damage_operands(draw, program)
    at = draw.choice(found)
    tokens[at] = str(_flipped(draw, _integer(tokens[at])))
    return dataclasses.replace(program, text="".join(tokens))


def _damage_shape(draw: Draw, program: Program) -> Program:
    name = draw.choice(("grid", "block", "cluster", "shared"))
    size = draw.choice(SIZES)
    if name == "shared":
        return dataclasses.replace(program, shared=size)
    shape = list(getattr(program, name))
    shape[draw.randrange(3)] = size
    if draw.random() < 0.05:
        shape = shape[:2] if draw.random() < 0.5 else [*shape, size]
    return dataclasses.replace(program, **{name: tuple(shape)})


def _damage_parameters(draw: Draw, program: Program) -> Program:
    """Bits, words at limits and lengths."""
    if not program.params:
        return program
    params = list(program.params)
    at, what = draw.randrange(len(params)), draw.random()
    if what < 0.2:
        params[at] = params[at][: draw.randrange(len(params[at]) + 1)]
    elif what < 0.3:
        params[at] += bytes(draw.randrange(1, 9))
    elif what < 0.4:
        del params[at]
    elif what < 0.5:
        params.insert(at, params[at])
    else:
        params[at] = _changed(draw, params[at])
    return dataclasses.replace(program, params=tuple(params))


def _damage_map(draw: Draw, program: Program) -> Program:
    """Bits and words at limits of a tensor map, a parameter or in global memory."""
    places = [("params", i) for i, value in enumerate(program.params) if is_map(value)]
    places += [("buffers", i) for i, value in enumerate(program.buffers) if is_map(value)]
    if not places:
        return _damage_parameters(draw, program)
    name, at = draw.choice(places)
    values = list(getattr(program, name))
    values[at] = _changed(draw, values[at])
    return dataclasses.replace(program, **{name: tuple(values)})


def _changed(draw: Draw, value: bytes) -> bytes:
    """Some bits of the first 64 bytes flipped, or words of four bytes replaced."""
    changed = bytearray(value)
    for _ in range(draw.choice((1, 1, 2, 4))):
        if not changed:
            break
        bit = draw.randrange(8 * min(len(changed), 64))
        if draw.random() < 0.7:
            changed[bit // 8] ^= 1 << bit % 8
        else:
            start = bit // 32 * 4
            changed[start : start + 4] = draw.choice((0, 1, 2**31 - 1, 2**32 - 1)).to_bytes(4, "little")
    return bytes(changed[: len(value)])


def _damage_contents(draw: Draw, program: Program) -> Program:
    """What the kernel reads: coordinates, operands, offsets."""
    buffers = list(program.buffers)
    at = draw.randrange(len(buffers))
    content = bytearray(buffers[at])
    for _ in range(draw.choice((1, 4, 32))):
        word = draw.randrange(max(1, min(len(content), 512) // 4)) * 4
        value = draw.choice((0, -1, 1 << 31, (1 << 31) - 1, 128, draw.getrandbits(31)))
        content[word : word + 4] = value.to_bytes(8, "little", signed=True)[:4]
    buffers[at] = bytes(content[: len(buffers[at])])
    return dataclasses.replace(program, buffers=tuple(buffers))


_WRONG_OPTIONS: tuple[tuple[str, tuple[object, ...]], ...] = (
    ("seed", (-1, 2**64, "0", None)), ("completion", ("never", "", None)), ("interleave", ("later", 1)),
    ("detectors", (0, "races")), ("without", (("all",), "races", ((),))), ("strict", (None, 1)),
    ("arithmetic", ("fast", None)), ("clusters", ((0, 0), (-1,), (2**31,), (2**64,), (0.5,), ())),
    ("roles", (("a",) * 99, (1,))), ("barriers", (((0, "a"), (0, "b")), ((2**40, "far"),), ((-8, "below"),))),
    ("max_warp_instructions", (0, 1, -1, 1.5)), ("max_idle_blocks", (0, 1, 2**70)), ("counters", ("yes",)),
    ("processes", (0, -1, 7, 2**40, "2")),
)  # fmt: skip


def _damage_options(draw: Draw, program: Program) -> Program:
    """An option that does not exist, is of another type, or names what the launch does not have."""
    name, values = draw.choice(_WRONG_OPTIONS)
    return program.with_options(**{name: draw.choice(values)})


_damage_operands = _text(_register, _number)
DAMAGE: dict[str, tuple[int, Damage]] = {
    "tokens": (16, _text(*_TOKENS)), "operands": (20, _damage_operands), "qualifiers": (10, _text(_qualifier)),
    "statements": (12, _text(_statements)), "descriptors": (8, _damage_descriptors), "shape": (8, _damage_shape),
    "parameters": (6, _damage_parameters), "tensor maps": (9, _damage_map), "contents": (6, _damage_contents),
    "options": (5, _damage_options),
}  # fmt: skip
"""Kinds of damage: how often, and by what."""


def _draw_options(draw: Draw, kind: str) -> dict[str, object]:
    options: dict[str, object] = {"seed": draw.randrange(100)}
    options["completion"] = draw.choice(("eager", "eager", "lazy", "random"))
    options["interleave"] = draw.choice(("round_robin", "round_robin", "random", "starve"))
    options["detectors"] = draw.random() < 0.7
    options["arithmetic"] = draw.choice(("silicon", "silicon", "exact"))
    if draw.random() < 0.1:
        options["without"] = tuple(name for name in DETECTORS if draw.random() < 0.4)
    for name, share in (
        ("strict", 0.2), ("counters", 0.1), ("spurious_try_wait_failures", 0.1), ("trace", 0.05), ("going_on", 0.05),
    ):  # fmt: skip
        if draw.random() < share:
            options[name] = True
    if draw.random() < (0.5 if kind == "clusters" else 0.02):
        options["processes"] = draw.randrange(2, 5)
    return options


def draw_program(seed: int, number: int) -> Program:
    """The damaged program of a number, the same for a seed on every machine."""
    draw = random.Random(f"{seed} {number}")
    kinds = programs()
    [kind] = draw.choices(list(kinds), [_WEIGHTS[name] for name in kinds])
    program = draw.choice(kinds[kind]).with_options(**_draw_options(draw, kind))
    for _ in range(draw.choice((1, 1, 1, 2))):
        [name] = draw.choices(list(DAMAGE), [weight for weight, _ in DAMAGE.values()])
        program = DAMAGE[name][1](draw, program)
        program = dataclasses.replace(program, damage=(*program.damage, name))
    return program
