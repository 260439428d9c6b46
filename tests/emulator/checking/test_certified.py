"""The table of certified launches is that of the programs; those that are quick run again."""

from __future__ import annotations

from tests.emulator.checking import certified
from tests.emulator.checking.mutation.targets import TARGETS


def test_the_table_is_of_today():
    table = certified.PAGE.read_text().partition(certified.BEGIN)[2].partition(certified.END)[0]
    rows = {line.split(" | ")[0].removeprefix("| "): line for line in table.splitlines() if line.startswith("| ")}
    programs = certified.groups([])
    assert list(rows)[1:] == list(programs)
    quick = "public bugs, fixed"
    assert certified.row(quick, programs[quick]) == rows[quick]
    ours = [[int(count) for count in rows[name].split(" | ")[1:4]] for name in programs if name.startswith("our")]
    assert sum(map(sum, ours)) == len(TARGETS)
    given, all_of_them = sum(counts[0] for counts in ours), sum(map(sum, ours))
    assert given >= 0.9 * all_of_them


def test_names_choose_kernels():
    assert {group: list(found) for group, found in certified.groups(["gemm-sm80"]).items()} == {
        "our kernels, sm80": ["gemm-sm80"]
    }
