// Structures of wgmma that C shares with Python. state.h includes them; see there what layout.py understands.
#pragma once

// wgmma.mma_async: what an instruction says. Of the parts of `mma` the first; an operation has its own operands.
enum { WGMMA_WARPS = 4, WGMMA_ROWS = 64, WGMMA_MOST_ROWS = 256, WGMMA_MOST_REGISTERS = 128, A_WORDS = 128 };
struct WgmmaForm {
  Mma mma;
  int64_t registers;  // of D, in each thread
  int64_t a_in_registers;
  int64_t operand_bytes;  // in shared memory
  int64_t text;           // with detectors, the number of its name
};

// What one warp contributes: registers of D, as offsets in its state, and of A.
typedef struct WgmmaPart {
  uint8_t *state;
  const uint32_t *registers;
  uint32_t a[A_WORDS];
} WgmmaPart;
typedef struct Wgmma {
  int64_t form, a, b, accumulate;  // a, b: descriptors
  int64_t identity;                // with detectors
  int64_t known;                   // and number of the `WgmmaKnown`
  int64_t clocks[WGMMA_WARPS];     // of each warp its own when it issued it; 0: it has not
  WgmmaPart parts[WGMMA_WARPS];
} Wgmma;

// What warps knew that issued some operations in a row, but for the clocks of these warps themselves.
typedef struct WgmmaKnown {
  int64_t changes[WGMMA_WARPS];  // of each warp, up to where they have what it knew: `Agent.changes`
  int64_t operations;            // that have it, as long as they count
} WgmmaKnown;

// What is read in an accumulator before its wgmma is complete: a NaN that no sum produces.
enum { PENDING = 4294041261 };  // 0xFFF1DEAD
enum { REGISTER_CELL = 64 };    // bytes: registers of 32 lanes begin at multiples of it in a warp's state

// The wgmmas of a warpgroup: operation n is in entry n % room, as long as a warp has to issue it or to wait for it.
enum { WGMMA_GROUPS = 8 };  // that wait_group can tell apart
typedef struct WgmmaWarp {
  int64_t issued, observed;    // operations that it issued, and waited for
  int64_t committed, waited;   // likewise of groups
  int64_t order;               // how many warps have issued an operation, when it issued its first
  int64_t ends[WGMMA_GROUPS];  // of group n in entry n % WGMMA_GROUPS: operations up to its end
  // Where other instructions touch accumulators in flight: of each operation and cell of its state, the result plus one
  // that will be there, 0: none. int16 [room][cells]
  int16_t *held;
} WgmmaWarp;
struct Warpgroup {
  WgmmaWarp warps[WGMMA_WARPS];
  int64_t complete;  // operations
  int64_t room;
  Wgmma *operations;
  int64_t column, width;       // with detectors, its stream and the columns of all clocks
  int64_t bases[WGMMA_WARPS];  // columns of the warps
  int64_t forgotten;           // operations that nobody will ask for any more what warps knew
  WgmmaKnown *known;           // [room]
  int32_t *clocks;             // int32 [room][ROWS][width], of each of these
};

// A wgmma that all its warps have issued.
typedef struct WgmmaWork {
  Work work;
  int64_t warpgroup, form, number;  // of the cluster; of the kernel; of the warpgroup's operations
} WgmmaWork;
