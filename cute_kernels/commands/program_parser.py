"""The parser of commands that run a program, whose own arguments stand behind it."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn, TextIO

from cute_kernels.common import files


class CommandParser(argparse.ArgumentParser):
    """Parser of a command. With ``runs_program`` the first positional argument is a program, and what follows it is the
    program's own, whatever it looks like: it goes to ``arguments`` of the result. (argparse would complete, and
    claim, options in it.)"""

    def __init__(self, *arguments: object, runs_program: bool = False, **keywords: object) -> None:
        super().__init__(*arguments, **keywords)
        self._runs_program = runs_program

    def parse_known_args(
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Overrides the method of the base class."""
        if not self._runs_program:
            return super().parse_known_args(args, namespace)
        args = list(sys.argv[1:] if args is None else args)
        end = self._program_index(args) + 1
        namespace, unknown = super().parse_known_args(args[:end], namespace)
        namespace.arguments = args[end:]
        self._note_misplaced(Path(args[end - 1] if args[:end] else ""), args[end:])
        return namespace, unknown

    def _note_misplaced(self, program: Path, words: list[str]) -> None:
        """Says which options of the command stand behind a Python program whose text has no such option."""
        if program.suffix in (".ptx", ".cu") or not program.is_file():  # refused with words of their own
            return
        own = [word.partition("=")[0] for word in words if word not in ("-h", "--help")]
        text = program.read_text(errors="replace")
        if found := [word for word in own if word in self._option_string_actions and word not in text]:
            files.complain(f"cute-kernels: note: {program} gets {' '.join(found)}; ours stand before {program}")

    def error(self, message: str) -> NoReturn:
        """Overrides the method of the base class: argparse takes a value that begins with a hyphen for an option."""
        option, expected, _ = message.removeprefix("argument ").partition(": expected one argument")
        super().error(message + f"; one that begins with a hyphen is written {option}=VALUE" * bool(expected))

    def _print_message(self, message: str, file: TextIO | None = None) -> None:
        """Overrides the method of the base class, which would say nothing of a full disk."""
        if file is sys.stdout:
            files.show(message.removesuffix("\n"))
        else:
            super()._print_message(message, file)

    def _program_index(self, args: list[str]) -> int:
        index = 0
        while index < len(args):
            word = args[index]
            if word == "--":
                return index + 1
            if not word.startswith("-") or word == "-":
                return index
            index += 1 + ("=" not in word and self._takes_value(word))
        return index

    def _takes_value(self, word: str) -> bool:
        options = self._option_string_actions
        names = [word] if word in options else [name for name in options if name.startswith(word)]
        # What is unknown or ambiguous here is argparse's to report.
        return len({id(options[name]) for name in names}) == 1 and options[names[0]].nargs is None
