// Structures of bulk copies that C shares with Python. state.h includes them; see there what layout.py understands.
#pragma once

// A tensor map as copies need it, which Python decodes. Dimensions that it lacks have extent 1. `group`: bytes of global
// memory that 16 bytes of shared memory hold. A row is what lies side by side of a box; in im2col mode, a pixel.
enum { MAPS = 16, NO_MAP = -1, RANKS = 5, SPATIAL = 3, CONTENT_WORDS = 8 };
struct TensorMap {
  int64_t key;                     // address of the map in the kernel, or NO_MAP
  const uint8_t *host;             // and where its bytes are
  int64_t content[CONTENT_WORDS];  // those of its bytes that were decoded
  int64_t im2col, rank, bits, base;
  int64_t extents[RANKS], strides[RANKS], steps[RANKS];  // strides in bytes, that of the innermost is not used
  int64_t tile[RANKS];                     // tiled mode: elements per dimension that a copy moves
  int64_t lower[SPATIAL], sizes[SPATIAL];  // im2col mode: the bounding box
  int64_t rows, row_bytes, box_bytes;      // in global memory
  int64_t group, shared_bytes, pitch, contiguous;  // rows in shared memory, which may lie side by side
  int64_t shift, mask;           // of the swizzle
  int64_t not_a_number, rounds;  // what is out of bounds reads as NaN; FP32 is rounded to TF32
  int64_t stores, reductions;    // whether there are stores; mask of the reductions
  int64_t changes;               // with detectors: whether the kernel may change it
};

// A copy. Its kind; whether it goes through a tensor map, of so many dimensions; its mode, and whether its mbarrier may be
// that of the other CTA of a pair; a reduction or 0, and the type of its elements: numbers that Python knows.
enum { BULK_LOAD, BULK_SEND, BULK_STORE };  // global to shared memory, between CTAs, shared to global memory
// Modes through a map: .im2col, the same along W alone, of 128 pixels too, .tile::gather4 or .tile::scatter4.
enum { MODE_TILED, MODE_PIXELS, MODE_W, MODE_W_128, MODE_FOURS };
typedef struct BulkCopy {
  Work work;
  int64_t kind, rank;
  // Bytes; address in shared memory (of a load or send, of the target), and of the mbarrier; a store: whose.
  int64_t nbytes, shared, signal;
  BulkThread *thread;
  int64_t mode, pair, reduction, type;
  // Address of the tensor map, in global memory, or a send's source; of a load the CTAs that get it, of a store which of 16
  // bytes are written, -1: one, or all.
  int64_t other, mask;
  int64_t coordinates[RANKS], offsets[SPATIAL];
  int64_t halo;  // along W: how many pixels more follow
  int64_t lane;
  TensorMap map;
  int64_t group;       // a store: which of its thread
  uint8_t *box;        // what it has read
  Epochs *epochs;      // with detectors
  int64_t identity, width;         // width: of what is known to be over when it is complete
  int64_t map_column, map_clock;   // of its read of a map that may change; column -1: there is none
  int32_t order[];
} BulkCopy;
// Rules that a copy breaks. Those of SOURCE_.. and so on: it is not aligned; it is beyond all memory.
enum {
  RULE_MODE, RULE_RANK, RULE_NEGATIVE, RULE_CORNER, RULE_OFFSETS, RULE_BOX, RULE_FIRST, RULE_UNIT, RULE_SHARED,
  RULE_LOADS_ONLY, RULE_REDUCTION, RULE_SIGNAL, RULE_MASK, RULE_FOURS, RULE_HALO, RULE_HALO_128, RULE_BEHIND,
  RULE_SWIZZLE, RULE_SOURCE, RULE_SOURCE_BEYOND, RULE_TARGET, RULE_TARGET_BEYOND, RULE_SIZE
};

// Names of copies for reports, found from `key_slot` of the key on: numbers of texts that Python has made. The key: kind
// and whether there is a map, bytes, shared address, mbarrier, warp.
enum { NAMES = 2048, MOST_NAMES = 1536, NAME_KEY = 5 };
typedef struct CopyName { int64_t key[NAME_KEY], text; } CopyName;
