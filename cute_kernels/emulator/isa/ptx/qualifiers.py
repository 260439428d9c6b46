"""Qualifiers of an opcode: which there are, which an instruction needs, and which go together.

The row of each opcode (``@family`` in `instructions`) says so about the parts behind its prefix, in this notation:

* forms are separated by semicolons, slots of a form by blanks, words of a slot by ``|``; a slot takes one of its words;
* ``x?`` may be left out; ``{u,s}{16,32}`` is ``u16|u32|s16|s32``, ``$scope`` one of `SETS`;
* ``a|b > c|d`` in place of a form: whoever has one of the former needs one of the latter; ``a|b / c|d``: nobody has
  one of both.

An opcode is legal if a form takes all of its parts and every rule holds. Types and state spaces stand in the order of
the form; all others in any order, as ptxas 13.0 has it (tests/emulator/isa/ptx/test_qualifiers.py).
"""

import functools
import itertools
import re
from collections.abc import Collection
from dataclasses import dataclass

SETS = {
    "scope": "cta|cluster|gpu|sys",
    "ints": "{u,s}{16,32,64}",
    "bits": "b{16,32,64}",
    "shared": "shared|shared::cta|shared::cluster",
    "round": "rn|rz|rm|rp",
    "policy": "L2::cache_hint",
    "dims": "{1,2,3,4,5}d",
    "group": "cta_group::1|cta_group::2",
    "relations": "eq|ne|lt|le|gt|ge",
}

_BRACES = re.compile(r"(.*)\{([\w,:]*)\}(.*)")
_TYPE = re.compile(r"pred|[bsu]\d+(x\d)?|b?f\d+(x\d)?|tf32|e\dm\d(x\d)?|ue\dm\d(x\d)?")
_SPACE = re.compile(r"(global|shared|local|const|param)(::\w+)?")
_IN_ORDER = {"row": "layout", "col": "layout", "and": "bits", "xor": "bits", "popc": "bits"}


@dataclass(frozen=True)
class Slot:
    """Words of which an opcode has one, or none if it is ``optional``."""

    words: tuple[str, ...]
    optional: bool

    def __str__(self) -> str:
        shown = "|".join(f".{word}" for word in self.words[:6]) + "|.." * (len(self.words) > 6)
        return f"{{{shown}}}" if self.optional else f"({shown})" if len(self.words) > 1 else shown


@dataclass(frozen=True)
class Rule:
    """Who has one of ``words`` needs one of ``others``, or (``apart``) must have none of them."""

    words: frozenset[str]
    others: frozenset[str]
    apart: bool


@dataclass(frozen=True)
class Grammar:
    """The forms of a row and the rules between their words."""

    forms: tuple[tuple[Slot, ...], ...]
    rules: tuple[Rule, ...]

    def arrange(self, parts: tuple[str, ...]) -> tuple[tuple[str, ...], str]:
        """Parts in the order of their form, and why they are illegal, or ""."""
        best: tuple[tuple[int, int], str] | None = None
        for form in self.forms:
            taken, left = _take(form, parts)
            missing = [slot for slot, word in zip(form, taken) if not word and not slot.optional]
            arranged = tuple(word for word in taken if word)
            reason = _why(form, left, missing) or self._broken(arranged)
            if not reason:
                return arranged, ""
            rank = (len(left), len(missing))
            if best is None or rank < best[0]:
                best = rank, reason
        return parts, best[1] if best else "it has no forms"

    def _broken(self, parts: Collection[str]) -> str:
        given = frozenset(parts)
        for rule in self.rules:
            first = next((part for part in parts if part in rule.words), None)
            if first is None or rule.apart != bool(rule.others & given):
                continue
            if rule.apart:
                return f"qualifiers .{first} and .{sorted(rule.others & given)[0]} do not go together"
            return f"qualifier .{first} needs one of {_listed(rule.others)}"
        return ""


def _listed(words: Collection[str]) -> str:
    return ", ".join(f".{word}" for word in sorted(words))


def _why(form: tuple[Slot, ...], left: tuple[str, ...], missing: list[Slot]) -> str:
    behind = "".join(map(str, form)) or "nothing"
    if left:
        again = any(left[0] in slot.words for slot in form)
        problem = "does not go with the others" if again else "does not exist here"
        return f"qualifier .{left[0]} {problem}; it takes {behind}"
    return f"a qualifier is missing, one of {_listed(missing[0].words)}; it takes {behind}" if missing else ""


def _kind(word: str) -> str:
    """Kind of a word; words of one kind keep their order."""
    return "type" if _TYPE.fullmatch(word) else "space" if _SPACE.fullmatch(word) else _IN_ORDER.get(word, "")


def _take(form: tuple[Slot, ...], parts: tuple[str, ...]) -> tuple[list[str], tuple[str, ...]]:
    """The word that each slot gets ("": none), and what no slot takes."""
    taken, left = [""] * len(form), []
    after: dict[str, int] = {}
    for part in parts:
        kind = _kind(part)
        for i in range(after.get(kind, 0), len(form)):
            if not taken[i] and part in form[i].words:
                taken[i] = part
                if kind:
                    after[kind] = i + 1
                break
        else:
            left.append(part)
    return taken, tuple(left)


@functools.cache
def _words(text: str) -> tuple[str, ...]:
    """The words of ``a|{b,c}d|$set``."""
    found = []
    for each in text.split("|"):
        if each.startswith("$"):
            found.extend(_words(SETS[each[1:]]))
        elif match := _BRACES.fullmatch(each):
            choices = [match[1] + choice + match[3] for choice in match[2].split(",")]
            found.extend(itertools.chain.from_iterable(map(_words, choices)))
        else:
            found.append(each)
    return tuple(found)


@functools.cache
def read_grammar(text: str) -> Grammar:
    """The grammar of a row; raises KeyError for a set that is none of `SETS`."""
    forms, rules = [], []
    for entry in text.split(";"):
        tokens = entry.split()
        if len(tokens) == 3 and tokens[1] in (">", "/"):
            rules.append(Rule(frozenset(_words(tokens[0])), frozenset(_words(tokens[2])), tokens[1] == "/"))
        else:
            forms.append(tuple(Slot(_words(token.rstrip("?")), token.endswith("?")) for token in tokens))
    return Grammar(tuple(forms), tuple(rules))
