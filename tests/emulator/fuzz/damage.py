"""Damage to programs, drawn from a seed: their text, shape, parameters, tensor maps and options."""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Callable

from tests.emulator.fuzz.programs import Program, programs

LIMITS = (
    "0", "-1", "1", "2", "3", "7", "15", "31", "32", "33", "63", "64", "127", "128", "255", "256", "1023", "1024",
    "65535", "2147483647", "-2147483648", "4294967295", "4294967296", "9223372036854775807", "18446744073709551615",
    "18446744073709551616", "0x7FFFFFFF", "0xFFFFFFFFFFFFFFFF", "0f7FC00000", "0f7F800000", "0dFFF0000000000000",
    "1e999", "1" * 40, "0x", "0b2", "08",
)  # fmt: skip
SIZES = (-(2**31), -1, 0, 1, 2, 3, 31, 33, 64, 128, 1024, 1025, 65_535, 65_536, 2**31 - 1, 2**31, 2**63, 2**64)
_WEIGHTS = (30, 30, 20, 18, 2)  # of the kinds of programs: those of our kernels take longest
_TOKEN = re.compile(r"\s+|[%$\w][\w.$%:]*|\.[\w:.]+|\S")
_REGISTER = re.compile(r"%[a-z]+\d+$")
_NUMBER = re.compile(r"-?(0[xX][0-9a-fA-F]+|\d+)$")

Draw = random.Random


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
        flipped = str(int(tokens[at], 0 if "x" in tokens[at].lower() else 10) ^ 1 << draw.randrange(64))
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


TEXT: tuple[Callable[[Draw, list[str]], None], ...] = (
    _delete, _duplicate, _swap, _exchange, _register, _register, _number, _number, _qualifier, _qualifier, _character,
    _truncate, _statements, _statements,
)  # fmt: skip


def _damage_text(draw: Draw, program: Program) -> Program:
    tokens = _TOKEN.findall(program.text)
    for _ in range(draw.choice((1, 1, 1, 2, 3, 8))):
        if tokens and not all(map(str.isspace, tokens)):
            kind = draw.choice(TEXT)
            if kind is not _truncate or draw.random() < 0.2:  # a truncated text says little
                kind(draw, tokens)
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
    """Bits, words at limits and lengths; of a parameter of 128 bytes, a tensor map, more often than of others."""
    if not program.params:
        return program
    params = list(program.params)
    maps = [i for i, value in enumerate(params) if len(value) == 128]
    at = draw.choice(maps) if maps and draw.random() < 0.7 else draw.randrange(len(params))
    value = bytearray(params[at])
    what = draw.random()
    if what < 0.06:
        value = value[: draw.randrange(len(value) + 1)]
    elif what < 0.1:
        value += bytes(draw.randrange(1, 9))
    elif what < 0.14:
        del params[at]
        return dataclasses.replace(program, params=tuple(params))
    else:
        for _ in range(draw.choice((1, 1, 2, 4))):
            if not value:
                break
            bit = draw.randrange(8 * min(len(value), 64))
            if what < 0.7:
                value[bit // 8] ^= 1 << bit % 8
            else:
                start = bit // 32 * 4
                value[start : start + 4] = draw.choice((0, 1, 2**31 - 1, 2**32 - 1)).to_bytes(4, "little")
        value = value[: len(params[at])]
    params[at] = bytes(value)
    return dataclasses.replace(program, params=tuple(params))


def _damage_contents(draw: Draw, program: Program) -> Program:
    """What the kernel reads: coordinates, operands, offsets."""
    buffers = list(program.buffers)
    at = draw.randrange(len(buffers))
    content = bytearray(buffers[at])
    for _ in range(draw.choice((1, 4, 32))):
        word = draw.randrange(max(1, min(len(content), 512) // 4)) * 4
        content[word : word + 4] = draw.choice((0, -1, 1 << 31, (1 << 31) - 1, 128, draw.getrandbits(31))).to_bytes(
            8, "little", signed=True
        )[:4]
    buffers[at] = bytes(content[: len(buffers[at])])
    return dataclasses.replace(program, buffers=tuple(buffers))


def _draw_options(draw: Draw) -> dict[str, object]:
    options: dict[str, object] = {"seed": draw.randrange(100)}
    options["completion"] = draw.choice(("eager", "eager", "lazy", "random"))
    options["interleave"] = draw.choice(("round_robin", "round_robin", "random", "starve"))
    options["detectors"] = draw.random() < 0.7
    for name, share in (("strict", 0.2), ("counters", 0.1), ("spurious_try_wait_failures", 0.1)):
        options[name] = draw.random() < share
    return options


def draw_program(seed: int, number: int) -> Program:
    """The damaged program of a number, the same for a seed on every machine."""
    draw = random.Random(f"{seed} {number}")
    [kind] = draw.choices(programs(), _WEIGHTS)
    program = draw.choice(kind).with_options(**_draw_options(draw))
    for _ in range(draw.choice((1, 1, 1, 2))):
        damage = draw.choices(
            (_damage_text, _damage_shape, _damage_parameters, _damage_contents), (70, 8, 16, 6)
        )[0]
        program = damage(draw, program)
    return program
