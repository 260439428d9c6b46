// The race detector's structures and constants that C shares with Python. state.h includes them; see there what layout.py
// understands, and happens_before.py for what clocks, columns and rows are.
#pragma once

enum {
  LANES = 32,
  // Rows of a matrix of clocks, int32 [ROWS][width].
  ROW_ORDER = 0, ROW_ACQUIRED = 1, ROW_VISIBLE = 2, ROW_PROXY = 3, ROW_PROXY_GLOBAL = 4, ROW_TENSOR = 5, ROWS = 6,
  // Semantics of a synchronising instruction.
  ORDER_SYNC = 1, ORDER_WIDE = 2, ORDERS = 4,
  // Columns of a warp, behind those of its lanes.
  COLUMN_READ = 32, COLUMN_LOADS = 33, COLUMN_TENSOR_LOAD = 34, COLUMN_TENSOR_STORE = 35, COLUMN_INIT = 36,
  WARP_COLUMNS = 37,
  SCOPED_ROWS = 2,   // that relaxed synchronisation at the scope of a CTA does not take to another: visible, tensor
  PENDING_ROWS = 4,  // that a fence takes over from relaxed waits before it: acquired, visible and both proxies
  PRIVATE_COLUMNS = 64  // a lane has two streams of its own: reads and writes of its bulk groups
};

// Clocks that one lane knows alone, until the lanes synchronise.
typedef struct PrivateClock { int64_t column, lane, clock; } PrivateClock;
typedef struct Private {
  int64_t count;
  PrivateClock entries[PRIVATE_COLUMNS];
} Private;

// Accesses of a warp that share an epoch beside those of `Agent`: strong loads by one lane and by several, strong stores
// by an instruction, stores of all lanes to one place, weak and strong.
enum { SPECIAL_READ, SPECIAL_LOADS, SPECIAL_STORE, SPECIAL_WHOLE, SPECIAL_WHOLE_STRONG, SPECIALS };
typedef struct SpecialEpoch { int64_t clock, instruction, identity; } SpecialEpoch;

// What is kept of a thread's bulk groups.
struct BulkThread {
  int64_t committed;      // groups
  int64_t waited;         // whose reads were waited for
  int64_t reads, writes;  // columns
  // The latest store: its group, bytes, shared address, whether it has a tensor map, instruction.
  int64_t stored, nbytes, shared, mapped, place;
};

// A warp.
struct Agent {
  int32_t *clocks;
  int64_t width;   // columns
  int64_t base;    // the first of its own
  int64_t live;    // mask of lanes
  int64_t rank;    // of its CTA
  int64_t clock, load_clock, store_clock;  // of its accesses now, and of those to tensor memory
  int64_t read_identity, write_identity, loads_identity, load_identity, store_identity;  // at these clocks; 0: none yet
  int64_t text;  // the first of four of its epochs: generic loads and stores, tcgen05.ld and st
  Private *single;
  int32_t *loads;  // of every tcgen05.ld the clock of the latest
  int64_t load_count;
  int32_t *before;    // the tensor row at the last tcgen05.fence::before_thread_sync
  int32_t *incoming;  // the tensor row that relaxed waits obtained
  int64_t number;       // in the cluster
  int64_t strict;
  int32_t *fenced;       // the clocks at the last fence
  int64_t fenced_order;  // and its scope; -1: there was none
  int32_t *pending;  // int32 [PENDING_ROWS][width], what relaxed waits obtained
  int64_t some_pending;
  int64_t fenced_inits;  // mbarriers initialised before the last fence of them
  int32_t *scratch;      // a matrix for intermediate results
  int64_t changes;       // counts whatever changes the clocks, or those of single lanes
  int64_t loading, loaded, given;  // lanes that load together, their clock, and those that have arrived since
  SpecialEpoch special[SPECIALS];
};

// What is kept of a warp by a synchronisation point. It may have waited for phase -1, the one before the first.
enum { NO_PHASE = -2 };
typedef struct Followed {
  int64_t phase, clock, waited_place;  // that it waited for last (NO_PHASE: none), its clock then, instruction
  int64_t lanes;  // mask of those that waited then, where they may part behind the wait
  int64_t used;   // its clock at its latest operation on the mbarrier
  int64_t announced, announced_place;  // its clock at an expect_tx that no arrival of the phase knows yet, or 0
  int64_t seen[ORDERS];             // phase that it acquired last with each order
  int64_t arrived, arrived_phase, arrived_place;  // its clock at its latest arrival from another CTA, phase, instruction
  int64_t arrived_steps;                          // and the warp's `WarpHeader.steps`
  // Its latest tcgen05.commit in C: stream (-1: none), clock, phase, instruction.
  int64_t commit_column, commit, commit_phase, commit_place;
} Followed;

// A copy that signals: its phase and the identity.
typedef struct LatestCopy { int64_t phase, identity; } LatestCopy;

// A synchronisation point.
struct Point {
  int64_t width;  // columns
  int32_t *gathered, *available;  // matrices
  int64_t completed;              // phases
  int64_t column;                 // its own, or -1
  int64_t init_column, init_clock;  // of the mbarrier.init; clock 0: not known
  LatestCopy copies[2];             // to the shared memory of its own CTA, and to that of the other of the pair
  int64_t ranks;                    // CTAs of the cluster
  int32_t *inside, *inside_available;  // int32 [ranks][SCOPED_ROWS][width]: passed on inside CTAs, available there
  int64_t *used;                       // of every CTA, whether it passed anything on
  int64_t warps;
  Followed *followed;
  int64_t *bases;  // first columns of the warps
  int64_t stream_count, stream_room;
  int64_t *streams;  // columns of asynchronous operations that arrived
  int32_t *earlier;  // int32 [width]: the order row of `available` before the latest phase
  int64_t copied;    // bits of the completed phases, the latest is the lowest: whether a copy signalled it
  int64_t announcements;  // warps with one that no arrival knows
};

// Columns, clocks and clusters of all accesses, by epoch number. An identity is an epoch number << LANE_BITS and a lane.
// An operation that is not complete has the clock NEVER.
enum { LANE_BITS = 5, GENERIC = 1, STRONG = 2, NEVER = 2147483647 };
typedef struct Epochs {
  int32_t *columns, *clocks;
  uint8_t *kinds;  // 0, GENERIC or STRONG
  int32_t *texts, *instructions, *clusters;
  int64_t count, capacity;
  int64_t cluster;  // that runs now, from 1 on
  Repeat races[REPEATS];  // by the instructions of both accesses
} Epochs;

// Identities of the last write and the last reads of places. See shadow.py.
typedef struct Plane {
  int32_t *writes;
  int32_t **layers;
  int64_t layer_count, places;
  int32_t *foreign;
  int64_t room;  // layers that there may be
} Plane;

// Bytes: by granules, and those that are split by bytes. Tensor memory has the first plane alone.
enum { GRANULE = 16 };
struct Shadow {
  Plane coarse, fine;
  uint8_t *split;  // of every granule, or null
  int64_t low, high;  // all bytes that have been accessed are among these; high < 0: of shared memory, nobody asks
};

// Tensor memory: no access covers fewer lanes of a column than a group.

// Global memory of a launch.
typedef struct LaunchRegion {
  int64_t start, end, writable;
  Shadow *tracked;  // or null
  int64_t origin;   // address that it begins at
} LaunchRegion;
typedef struct LaunchRegions {
  LaunchRegion *regions;
  int64_t count;
  const uint8_t *non_coherent;  // of every instruction of the kernel, whether it is an ld.global.nc; or null
  const uint8_t *stores;        // likewise a store
  const uint8_t *parting;       // likewise a wait behind which lanes may part, see waits.py
  int64_t first;                // first epoch of the launch
} LaunchRegions;

// An access: ROWS of COUNT. Row i begins at offsets[i] - origin, or without offsets at base + i * stride.
typedef struct Access {
  int64_t write, strong;
  Shadow *shadow;
  int64_t grain;  // GRANULE: bytes; 1: places of the first plane
  const int64_t *offsets;
  int64_t rows, base, stride, count, origin;
  const int32_t *known;  // who looks: see `shadow.View`
  int64_t width, own;
  const int64_t *lanes;  // one per row, or null
  int64_t lane, exempt, cluster;  // cluster 0: no other one accesses this memory
  Epochs *epochs;
  int64_t identity, add_lanes;  // what is recorded
  // Clocks that writes must be known to as well (a read), or any access through the generic proxy (a write); or null.
  const int32_t *fenced;
  const int32_t *read_known;    // a read: clocks by which it replaces others, or null
  int64_t read_column;
  int64_t unwritten;  // a read: no write may have this epoch or a later one; 0: any may
  int64_t check;      // ACCESS_..
  const Private *single;  // what the looking lane alone knows, or null
  const uint8_t *stores;  // a strong store by `instruction`: which instructions are stores; or null
  int64_t instruction;
  const Agent *issuer;  // of an asynchronous operation of the core's, or null
} Access;
// What is compared: earlier writes, and of a write then earlier reads; the other way round; nothing, it is recorded.
// ACCESS_FREED: as the first, and nothing is known of the places afterwards.
enum { ACCESS_WRITES_FIRST, ACCESS_READS_FIRST, ACCESS_UNCHECKED, ACCESS_FREED };

// Loads or stores through the generic proxy, at any addresses of shared or of global memory.
typedef struct GenericAccess {
  int64_t write, strong, of_global, nbytes, instruction;
  int64_t identity;  // or 0: that of loads or stores of the warp
  int64_t count, lane;  // one for all of them, -1: of the warp; or `each` its own
  int64_t each, mask;
  int64_t addresses[LANES], lanes[LANES];
} GenericAccess;

// What Python is asked while an access is compared and recorded; 0: it goes on.
enum {
  RACE_LATE, RACE_UNFENCED, RACE_UNWRITTEN,  // some earlier accesses are late: words
  RACE_ABROAD,     // whether `identity`, of another cluster or launch, is known by a row of clocks: `answer`
  RACE_LAYER, RACE_FOREIGN, RACE_BYTES, RACE_EPOCHS,  // for more room
  RACE_ELSEWHERE,  // lanes access the shared memory of another CTA
  RACE_STRONG      // an entry of the log may synchronise
};
typedef struct Conflict {
  const Access *access;
  int64_t unit;          // bytes of a place
  int64_t count;
  const int64_t *places, *lanes;  // lane -1: of the warp
  const int32_t *before;          // identities
  const uint8_t *late;
  int64_t wrote;         // these are writes
  const int32_t *known;
  int64_t identity, answer;  // the first of `before` that is late
  const LogEntry *entry;  // that is worked off, or null
} Conflict;

// tcgen05 operations of one thread since its last commit.
struct Stream {
  int64_t column;
  int64_t commits;
  int64_t identity;  // 0: none yet
  int64_t paired;    // that of its latest MMA by a pair of CTAs
};

// A warp as the log of its accesses is worked off.
struct Context {
  Agent *agent;
  Epochs *epochs;
  Shadow *shadow, *tensor;  // of its CTA
  LaunchRegions *launch;
  int64_t cluster;
  Shadow **all_shared;  // of every CTA of the cluster
  int32_t (*ask)(int32_t what, Conflict *conflict);  // nonzero: Python has raised
};

// What the core logs: accesses of lanes. One that all lanes of the mask make together, with one address and one result,
// has LOG_TOGETHER in its kind. The argument is the bytes of an access, and of a strong one its strength; of a load of
// tensor memory the columns, with the first cell and the index of the instruction for addresses.
enum {
  LOG_SHARED_READ = 16, LOG_SHARED_WRITE = 32, LOG_GLOBAL_READ = 64, LOG_GLOBAL_WRITE = 128, LOG_TENSOR_LOAD = 256,
  LOG_TOGETHER = 512, LOG_STRONG = 1024,
  // A strength: the orders with which an access acquires and releases, plus one, in two fields; 0: in neither way.
  STRENGTH_ACQUIRE = 8, STRENGTH_RELEASE = 12, STRENGTH_FIELD = 15
};
struct LogEntry {
  int32_t kind;
  uint32_t mask;
  int32_t argument, instruction;
  int64_t addresses[LANES];
  int64_t steps;  // of the warp, see `WarpHeader`
  // Of a store that leaves memory as it was: bytes of what the first lane stores; 0 of any other.
  int64_t kept;
  uint8_t value[8];
};
