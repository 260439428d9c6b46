// Operands of a matrix product as `matrix.c` multiplies them.
#pragma once
#include "core.h"
#include "vectors.h"

enum { MOST_ROWS = 256, MOST_K = 32, PAIRS = K_BYTES / 2 };

// One operand. Rows of B lie one behind the other: [rows][k]. Those of A lie side by side, in columns of TENSOR_LANES.
typedef struct Operand {
  _Alignas(64) int16_t pairs[MOST_ROWS * MOST_K];  // small integers; A: [PAIRS][TENSOR_LANES][2]
  _Alignas(64) double values[MOST_ROWS * MOST_K];  // A: [k][TENSOR_LANES]
  double largest[MOST_ROWS];                       // finite magnitude of each row of `values`
  uint32_t lowest;                                 // bits of FP32: of `values`, all are multiples of it
  int64_t most;                                    // magnitude among `pairs`; beyond MOST_SMALL they are not right
  int64_t digits;                                  // all of them, or'ed: where its last 1 is, no last digit is lower
} Operand;
enum { MOST_SMALL = 32767 };

// Elements of K_BYTES.
static inline int elements(int64_t type) { return type == TF32 ? 8 : type == F16 || type == BF16 ? 16 : 32; }

// Whether `pairs` can hold its values: integers, and E4M3 in units of 2^-9 up to 60.
static inline int is_small(int64_t type) { return type == E4M3 || type == S8 || type == U8; }

// One operand as silicon.c adds its products. A's magnitudes lie in blocks of lanes, each [k][PLANES][lanes]: those of
// positive elements, then those of negative ones, with 0 in the place of the others, then all with their signs. Those
// of B: [rows][k].
enum { PLANES = 3 };
typedef struct Terms {
  _Alignas(64) double wide_sizes[MOST_ROWS * MOST_K * 2];        // magnitudes, where sums have more bits than FP32
  _Alignas(64) float narrow_sizes[MOST_ROWS * MOST_K * 2];       // else
  _Alignas(64) int16_t exponents[MOST_ROWS * MOST_K];   // A: [k][TENSOR_LANES]; B: [rows][k]
  _Alignas(64) float values[MOST_ROWS * MOST_K];        // [rows][k]
  int32_t negative[MOST_ROWS * MOST_K];                 // B: [rows][k], 1 where an element is negative
  int32_t least[MOST_ROWS];    // exponent of a row's elements but zeros
  int32_t special[MOST_ROWS];  // -1: a row with NaN or an infinity, for which the magnitudes have 0
} Terms;
enum { NO_EXPONENT = -16000 };  // of 0, NaN and infinities
enum {
  WIDE_VECTORS_OF_TERMS = VECTOR == 64 ? 4 : 2,
  NARROW_VECTORS_OF_TERMS = 2,
  WIDE_BLOCK = WIDE_VECTORS_OF_TERMS * DOUBLES,  // lanes of a block
  NARROW_BLOCK = NARROW_VECTORS_OF_TERMS * WORDS,
};

// The lowest exponent of a type: subnormal numbers have it too.
static inline int lowest_exponent(int64_t type) {
  return type == E4M3 ? -6 : type == E5M2 || type == F16 ? -14 : -126;
}

// Digits behind the point.
static inline int digits_of(int64_t type) { return type == E4M3 ? 3 : type == E5M2 ? 2 : type == BF16 ? 7 : 10; }

// The exact sum of up to MOST_K + 1 terms, rounded to odd.
double exact_sum(const double *terms, int count);

// Executes an MMA of floats whose sums are those of `fraction` and its neighbours.
void multiply_aligned(const Mma *mma);
// Likewise, of the FP8 of one mma.sync that is `split`.
void multiply_split(const Mma *mma);

static inline int is_byte_float(int64_t type) { return type == E4M3 || type == E5M2; }

int initialised(const MmaOperand *from, int64_t rows, int64_t unit);
// Reads rows and puts them behind the first ones; `side_by_side`: as A.
void load_small(
    Operand *to, const MmaOperand *from, int64_t rows, int64_t first, const MmaType *type, int side_by_side);
void load_codes(uint8_t (*to)[K_BYTES], const MmaOperand *from, int64_t rows, int64_t unit);
// FP16 bits of rows of FP8.
void load_halves(uint16_t (*to)[K_BYTES], const MmaOperand *from, int64_t rows, const MmaType *type);
void load_values(
    Operand *to, const MmaOperand *from, int64_t rows, int64_t first, const MmaType *type, int side_by_side);
// `narrow`: which of the magnitudes are needed.
void load_terms(
    Terms *to, const MmaOperand *from, int64_t rows, int64_t first, const MmaType *type, int side_by_side, int narrow);
