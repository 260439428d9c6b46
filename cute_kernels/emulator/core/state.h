// Every structure and constant that C shares with Python.
//
// layout.py reads this file and makes ctypes classes of it; the build compares sizes and offsets with the compiler's.
// It understands comments, `enum { NAME = integer }`, and `struct Name { ... }` with members of the types of <stdint.h>
// or of earlier structures, pointers, pointers to functions, and arrays of constant length (the last member of a
// structure may be an array of no length).
#pragma once
#include <stdint.h>

typedef struct Tables Tables;
typedef struct Point Point;
typedef struct Stream Stream;
typedef struct Shadow Shadow;
typedef struct Context Context;
typedef struct LogEntry LogEntry;
typedef struct Event Event;
typedef struct Agent Agent;
typedef struct NamedBarriers NamedBarriers;
typedef struct WorkQueues WorkQueues;
typedef struct TensorThread TensorThread;
typedef struct BulkThread BulkThread;
typedef struct TensorMap TensorMap;
typedef struct CopyName CopyName;
typedef struct WgmmaForm WgmmaForm;
typedef struct Warpgroup Warpgroup;

// An mbarrier of a cluster (PTX ISA, "mbarrier"), on a cache line of its own.
enum {
  MAX_COUNT = 1048575,                    // valid range of expected, pending and transaction counts
  MBARRIER_PENDING = 40,                  // where a state has its pending arrivals; below is the phase
  BARRIER_BLOCKS = 64, BARRIER_BLOCK = 256  // of a cluster so many blocks, each of so many
};
// What is done with one.
enum { ARRIVE, ARRIVE_DROP, ARRIVE_EXPECT_TX, EXPECT_TX, COMPLETE_TX, EXPECT_ARRIVALS, TRY_WAIT, TEST_WAIT, TENSOR_COMMIT };
// What Python is asked while an instruction executes (`Tables.report`): to put a fault into words and say whether to go on
// all the same; or for something else that it has. `Fault` has the facts.
enum {
  NOT_LIVE, EXITED, EXTRA_ARRIVALS, EXTRA_BYTES, TOO_MANY_ARRIVALS, TOO_MANY_BYTES,  // of an mbarrier
  INIT_ORDER, PHASE_OVERRUN, PHASE_AMBIGUOUS,  // that detectors find
  ARRIVAL_EARLY, BYTES_EARLY, ANNOUNCED_LATE, LANES_OVERTAKEN,  // likewise; the first also at a named barrier
  WRONG_NUMBER, WRONG_THREADS, OTHER_THREADS,  // of an arrival at a named barrier: a count may differ from earlier ones
  // Lanes are not all of the warp's; have different operands; are in the member mask of others that name another one; are
  // not those that their member mask names.
  WRONG_LANES, LANES_DIFFER, MASKS_DIFFER, WRONG_MEMBERS,
  UNKNOWN_MMA,  // it is not known how an mma.sync adds on this target
  COPY_REFUSED, COPY_UNORDERED,  // of the record of a cp.async: the latter is for the race detector to look at
  // Of the record of a bulk copy: it breaks a rule; its `text` is to be left, or the `number` of its tensor map; the lane
  // has no bulk groups; the kernel may change the map: column and clock of its read are to be left; the CTA is read as
  // `identity`; bytes are combined; the mbarrier.init is not known.
  BULK_REFUSED, BULK_NAME, BULK_MAP, BULK_GROUPS, BULK_MAP_READ, BULK_ELSEWHERE, BULK_COMBINE, BULK_INIT_ORDER,
  RACE_RAISED,  // the race detector has raised
  COMMIT_MASK,   // tcgen05.commit names illegal CTAs
  NAME_COMMIT,   // of the record of a thread
  COMMITS_MEET,  // what is noted of commits at the mbarrier is to be taken
  ADD_STREAM,    // the column, to the point of the mbarrier
  // Of a wgmma of a form: lanes differ in scale-d, or in a descriptor; a descriptor is none; an operand reaches beyond the
  // CTA's memory; the record differs from the one of the other warps; bytes are not initialised; lanes copy an accumulator
  // in flight.
  WGMMA_SCALE, WGMMA_LANES, WGMMA_DESCRIPTOR, WGMMA_OUTSIDE, WGMMA_DIFFERS, WGMMA_UNINITIALISED, WGMMA_COPIED,
  // Of an access: its address is not aligned; there is no such CTA; the CTA has exited; it leaves the memory; it touches
  // bytes that no array has, or an mbarrier; nobody has written them; no region of global memory allows it; lanes address
  // different spaces, or one that the instruction cannot access; one of local memory by lanes together; .shared::cta of
  // another CTA.
  ACCESS_MISALIGNED, ACCESS_NO_CTA, ACCESS_EXITED, ACCESS_OUTSIDE, ACCESS_UNNAMED, ACCESS_BARRIER, ACCESS_UNINITIALISED,
  ACCESS_UNREGISTERED, ACCESS_MIXED, ACCESS_NOT_SHARED, ACCESS_LOCAL, ACCESS_OTHER_CTA,
  // Of the record of an access to tensor memory: what it touches is refused, or was not written; the race detector has to
  // look at it, a load with an index.
  TENSOR_REFUSED, TENSOR_ORDER,
  // Of the record of a tcgen05.mma: it breaks a rule; fields of an instruction descriptor with scales; text and stream of
  // the thread; what it touches is not allocated or not written; its product, which the core does not compute.
  MMA_REFUSED, MMA_FIELDS, MMA_NAME, MMA_TOUCHES, MMA_PRODUCT,
  MAKE_ROOM,  // for arrivals at a named barrier
  MAKE_COPIES,  // what is kept of the running warp's cp.async
  NAME_ARRIVAL,  // the `text` of cp.async.mbarrier.arrive by the lane is to be left
  TAKE_LOGS,    // of the running warp
  TAKE_EVENTS,  // for observers
  BY_CHANCE   // whether a wait fails though it could succeed
};
// Facts of what Python is asked: each unit has a structure of its own. Facts that a question does not have are 0.
typedef struct BarrierFault {  // of an mbarrier
  int64_t operation, address, amount;  // ARRIVE .. ; of a named barrier -1 - its number; arrivals or bytes
  int64_t arriver;                     // the number of a label plus one, or 0
  int64_t phase;                       // that is waited for
  int64_t warp, place;                 // whose wait may come too late, at the instruction with this index
  int64_t column, clock;               // of the mbarrier.init; of a stream
} BarrierFault;
typedef struct NamedFault { int64_t number, threads; } NamedFault;  // of a named barrier; threads -1: all
typedef struct LaneFault {
  int64_t mask, executing;  // lanes that are wrong, and that execute
  int64_t members;          // the member mask
  int64_t operands, bits;   // where the values of all lanes are, of so many bits
} LaneFault;
typedef struct AccessFault {
  int64_t how;             // the space and ACCESS_WRITE, ACCESS_TOGETHER
  int64_t address, nbytes;  // of local memory: where the addresses of all lanes are
  int64_t lanes;
} AccessFault;
typedef struct CopyFault { int64_t record, lane, text; } CopyFault;  // of cp.async: a `LaneCopy`
typedef struct BulkFault {
  int64_t record, rule, lane;   // a `BulkCopy`, and the rule that it breaks
  int64_t text, identity;       // numbers of the race detector's
  int64_t number;               // of a tensor map
  int64_t column, clock;        // of mbarrier.init, or of the read of a tensor map
  int64_t cta;                  // that is read
  int64_t cells, more, nbytes;  // where the bytes are that are combined
} BulkFault;
typedef struct WgmmaFault {
  int64_t form, record, theirs;  // the `Wgmma`, and the one of the other warps
  int64_t descriptor, why;       // see `wgmma_matrix`
  int64_t low, high, cta;        // of an operand, in the CTA's memory
  int64_t operand, places;       // A or B; its pieces
} WgmmaFault;
typedef struct TensorFault {
  int64_t record, thread;      // a `TensorAccess`, `TensorMma` or, of a commit, `TensorThread`; the thread of an MMA
  int64_t rule, operand, cta;  // that an MMA breaks, in A or B, at a CTA
  int64_t lane, ctas, index;   // of a commit, and its mask; of a load
} TensorFault;
typedef struct Fault {
  BarrierFault barrier;
  NamedFault named;
  LaneFault lanes;
  AccessFault access;
  CopyFault copy;
  BulkFault bulk;
  WgmmaFault wgmma;
  TensorFault tensor;
} Fault;
typedef struct Barrier {
  int64_t phase;     // completed phases
  int64_t expected;  // arrivals that each phase needs
  int64_t pending;   // arrivals that the current phase still needs
  int64_t tx;        // bytes that it still waits for; negative when they came before expect_tx
  int64_t arriver;   // who arrived last: the number of a label plus one, or 0
  Point *point;      // with detectors, what the race detector knows of it
  int64_t unused[2];
} Barrier;

// The latest operations on the mbarriers of a cluster, for reports: number n is entry n % MOMENTS.
enum { MOMENTS = 4096 };
typedef struct Moment {
  int64_t address;
  int32_t operation, amount;  // of a wait that has passed: the parity or state that it asked for
  int32_t phase;              // completed ones, before the operation
  int32_t place, warp;        // who issued it: index of the instruction and number of the warp, -1: not known
  int32_t parity, timed_out;  // a wait is by parity; it has not passed
  int64_t steps;              // of the warp that ran, see `WarpHeader`
} Moment;

// Shared memory of a CTA. A shared address is the CTA's rank << RANK_SHIFT and an offset.
enum { RANK_SHIFT = 24, OFFSET_MASK = 16777215, MOST_TARGETS = 16 };  // targets: CTAs of a multicast
typedef struct Cta {
  uint8_t *data;
  uint8_t *states;  // of every byte: uninitialised, data, of an mbarrier
  int64_t size;     // bytes
  int16_t *slots;   // of every 8 bytes: the number of the mbarrier there plus one, or 0
  int64_t exited;   // nothing may access it any more
  NamedBarriers *named;
} Cta;

// bar and barrier of a CTA (PTX ISA, "bar"), which count threads by whole warps.
enum {
  NAMED_BARRIERS = 16, MOST_WARPS = 32, VOTES = 64,  // generations whose votes are kept: no warp is that far behind
  NO_GENERATION = -1
};
enum { BAR_ARRIVE, BAR_SYNC, BAR_RED_POPC, BAR_RED_AND, BAR_RED_OR };
typedef struct Vote { int64_t votes, voters; } Vote;  // threads whose predicate holds, and all
// The second arrival of a warp in one phase, and a mask of all that arrived in it. All zeros: there was none.
typedef struct DoubleArrival { int64_t warp, place, warps; } DoubleArrival;
typedef struct NamedBarrier {
  int64_t generation;              // that is incomplete
  int64_t expected, all_threads;   // threads that it needs; 1: all of the CTA, as long as they run
  int64_t arrived;                 // threads
  int64_t arrivals, room;          // of warps, and for how many there is room
  int64_t *who;                    // their indices in the CTA, in order
  int64_t first;                   // index of the instruction of the first one, -1: not known
  Point *point;                    // with detectors
  Vote vote, results[VOTES];       // of this generation, and of generation n in entry n % VOTES
  int64_t warps;                   // a mask of those that have arrived
  DoubleArrival again, first_double;  // in this generation, and in the first complete one that had any
} NamedBarrier;
struct NamedBarriers {
  int64_t running;              // threads of the warps that have not exited
  int64_t waiting[MOST_WARPS];  // generation that a warp has arrived in and waits for, or NO_GENERATION
  NamedBarrier barriers[NAMED_BARRIERS];
};

// Loads and stores. Shared and local memory appear to generic addresses as windows above every host address. Lanes
// exchange values with the core in rows of 32 items of up to 64 bits, on cache lines.
enum {
  SPACE_SHARED = 0, SPACE_GLOBAL = 1, SPACE_GENERIC = 2,
  SPACE_PARAM = 3, SPACE_LOCAL = 4, SPACE_OWN = 5,  // the last: of the CTA's own shared memory (.shared::cta)
  ACCESS_SPACE = 7, ACCESS_WRITE = 8, ACCESS_TOGETHER = 16,  // of `AccessFault.how`; together: one address for all lanes
  EXCHANGE_ROW = 256  // bytes
};
enum {  // 2^61, 3 * 2^60, 2^62
  SHARED_WINDOW = 2305843009213693952, LOCAL_WINDOW = 3458764513820540928, PARAM_WINDOW = 4611686018427387904
};
// Matrices of ldmatrix and stmatrix: of 16-bit elements, the same transposed, of 8-bit elements. Rows of 16 elements of four
// or six bits, with padding behind them, are spread to bytes.
enum { MATRICES = 0, MATRICES_TRANSPOSED = 1, MATRICES_OF_BYTES = 2, MATRICES_OF_FOURS = 4, MATRICES_OF_SIXES = 8 };

// Registered global memory.
typedef struct Region { int64_t start, end, writable; } Region;

// An MMA of a tensor core: D = round(A * B + D). A CTA, or each of a pair, has rows of A and
// of B and the cells of D that belong to its rows of A; B is that of all of them.
// Types of elements; those of less than eight bits, from E2M3 on, are multiplied by NumPy.
enum { E4M3, E5M2, F16, BF16, TF32, S8, U8, E2M3, E3M2, E2M1 };
enum { SUM_F32, SUM_F16, SUM_S32 };            // of D; FP16 is the lower half of a cell
enum { TENSOR_LANES = 128, TENSOR_COLUMNS = 512, LANE_GROUP = 16 };  // of tensor memory
enum { K_BYTES = 32, MOST_CTAS = 2 };
typedef struct MmaType {
  int64_t element, negated;
  int64_t unit;  // bytes of the pieces that make K_BYTES of a row
} MmaType;
typedef struct MmaOperand {
  const uint8_t *data;
  const uint8_t *states;  // 1 where a byte of data is initialised, or null
  const int64_t *places;  // of the pieces of each row, in units
} MmaOperand;
typedef struct MmaPart {
  MmaOperand a, b;
  uint32_t *cells;
} MmaPart;
typedef struct Mma {
  int64_t ctas, m, n;  // m: rows of A in each CTA
  MmaType a, b;
  int64_t d, accumulate, saturate;
  // How floats are added; see silicon.c. `fraction` 0: exactly, with one rounding at the end; UNKNOWN_SUMS: not known.
  // `split`: FP8 is multiplied in two halves of K, as FP16, whose sums begin at 0; then D is added.
  int64_t fraction, result, step, lowest, split;
  // Where in `cells` column j of D is, for row i of A: j * column_stride, from column `wrap` on beginning again
  // at wrap_offset; i / LANE_GROUP * group_stride + i % LANE_GROUP.
  int64_t column_stride, wrap, wrap_offset, group_stride;
  MmaPart parts[MOST_CTAS];
} Mma;

#include "state_tensor.h"

// mma.sync of floats, s8 and u8: what an instruction says. Of the parts of `mma` none; operands are in registers. A may
// have 8 rows, all of them `k_bytes` up to K_BYTES; what `mma` has beyond that is 0.
enum { MMA_SYNC_ROWS = 16, MMA_SYNC_COLUMNS = 8 };
typedef struct WarpMma {
  Mma mma;
  int64_t rows, k_bytes;
} WarpMma;

// What an instruction asked of the units, by its index; counters.py has the meanings. `width`: bytes per lane.
enum { METER_SHARED, METER_GLOBAL, METER_UNIT, METER_CLUSTER, METERS };  // memories; all else; other CTAs' memory
enum { METER_LOAD, METER_STORE, METER_ATOMIC };
typedef struct Meter {
  int64_t requests, bytes, wavefronts, ideal, conflicts, sectors, lines, width, tensor_read, tensor_written;
  int64_t moved;  // bytes between L2 and the multiprocessor
  int64_t low, high;  // of shared memory of a CTA: the first byte, and the one behind the last
} Meter;

// What the core knows of one cluster.
enum {
  STATES = 1, SPURIOUS = 2  // Tables.flags: bytes have states; waits may fail though they could succeed
};
// Reports after which execution went on, by what tells them apart: how often Python was asked.
enum { REPEATS = 64 };
typedef struct Repeat { uint64_t key; int64_t count; } Repeat;
enum { LOOKS = 64, MOST_LOOKS = 16 };  // that are kept; without any effect, before a warp gives way
typedef struct Look { int64_t address, nbytes; } Look;
typedef struct Tables {
  int64_t ranks;  // CTAs
  int64_t flags;
  int64_t progress;  // counts whatever another warp may wait for
  int64_t polls;     // and strong loads
  int64_t clock;     // what %clock and its kin read last
  int64_t place;     // index of the instruction that waits for an mbarrier or arrives at one now
  int64_t regions;
  Region *region_table;
  uint8_t *params;
  int64_t param_bytes;
  LogEntry *log;  // what the race detector has not seen yet, entries in use and in all
  int64_t log_used, log_size;
  Barrier *barriers[BARRIER_BLOCKS];
  int64_t completions;           // phases
  int64_t moment_count;
  Moment moments[MOMENTS];
  int64_t loaded, stored;        // bytes of bulk copies
  int64_t mmas;                  // tcgen05.mma that have taken effect
  TensorMap *maps;
  const MmaKind *mma_kinds;
  TensorCells *tensor_cells;  // of each CTA
  int64_t log_done;  // entries of the log that the race detector has seen
  Context *context;  // with detectors, the warp that runs
  CopyName *names;
  int64_t name_count;
  TensorThread *tensor_threads;  // of every lane of warp after warp
  Meter *meter;  // [instructions][METERS] of the role of the warp that runs, or null: nothing is counted
  int64_t meter_rank;  // the CTA of that warp
  const WarpMma *warp_mmas;  // of the kernel, by number
  const WgmmaForm *wgmma_forms;  // likewise
  Warpgroup *warpgroups;         // of CTA after CTA; null: the kernel has no wgmma
  int64_t warpgroups_of_cta;
  int64_t wgmmas;                // executed
  int64_t wgmma_warps;           // that have issued an operation
  // Where other instructions touch accumulators in flight: cells of a warp's state (else 0), and in it 32 words for
  // results that no register holds any more.
  int64_t register_cells, spare_register;
  uint8_t *local;                // of the warp that runs: of lane after lane so many bytes
  int64_t local_bytes;
  const int64_t *steps;          // of the warp that runs, see `WarpHeader`
  int32_t *budget;               // and its blocks
  int64_t gives_way;  // other clusters may run: a warp that does nothing but look ends its turn
  int64_t look_count, look_progress;  // looks (of lanes) since this progress
  Look looks[LOOKS];                  // the latest of them: look n is the entry n % LOOKS
  Fault fault;                   // that is reported
  Repeat uninitialised[REPEATS];  // reads, by instruction
  int32_t (*report)(int32_t what);  // 0: go on
  WorkQueues *work;
  Event *events;                 // that observers have not heard of yet, entries in use and in all; null: there are none
  int64_t event_count, event_room;
  Cta ctas[];
} Tables;

#include "state_races.h"

#include "state_async.h"

#include "state_copies.h"

#include "state_wgmma.h"

// --- what observers hear ---------------------------------------------------------------------------------------------

// What happens in a cluster, in its order, with its `values` (events.py).
enum {
  EVENT_ISSUED,                            // an operation: the beginning of its record, see `Work`
  EVENT_BEGINS, EVENT_ENDS, EVENT_FAILS,   // it takes effect, has done so or failed: its number
  EVENT_PHASE,                             // of an mbarrier is complete: its address, how many are
  EVENT_NAMED,    // a named barrier is complete: rank of the CTA, its number, how often it has been
  EVENT_WGMMAS,   // of a warpgroup: rank of the CTA, number of the warpgroup, how many operations are complete
  EVENT_PASSED,   // a wait for an mbarrier: its address, the state that was waited for, 1 if that is a parity
  EVENT_MBARRIER  // an operation on one: which, its address, and the mbarrier then: phase, expected, pending, tx, arriver
};
enum { EVENT_VALUES = 13 };
struct Event {
  int64_t kind;
  int64_t place;  // index of the instruction, -1: Python knows it
  int64_t steps;  // of the warp that runs, see `WarpHeader`
  int64_t values[EVENT_VALUES];
};

// --- kernels as bytecode ---------------------------------------------------------------------------------------------

// A branch at which lanes have parted: the block where they meet, who is there already, the branch around it, and how many
// parts (paths, and branches inside) have not come there. Lanes of what has parted are disjoint: there are at most LANES.
enum { NO_MEET = -1, NO_FRAME = -1 };
typedef struct Frame { int32_t meet; uint32_t arrived; int32_t below, parts; } Frame;
// Lanes that are not running now: where they continue, the innermost branch at which they have parted, whether they have
// had to wait since the warp did, what a blocking instruction of theirs remembers, and whether they wait for other lanes.
typedef struct Path { int32_t pc; uint32_t mask; int32_t frame, blocked; int64_t token, gathers; } Path;

// The state of a warp begins with this; behind it are a count of executions (int64) for every basic block, registers,
// constants and intermediate values. `meet` is that of the innermost branch `top`, NO_MEET where no lanes have parted;
// `used` is a mask of `frames`, `parted` the number of `paths`, oldest first. `entered`: the warp stands behind the count
// of block `pc`, not before it.
// For the phase of a parity, or a state, of `mbarrier`, or until anything changes; at the named barrier of a number; for
// all but so many wgmma-groups; for bulk groups of a lane, 2 * lane + 1 if for their reads; for copies of the lanes
// `newest`, all but so many groups of each, EVERY_COPY: all that they have issued.
enum {
  WAITS_PHASE = 1, WAITS_NAMED = 2, WAITS_GROUPS = 3, WAITS_STATE = 4, WAITS_POLLING = 5, WAITS_BULK = 6,
  WAITS_COPIES = 7, EVERY_COPY = -1
};
enum { POLLED = 1, SLEPT = 2 };  // what an instruction remembers that is executed again
typedef struct WarpHeader {
  int32_t pc;
  uint32_t mask;
  int32_t meet, top;
  uint32_t used;
  int32_t parted;
  Frame frames[LANES];
  Path paths[LANES];
  int32_t waiting;  // all paths wait
  int32_t gathers;  // as of `Path`, where the path runs that all others wait with
  int32_t budget;  // blocks until the warp gives way
  int32_t entered;
  int32_t timed_out;  // its next try_wait gives up
  int32_t waits;     // what it waits for, if not 0
  uint32_t live;     // lanes that have not exited
  int64_t awaited;   // which one of what it waits for, see there
  int64_t mbarrier;
  int64_t steps;      // instructions executed, up to the end of the block that it is in
  int64_t number;     // in the cluster
  int64_t rank, index;  // of its CTA, and in that
  int64_t storing, bulk;  // mask of lanes that have issued bulk stores, and addresses of the `BulkThread` of each
  int64_t newest;         // with WAITS_BULK: groups that it does not wait for
  int64_t token;
  LaneCopies *copies;  // of its cp.async, or null
} WarpHeader;

// An instruction: a function of the core and its operands, mostly offsets in the warp's state. A value that is the same
// in all lanes is a word of 64 bits, extended with zeros; one of lanes is LANES elements side by side; a predicate of
// lanes is a mask in the lower half of a word. Where there are four sources, `imm` is the last.
typedef struct Instruction {
  void *run;
  uint32_t d, a, b, c;
  int64_t imm;
} Instruction;
// An operation on a unit (`graph.block.Operation`) has in c: which one; which of its operands a and b are rows of lanes, not
// words that all lanes share; whether the last has 64 bits; a flag of its own. imm: the
// order, the number of the block, the instruction. One that has no result may have a third operand, d.
enum { OPERATION = 15, ROWS_A = 16, ROWS_B = 32, WIDE = 64, FLAG = 128, ROWS_D = 512 };
// One with more operands has a list b of facts and of operands: LISTED * where it is, and bytes of each lane there, 0 for a
// word that lanes share; or 0, there is none.
enum { LISTED = 16 };
typedef struct Program {
  Instruction *code;
  int32_t *starts;   // of every basic block, its first instruction; behind them, that of the exit
  uint32_t *lists;   // operands of instructions that have more
  int64_t exit;      // number of the block behind the last one
} Program;

// What the Python function of a site returns, and a run of a warp: go on, wait, error, exit.
enum { GO = 0, WAIT = 1, ERROR = 2, EXIT = 4 };
enum { CLOCK_STEP = 16 };  // from one reading of a clock to the next
enum { SITE_EXIT = 0, SITE_WAIT = 1, SITE_STOP = 2 };  // sites of control flow

// --- clusters in one slot --------------------------------------------------------------------------------------------

// Memory, and what a cluster finds there.
typedef struct Span { uint8_t *at; const uint8_t *found; int64_t nbytes; } Span;
typedef struct SlotWarp {
  uint8_t *state;
  Context *context;  // or null
  uint8_t *local;    // memory, or null
  int64_t place;     // index of the instruction where it waits
  int64_t ended;
} SlotWarp;
// Clusters of one CTA, which run one after the other in the memory of one.
typedef struct Slot {
  const Program *program;
  uint8_t *rows;  // of the exchange area
  Tables *tables;
  Epochs *epochs;  // with detectors, likewise the next two
  Shadow *shadow;
  int64_t clock_bytes;  // of the matrix of a warp
  SlotWarp *each;
  int64_t warps, blocks, local_bytes;
  Span *spans;
  int64_t span_count;
  int64_t *totals;         // int64 [warps][blocks], executions by the clusters that are done
  const int64_t *offsets;  // in the state of a warp, of words that differ between clusters
  int64_t offset_count;
  const int64_t *values;   // int64 [count][offset_count]
  int64_t number, text;    // of the first cluster and its first warp, of the race detector
  int64_t slice, most;     // blocks of a turn, instructions of a cluster that goes on here
  int64_t count, done;     // clusters that are to run, and have
  int64_t patience;        // instructions after which no other cluster begins
  int64_t fresh;           // nothing has run here
  int64_t warp, status;    // that ran last, or `warps`: none could run; what its turn ended with
  int64_t asked;           // Python has been
} Slot;
