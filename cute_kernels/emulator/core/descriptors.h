// Operands of tensor cores in shared memory, for those who multiply them.
#pragma once
#include "core.h"

// Elements of less than eight bits.
static inline int is_narrow(int64_t element) { return element > U8; }

// Where an operand lies: `places` as of MmaOperand; the bytes from `low` up to `high`; `count` pieces of `nbytes` at
// `starts`, which together are all of it.
typedef struct SharedOperand {
  const int64_t *places, *starts;
  int64_t count, nbytes, low, high;
} SharedOperand;

// Its arrays are good until this thread makes room. 0: it lies beyond all shared memory, and has no pieces.
int shared_operand(const Matrix *matrix, const MatrixRows *rows, SharedOperand *operand);
// For two more operands, of which this may forget all others.
void operands_make_room(void);
