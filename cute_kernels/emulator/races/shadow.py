"""Shadow memory: who wrote and who read every place last, which the core compares with clocks (``core/conflicts.c``).

A place remembers the identity of an access, an int32: the number of its epoch in `Epochs` (column and clock, see
`happens_before`) and in the five lowest bits the lane. Accesses of 16 aligned bytes, nearly all there are, are kept per
16-byte granule; a granule that is ever accessed in smaller pieces is split into bytes, so that neighbours never disturb
each other.
"""

import math
import mmap
from collections.abc import Callable

import numpy as np

from cute_kernels.emulator.core.layout import CONSTANTS, word_count, words

GRANULE, LANE_BITS = CONSTANTS["GRANULE"], CONSTANTS["LANE_BITS"]
GENERIC, STRONG = CONSTANTS["GENERIC"], CONSTANTS["STRONG"]  # kinds of accesses, see `Epochs.generic`
_LANE_MASK = (1 << LANE_BITS) - 1

_MAPPED_BYTES = 1 << 16


def zeros(shape: int | tuple[int, ...], dtype: type[np.generic] = np.int32) -> np.ndarray:
    """Zeros like `numpy.zeros`. Large arrays are pages of the system, which cost nothing before they are touched.

    The C library's allocator clears what it has had before: a shadow of which a few places are ever used would cost as
    much as one in full use. They are private: what a forked process writes there is its own.
    """
    nbytes = math.prod(shape if isinstance(shape, tuple) else (shape,)) * np.dtype(dtype).itemsize
    if nbytes < _MAPPED_BYTES:
        return np.zeros(shape, dtype)
    return np.frombuffer(mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype).reshape(shape)


Offsets = int | np.ndarray
"""Where an access begins: one place, or int64 of several."""
Lanes = int | np.ndarray
"""A lane, -1 for all of them, or one per address."""
_EPOCHS, _SHADOW, _PLANE = words("Epochs"), words("Shadow"), words("Plane")
_LAYERS = 16  # for which there is room at once in planes of at most so many bytes each
_MOST_BYTES = 1 << 20
_COUNT, _CAPACITY, _CLUSTER = (_EPOCHS[name] for name in ("count", "capacity", "cluster"))


_Later = tuple[int, Callable[[int], str]]


class Epochs:
    """Columns, clocks and clusters of all accesses of a launch, by epoch number; epoch 0 is "never accessed".

    The core makes epochs as well, so their number and where they are is kept in a structure that it knows.

    Attributes:
        columns, clocks: int32, indexed by epoch; an access of lane ``n`` belongs to column ``columns + n``.
        places: int32: index of the instruction that made the first of its accesses; -1: not known.
        generic: uint8: `GENERIC` where the access went through the generic proxy, `STRONG` for a strong operation.
        block: an `Epochs` of the core, as int64; it is at host ``address``.
    """

    def __init__(self) -> None:
        self.columns, self.clocks = np.zeros(1024, np.int32), np.zeros(1024, np.int32)
        self.generic = np.zeros(1024, np.uint8)
        self.places = np.full(1024, -1, np.int32)
        self.clusters = np.zeros(1024, np.int32)  # int32: the cluster, from 1 on; 0: of the launch before
        self._texts = np.zeros(1024, np.int32)  # index in _labels: who and what, for reports
        self._labels: list[str | _Later] = [""]
        self.block = np.zeros(word_count("Epochs"), np.int64)
        self.address = self.block.ctypes.data
        self._words = memoryview(self.block).cast("B").cast("q")
        self._words[_COUNT] = 1
        self._locate()

    def _locate(self) -> None:
        arrays = self.columns, self.clocks, self.generic, self._texts, self.places, self.clusters
        self.block[: len(arrays)] = [array.ctypes.data for array in arrays]
        self._words[_CAPACITY] = len(self.columns)

    def __len__(self) -> int:
        return self._words[_COUNT]

    def text(self, *labels: str) -> int:
        """Keeps labels of epochs that will be made; returns the number of the first."""
        self._labels += labels
        return len(self._labels) - len(labels)

    def later(self, count: int, label: Callable[[int], str]) -> int:
        """Keeps labels that are made, of their number from 0 on, when they are asked for; the number of the first."""
        first = len(self._labels)
        self._labels += [(first, label)] * count
        return first

    def new(self, column: int, clock: int, label: str | int, generic: int = 0, place: int = -1) -> int:
        """The identity (of lane 0) of a new epoch; ``label`` is a text or the number of one that is kept."""
        self.make_room()
        number = self._words[_COUNT]
        self.columns[number], self.clocks[number], self.generic[number] = column, clock, generic
        self._texts[number] = label if isinstance(label, int) else self.text(label)
        self.places[number], self.clusters[number] = place, self.cluster
        self._words[_COUNT] = number + 1
        return number << LANE_BITS

    def make_room(self) -> None:
        """For one more epoch at least."""
        if self._words[_COUNT] == self._words[_CAPACITY]:
            arrays = self.columns, self.clocks, self.generic, self._texts, self.places, self.clusters
            self.columns, self.clocks, self.generic, self._texts, self.places, self.clusters = (
                np.concatenate([array, np.zeros_like(array)]) for array in arrays
            )
            self._locate()

    def label(self, identity: int) -> str:
        number = int(self._texts[identity >> LANE_BITS])
        label = self._labels[number]
        return label if isinstance(label, str) else label[1](number - label[0])

    def place(self, identity: int) -> int:
        """Index of the instruction of the epoch's first access; -1: not known."""
        return int(self.places[identity >> LANE_BITS])

    @property
    def cluster(self) -> int:
        """Number of the cluster that runs now, from 1 on; 0: none does."""
        return self._words[_CLUSTER]

    @cluster.setter
    def cluster(self, number: int) -> None:
        self._words[_CLUSTER] = number

    def foreign(self, number: int, cluster: int) -> bool:
        """Whether an epoch is of another cluster than this one; 0: nobody asks."""
        return cluster > 0 and int(self.clusters[number]) != cluster

    def lane(self, identity: int) -> int:
        return identity & _LANE_MASK


class Plane:
    """Last write and last reads of an array of places. Readers that are not ordered among each other take layers.

    Clusters number their columns alike, and nothing orders them, so that a reader may take the place of one of an
    earlier cluster that it is not ordered after. One such read per place is kept apart, since a later write races with
    it whatever its own cluster knows: the first, for any number of clusters would need as many layers.

    Attributes:
        writes, reads: identities; a layer of readers each. The core adds layers, and asks for room where there is none.
        foreign: per place, the first read since the last write that a reader of a later cluster has replaced; None
            while there is none.
        block: a `Shadow` of the core, as int64; the plane is its first or (``fine``) its second one.
    """

    def __init__(self, shape: int | tuple[int, ...], block: np.ndarray | None = None, *, fine: bool = False) -> None:
        self.shape = shape
        self.writes = zeros(shape)
        self._store = self._layers(_LAYERS if self.writes.nbytes <= _MOST_BYTES else 1)
        self._views: list[np.ndarray] = []
        self.foreign: np.ndarray | None = None
        self.block = np.zeros(word_count("Shadow"), np.int64) if block is None else block
        self.address = self.block.ctypes.data
        self._first = _SHADOW["fine"] if fine else 0
        self._locate()

    def _layers(self, count: int) -> np.ndarray:
        """Room for layers, int32 [count, *shape]."""
        return zeros((count, *(self.shape if isinstance(self.shape, tuple) else (self.shape,))))

    def _locate(self) -> None:
        first, stride = self._store.ctypes.data, self._store.strides[0]
        self._table = np.arange(first, first + stride * len(self._store), stride, np.int64)
        foreign = 0 if self.foreign is None else self.foreign.ctypes.data
        values = {
            "writes": self.writes.ctypes.data, "layers": self._table.ctypes.data, "places": self.writes.size,
            "foreign": foreign, "room": len(self._store),
        }  # fmt: skip
        for name, value in values.items():
            self.block[self._first + _PLANE[name]] = value

    @property
    def reads(self) -> list[np.ndarray]:
        """The layers of readers."""
        for layer in range(len(self._views), int(self.block[self._first + _PLANE["layer_count"]])):
            self._views.append(self._store[layer])
        return self._views

    def make_room(self) -> None:
        """For twice as many layers."""
        store = self._layers(2 * len(self._store))
        store[: len(self._store)] = self._store
        self._store, self._views = store, []
        self._locate()

    def expect_reads(self, layers: int = 1) -> None:
        """Makes room for so many layers at once."""
        while len(self._store) < layers:
            self.make_room()
        self.block[self._first + _PLANE["layer_count"]] = layers

    def add_foreign(self) -> np.ndarray:
        """`foreign`, made if there is none."""
        if self.foreign is None:
            self.foreign = zeros(self.shape)
            self._locate()
        return self.foreign

    def readers(self) -> list[np.ndarray]:
        """All that a write has to be ordered after."""
        return self.reads if self.foreign is None else [*self.reads, self.foreign]


class Shadow:
    """Shadow of ``nbytes`` bytes of shared or global memory. ``fine``: by bytes, for granules that are split; None
    while there is none. With ``by_bytes`` there is one at once, so that the core may split granules. ``accessed``:
    first byte that was accessed and the one behind the last, or more than these; after `bound` alone."""

    def __init__(self, nbytes: int, *, by_bytes: bool = False, bounded: bool = False) -> None:
        self.nbytes = nbytes
        self.coarse = Plane(-(-nbytes // GRANULE) + 2)  # by granules of 16 bytes
        self.fine: Plane | None = None
        self._split: np.ndarray | None = None
        self.address = self.coarse.address  # host address of the `Plane.block` that both planes share
        self.coarse.block[_SHADOW["high"]] = -1
        if bounded:
            self.bound()
        if by_bytes:
            self.make_bytes()

    def bound(self) -> None:
        """From now on it is known what was `accessed`."""
        self.coarse.block[_SHADOW["low"]], self.coarse.block[_SHADOW["high"]] = self.nbytes, 0

    @property
    def accessed(self) -> tuple[int, int]:
        return int(self.coarse.block[_SHADOW["low"]]), int(self.coarse.block[_SHADOW["high"]])

    def make_bytes(self) -> None:
        """Granules may be split from now on."""
        self.fine = Plane(self.coarse.shape * GRANULE, self.coarse.block, fine=True)
        self._split = zeros(self.coarse.shape, np.bool_)
        self.coarse.block[_SHADOW["split"]] = self._split.ctypes.data

    def spans(self) -> list[tuple[int, int]]:
        """(address, bytes) of the `Plane.block`."""
        return [(self.address, self.coarse.block.nbytes)]

    def split_granules(self) -> np.ndarray:
        """Which granules are kept by bytes, bool [granules]."""
        return np.zeros(self.coarse.shape, bool) if self._split is None else self._split
