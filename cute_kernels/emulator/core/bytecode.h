// What the parts of the interpreter share: its machine, and the functions that instructions consist of.
#pragma once
#include <string.h>

#include "core.h"
#include "races.h"

typedef uint8_t __attribute__((may_alias)) u8;
typedef uint16_t __attribute__((may_alias)) u16;
typedef uint32_t __attribute__((may_alias)) u32;
typedef uint64_t __attribute__((may_alias)) u64;
typedef int8_t __attribute__((may_alias)) s8;
typedef int16_t __attribute__((may_alias)) s16;
typedef int32_t __attribute__((may_alias)) s32;
typedef int64_t __attribute__((may_alias)) s64;
typedef float __attribute__((may_alias)) f32;
typedef double __attribute__((may_alias)) f64;

// A warp that runs.
typedef struct Machine {
  const Program *program;
  uint8_t *rows;  // of the exchange area
  Tables *tables;
  int32_t (*call)(int32_t site, uint32_t mask);
  uint32_t mask;    // lanes that run
  uint32_t active;  // those of them that a guard lets execute
  int32_t status;   // what the run ends with
} Machine;

// The run ends.
static inline const Instruction *leave(Machine *m, int32_t status) {
  m->status = status;
  return 0;
}

// Executes an instruction and returns the one to execute next; null ends the run.
typedef const Instruction *Run(const Instruction *i, uint8_t *s, Machine *m);

static inline const Instruction *start_of(const Machine *m, int64_t block) {
  return m->program->code + m->program->starts[block];
}

// divergence.c. The running lanes part at a branch: those that it takes, and the others.
const Instruction *part(uint8_t *s, Machine *m, uint32_t taken, int32_t target, int32_t following, int32_t meet);
// They have come to the block where they meet others.
const Instruction *meet_others(uint8_t *s, Machine *m);
// They wait in an instruction of a block, which begins again then; where lanes have parted, others may run meanwhile.
const Instruction *wait_in(uint8_t *s, Machine *m, uint32_t block);

// They are at the beginning of a block, at an instruction that others (`missing`) are to execute together with them.
const Instruction *gather(const Instruction *i, uint8_t *s, Machine *m, uint32_t missing);

static inline int64_t place_of(const Instruction *i) { return i->imm >> 32; }

// Likewise, in such an instruction of the core.
static inline const Instruction *wait_here(
    const Instruction *i, uint8_t *s, Machine *m, int32_t waits, int64_t awaited) {
  WarpHeader *header = (WarpHeader *)s;
  header->waits = waits;
  header->awaited = awaited;
  if (header->parted && m->call(SITE_WAIT, m->active) == ERROR) return leave(m, ERROR);
  return wait_in(s, m, (uint32_t)(i->imm >> 8) & 0xFFFFFF);
}

// Whether execution ends here: Python words a fault and raises it, or answers that it goes on.
#define stops(t, what, ...) ((t)->fault = (Fault){__VA_ARGS__}, (t)->report(what))
#define WHERE(p) ((int64_t)(intptr_t)(p))

// With detectors, what the warp did before is worked off.
static inline int takes_logs(Tables *t) {
  return !t->context || log_flush(t) || !stops(t, TAKE_LOGS);
}

// An item of an instruction's list: where a word is, or a row, and bytes of a lane there; 0: `missing`.
static inline int64_t listed(const uint8_t *s, uint32_t item, int lane, int64_t missing) {
  const uint8_t *at = s + item / LISTED;
  if (!item) return missing;
  switch (item & (LISTED - 1)) {
    case 1: return at[lane];
    case 2: return ((const u16 *)(const void *)at)[lane];
    case 4: return ((const u32 *)(const void *)at)[lane];
    case 8: return ((const s64 *)(const void *)at)[lane];
    default: return *(const s64 *)(const void *)at;
  }
}

// The forms of an operation for values of lanes and for values that all lanes share; null: there is none.
typedef struct Operation {
  const char *name;
  Run *lanes, *uniform;
} Operation;

// Ended by one without a name.
extern const Operation integer_operations[], bit_operations[], float_operations[], double_operations[];
extern const Operation conversion_operations[];
extern const Operation move_operations[], flow_operations[], barrier_operations[];
extern const Operation mbarrier_operations[], together_operations[], bulk_operations[], group_operations[];
extern const Operation memory_operations[], copy_operations[], commit_operations[], tensor_operations[];
extern const Operation wgmma_operations[], register_operations[], warp_mma_operations[], mma_operations[];

// An operation on an mbarrier, as `mbarrier_apply`, at `Tables.place`.
int64_t mbarrier_do(Tables *t, int64_t operation, int64_t address, int64_t amount, int64_t who);
// The same, kept for reports: by which instruction, and by which warp.
int64_t mbarrier_by(
    Tables *t, int64_t operation, int64_t address, int64_t amount, int64_t who, int64_t place, int64_t warp);
// With detectors, a warp that knows a row of order contributes to the current phase of an mbarrier, by itself or by what
// it has issued. 0: that may be counted in the phase before, Python has been told.
int mbarrier_in_time(
    Tables *t, int64_t operation, int64_t address, const int32_t *order, int64_t width, int64_t warp, int64_t place);
// Whether the running warp may use an mbarrier: it knows of the mbarrier.init.
int mbarrier_usable(Tables *t, int64_t operation, int64_t address, const Point *point);

#define AT(type, offset) (*(type *)(s + (offset)))
// Rows of lanes lie on cache lines, or where they are shorter, on multiples of their length.
#define ROW_OF(type, offset) \
  ((type *)__builtin_assume_aligned(s + (offset), LANES * sizeof(type) < 64 ? LANES * sizeof(type) : 64))

// An element of the result depends on the same element of the operands alone, which may be the same row.
#if defined(__clang__)
#define EACH_LANE _Pragma("clang loop vectorize(assume_safety)") for (int lane = 0; lane < LANES; lane++)
#else
#define EACH_LANE _Pragma("GCC ivdep") for (int lane = 0; lane < LANES; lane++)
#endif
