// Operands of a matrix product as `matrix.c` multiplies them.
#ifndef CUTE_KERNELS_MATRIX_H
#define CUTE_KERNELS_MATRIX_H
#include "core.h"

enum { MOST_ROWS = 256, MOST_K = 32, PAIRS = K_BYTES / 2 };

// One operand. Rows of B lie one behind the other: [rows][k]. Those of A lie side by side, in columns of TENSOR_LANES.
typedef struct Operand {
  _Alignas(64) int16_t pairs[MOST_ROWS * MOST_K];  // small integers; A: [PAIRS][TENSOR_LANES][2]
  _Alignas(64) double values[MOST_ROWS * MOST_K];  // A: [k][TENSOR_LANES]
  double largest[MOST_ROWS];                       // finite magnitude of each row of `values`
  uint32_t lowest;                                 // bits of FP32: of `values`, all are multiples of it
  int64_t most;                                    // magnitude among `pairs`; beyond MOST_SMALL they are not right
} Operand;
enum { MOST_SMALL = 32767 };

// Elements of K_BYTES.
static inline int elements(int64_t type) { return type == TF32 ? 8 : type == F16 || type == BF16 ? 16 : 32; }

// Whether `pairs` can hold its values: integers, and E4M3 in units of 2^-9 up to 60.
static inline int is_small(int64_t type) { return type == E4M3 || type == S8 || type == U8; }

int initialised(const MmaOperand *from, int64_t rows, int64_t unit);
// Reads rows and puts them behind the first ones; `side_by_side`: as A.
void load_small(
    Operand *to, const MmaOperand *from, int64_t rows, int64_t first, const MmaType *type, int side_by_side);
void load_values(
    Operand *to, const MmaOperand *from, int64_t rows, int64_t first, const MmaType *type, int side_by_side);

#endif
