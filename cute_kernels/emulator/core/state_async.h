// Structures of asynchronous work that C shares with Python. state.h includes them; see there what layout.py understands.
#pragma once

typedef struct Work Work;
typedef struct LaneCopies LaneCopies;

// One asynchronous operation: the record begins with this, its operands follow, first those of which its name is made
// (EVENT_VALUES words in all). Kinds; a function of Python performs the first.
enum {
  WORK_PYTHON, WORK_LANE_COPY, WORK_COPIES_ARRIVE, WORK_TENSOR_COMMIT, WORK_BULK_LOAD, WORK_BULK_READ, WORK_BULK_WRITE,
  WORK_WGMMA, WORK_TENSOR_MMA
};
// That of the tcgen05 pipe of CTA n: TENSOR_QUEUE - n; of warpgroup n: WGMMA_QUEUE - n; of a store after n other
// operations: STORE_QUEUE - n.
enum { NO_QUEUE = 0, TENSOR_QUEUE = -1, WGMMA_QUEUE = -64, STORE_QUEUE = -1024 };
struct Work {
  int64_t kind;
  int64_t queue;   // operations of one queue take effect in their order; NO_QUEUE: nothing is ordered with it
  int64_t yields;  // it comes after all that does not, unless times are drawn
  int64_t number;  // of the cluster's operations
  int64_t place, warp;  // that issued it: instruction, and number of the warp
  Work *next;           // of its queue
};
typedef struct WorkQueue { int64_t key; Work *first, *last; } WorkQueue;

// Asynchronous work of a cluster.
struct WorkQueues {
  int64_t eager;             // it takes effect when it is issued
  int64_t issued, executed;  // operations
  int64_t count, room;       // queues
  WorkQueue *queues;         // that are not empty, in the order of becoming so
  Work *running;             // that had to wait and takes effect now, or null
  Work *held;                // that is not issued yet: something has to be complete first
  int32_t (*run)(int64_t number);  // Python performs an operation of its own; 0: go on
  Tables *tables;
};

// cp.async of a warp: copies are counted by instructions. Of group n, in entry n % COPY_GROUPS, how many up to its end.
enum { COPY_GROUPS = 64 };
struct LaneCopies {
  int64_t issued, groups;
  int64_t column, text;  // with detectors, of the copies, and what reports call them
  int64_t ends[COPY_GROUPS];
  int64_t committed[LANES];  // groups, by each lane
  int64_t labels[LANES];     // of arrivals by each lane, plus one; 0: not made yet
};

// cp.async of one instruction: by lane, the shared address, the global one, bytes that are read, and its group.
typedef struct LaneCopy {
  Work work;
  LaneCopies *copies;
  int64_t number;  // of the warp's copies
  int64_t lanes, nbytes;
  int64_t targets[LANES], sources[LANES], counts[LANES], groups[LANES];
} LaneCopy;

// cp.async.mbarrier.arrive of one lane; with detectors, clocks of what it passes on follow.
typedef struct CopiesArrival {
  Work work;
  const LaneCopies *copies;
  int64_t barrier, lane, label;
  int64_t behind, left;  // it is behind so many copies of the warp, and waits for so many of them
  int64_t rank, width;   // of its CTA, and of the clocks
} CopiesArrival;

// tcgen05.mma of a kind: those of `mma_kinds`, then, with block scaling, those that Python knows. Operands are addresses in
// tensor memory and descriptors; of each row so many scales, or none. `disabled`: lanes of D that are left out.
enum { MOST_DISABLED = 8 };
typedef struct TensorMma {
  Work work;
  int64_t kind, group;
  int64_t rank, lane;  // of the issuing CTA
  MmaFields fields;    // of the instruction descriptor
  int64_t a_in_tensor, scales;
  int64_t d, a, b, instruction, accumulate, scale_a, scale_b;
  int64_t disabled[MOST_DISABLED];
} TensorMma;
// Rules that one breaks: lanes of D are left out; the odd CTA of a pair issues it; its instruction descriptor is illegal;
// there is no CTA `given`; A cannot be in tensor memory so. Of A (`given` 0) or B (1): the matrix descriptor is illegal,
// its swizzle does not go with the elements, it leaves the shared memory of the CTA `place`, its scales are not in lane 0.
enum { MMA_LANES, MMA_ODD, MMA_INSTRUCTION, MMA_NO_CTA, MMA_A, MMA_MATRIX, MMA_SWIZZLE, MMA_OUTSIDE, MMA_SCALES };

// tcgen05.commit; with detectors, clocks of what it passes on follow.
typedef struct TensorCommit {
  Work work;
  int64_t label, rank, width;  // width of the clocks
  int64_t column, clock;       // the stream that it ends, and how many commits that has by then
  int64_t count, targets[MOST_TARGETS];
} TensorCommit;
