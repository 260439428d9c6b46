"""`MBarriers` with one method for each operation of PTX, for tests of units."""

from __future__ import annotations

from cute_kernels.emulator.core.layout import CONSTANTS
from cute_kernels.emulator.state.mbarrier import MBarriers


class Barriers(MBarriers):
    def arrive_drop(self, address: int, count: int = 1) -> int:
        return self.apply(CONSTANTS["ARRIVE_DROP"], address, count)

    def expect_tx(self, address: int, nbytes: int) -> None:
        self.apply(CONSTANTS["EXPECT_TX"], address, nbytes)

    def arrive_expect_tx(self, address: int, nbytes: int, who: str = "") -> int:
        self.expect_tx(address, nbytes)
        return self.arrive(address, 1, who)

    def test_parity(self, address: int, parity: int) -> bool:
        return self.test(address, parity, True)

    def test_phase(self, address: int, state: int) -> bool:
        return self.test(address, state, False)
