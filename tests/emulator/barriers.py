"""`MBarriers` with one method for each operation of PTX, for tests of units."""

from __future__ import annotations

from cute_kernels.emulator.core.layout import CONSTANTS
from cute_kernels.emulator.core.library import library
from cute_kernels.emulator.machine.state.mbarrier import MBarriers


class Barriers(MBarriers):
    def arrive(self, address: int, count: int = 1, who: str = "") -> int:
        return self.apply(CONSTANTS["ARRIVE"], address, count, who)

    def arrive_drop(self, address: int, count: int = 1) -> int:
        return self.apply(CONSTANTS["ARRIVE_DROP"], address, count)

    def expect_tx(self, address: int, nbytes: int) -> None:
        self.apply(CONSTANTS["EXPECT_TX"], address, nbytes)

    def arrive_expect_tx(self, address: int, nbytes: int, who: str = "") -> int:
        self.expect_tx(address, nbytes)
        return self.arrive(address, 1, who)

    def test_parity(self, address: int, parity: int) -> bool:
        return self._test(address, parity, True)

    def test_phase(self, address: int, state: int) -> bool:
        return self._test(address, state, False)

    def _test(self, address: int, state: int, parity: bool) -> bool:
        operation = CONSTANTS["TRY_WAIT" if parity else "TEST_WAIT"]
        passed = library().mbarrier_test(self.address, operation, address, state, parity)
        if passed < 0:
            self.reraise()
        return bool(passed)
