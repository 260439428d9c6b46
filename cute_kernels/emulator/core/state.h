// Every structure and constant that C shares with Python and with the machine code of kernels.
//
// layout.py reads this file and makes ctypes classes of it; the build compares sizes and offsets with the compiler's. It
// understands comments, `enum { NAME = integer }`, and `typedef struct Name { ... } Name;` with members of the types of
// <stdint.h> or of earlier structures, pointers, pointers to functions, and arrays of constant length (the last member of
// a structure may be an array of no length).
#ifndef CUTE_KERNELS_STATE_H
#define CUTE_KERNELS_STATE_H
#include <stdint.h>

typedef struct Tables Tables;
typedef struct Point Point;
typedef struct Stream Stream;
typedef struct Watched Watched;
typedef struct Commit Commit;

// An mbarrier of a cluster (PTX ISA, "mbarrier"), on a cache line of its own.
enum {
  MAX_COUNT = 1048575,  // valid range of expected, pending and transaction counts
  BARRIERS = 1024       // of a cluster that are found by their address; others work too
};
typedef struct Barrier {
  int64_t phase;     // completed phases
  int64_t expected;  // arrivals that each phase needs
  int64_t pending;   // arrivals that the current phase still needs
  int64_t tx;        // bytes that it still waits for; negative when they came before expect_tx
  int64_t arriver;   // who arrived last: the number of a label plus one, or 0 where Python knows
  Point *point;      // with detectors, what the race detector knows of it
  int64_t unused[2];
} Barrier;

// Shared memory of a CTA. A shared address is the CTA's rank << RANK_SHIFT and an offset.
enum { RANK_SHIFT = 24, OFFSET_MASK = 16777215 };
typedef struct Cta {
  uint8_t *data;
  uint8_t *states;  // of every byte: uninitialised, data, of an mbarrier
  int64_t size;     // bytes
  int16_t *slots;   // of every 8 bytes: the number of the mbarrier there plus one, or 0
  void *shadow;     // with detectors, address of its shadow memory (`shadow.SHADOW_WORDS`)
} Cta;

// Registered global memory.
typedef struct Region { int64_t start, end, writable; } Region;

// A tensor map as copies need it. Dimensions that it lacks have extent 1.
enum { PLANS = 16, NO_MAP = -1, RANKS = 5, CONTENT_WORDS = 8 };
typedef struct Plan {
  int64_t key;                     // address of the map in the kernel
  int64_t *host;                   // and where its bytes are
  int64_t content[CONTENT_WORDS];  // those of its bytes that were decoded
  int64_t rank, element, row_bytes, box_bytes, base, shift, mask;
  int64_t loads, stores;   // whether machine code may execute them
  int64_t strides[RANKS];  // of every dimension; that of the innermost is not used
  int64_t tile[RANKS], extents[RANKS];
  int64_t rows, pitch;  // of a box that is rows at one pitch; 0 rows for others
} Plan;

// Operands of a tensor copy as the machine code of a warp stores them.
typedef struct CopyArguments {
  int64_t map, shared, barrier;
  int64_t coordinates[RANKS];
  int64_t warp, lane, instruction;  // who issues it; with detectors only
} CopyArguments;

// MMAs that are kept, each in the entry that `key_slot` says. The key: CTA group, who issues (CTA rank, lane, warp),
// accumulator, descriptors of A and B, instruction descriptor, whether it accumulates, 0.
enum { MMAS = 1024, MMA_KEY = 8 };
typedef struct MmaEntry {
  int64_t key[MMA_KEY];
  void *job;         // what `execute` of the tables is given; null: for Python
  Watched *watched;  // what tells the race detector of it, or null
} MmaEntry;

// tcgen05.commit that are kept, likewise. The key: who, mbarrier, multicast mask or -1.
enum { COMMITS = 256, COMMIT_KEY = 3 };
typedef struct CommitEntry {
  int64_t key[COMMIT_KEY];
  int64_t label;   // number of the label of who arrives, plus one; 0: for Python
  Stream *stream;  // with detectors, of the issuing thread
} CommitEntry;

// Names of copies for the race detector that are kept, likewise. The key: bytes, shared address, mbarrier or -1, warp.
enum { TEXTS = 1024, TEXT_KEY = 4 };
typedef struct TextEntry {
  int64_t key[TEXT_KEY];
  int64_t text;
} TextEntry;

// What a tcgen05.commit is about to do: its mbarriers, their phases, and whether these complete.
enum { MOST_TARGETS = 16 };
typedef struct CommitTarget {
  Point *point;
  int64_t phase, completes;
} CommitTarget;
typedef struct Commit {
  Stream *stream;
  int64_t lane, count;
  CommitTarget targets[MOST_TARGETS];
} Commit;

// What machine code knows of one cluster.
enum {
  STATES = 1, CALL = 2,               // Tables.flags: bytes have states; accesses are for Python
  WAITS = 1, EAGER = 2, WATCHED = 4   // Tables.unit_flags: waits succeed whenever they can; asynchronous work takes
};                                    // effect when it is issued; there are detectors
typedef struct Tables {
  int64_t ranks;  // CTAs
  int64_t flags;
  int64_t progress;  // counts whatever another warp may wait for
  int64_t regions;
  Region *region_table;
  uint8_t *params;
  uint8_t *log;  // what the race detector has not seen yet, entries in use and in all
  int64_t log_used, log_size;
  int64_t unit_flags;
  Barrier *barriers;
  int64_t completions, loaded, stored, mmas;  // phases, bytes of tensor copies, MMAs: since Python looked
  Plan *plans;
  MmaEntry *mma_entries;
  int32_t (*execute)(void *job);  // 1 if done
  // What the machine code of warps calls; 0: nothing is done, Python has to do it.
  int32_t (*mbarrier_passed)(Tables *t, int64_t address, int32_t parity, int64_t order);
  int64_t (*mbarrier_arrive)(Tables *t, int64_t address, int64_t count, int64_t nbytes, int64_t arriver, int32_t mask, int64_t order);
  int32_t (*tensor_load)(Tables *t, const CopyArguments *copy, int32_t rank, int32_t pair);
  int32_t (*tensor_store)(Tables *t, const CopyArguments *copy, int32_t rank);
  int32_t (*tensor_mma)(Tables *t, const int64_t *key, int32_t instruction);
  int32_t (*tensor_commit)(Tables *t, int64_t who, int64_t address, int64_t multicast);
  int32_t (*bulk_commit)(Tables *t, int32_t mask);
  int32_t (*bulk_wait)(Tables *t, int32_t mask, int64_t newest, int32_t read);
  int64_t log_done;  // entries that are worked off
  void *context;     // of the warp that runs (`native_memory.CONTEXT_WORDS`)
  int64_t (*observe)(void *context, uint8_t *log, int64_t first, int64_t end);
  // What tells the race detector of what a unit is about to do; 0: nothing is done, Python has to do it.
  int32_t (*watch_load)(Tables *t, void *copy);
  int32_t (*watch_store)(Tables *t, void *copy);
  int32_t (*watch_mma)(Tables *t, Watched *watched, int32_t instruction);
  int32_t (*watch_wait)(Tables *t, Point *point, int64_t order, int64_t phase);
  int32_t (*watch_arrive)(Tables *t, Point *point, int32_t mask, int64_t order, int64_t rank, int64_t phase, int32_t completes);
  int32_t (*watch_commit)(Tables *t, Commit *commit);
  TextEntry *texts;
  CommitEntry *commit_entries;
  Cta ctas[];
} Tables;

#endif
