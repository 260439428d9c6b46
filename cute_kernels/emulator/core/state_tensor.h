// Structures of tcgen05.mma that C shares with Python. state.h includes them; see there what layout.py understands.
#pragma once

// What an instruction descriptor of a dense kind says (PTX ISA, "Instruction descriptor"). Elements by their numbers, m
// and n of both CTAs together, d one of SUM_F32, SUM_F16 and SUM_S32.
typedef struct MmaFields {
  int64_t m, n, a, b, negate_a, negate_b, a_mn_major, b_mn_major, d, saturate;
} MmaFields;
// What is wrong with one, the first of these; 0: nothing.
enum {
  MMA_BITS = 1, MMA_D_TYPE = 2, MMA_A_TYPE = 3, MMA_B_TYPE = 4, MMA_BF16 = 5, MMA_A_MAJOR = 6, MMA_B_MAJOR = 7,
  MMA_SHAPE = 8
};

// A dense kind of tcgen05.mma: the element type of each code of a descriptor and the type of D of each, or NO_TYPE; how
// sums are made for each type of D (see Mma), `fraction` UNKNOWN_SUMS where that is not known.
enum { TYPE_CODES = 8, D_CODES = 4, NO_TYPE = -1, UNKNOWN_SUMS = -1, D_TYPES = 3 };
typedef struct MmaSums { int64_t fraction, result, step, lowest; } MmaSums;
typedef struct MmaKind {
  int64_t elements[TYPE_CODES];
  int64_t d[D_CODES];
  MmaSums sums[D_TYPES];
} MmaKind;

// Rows of an operand of a product that scaled_sums.c computes: `values` and `exponents` (encoded ones; of zeros one below
// all others) [rows][k], scales and exponents of the `blocks` of each row.
typedef struct ScaledOperand {
  const double *values;
  const int32_t *exponents;
  const double *scales;
  const int32_t *scale_exponents;
} ScaledOperand;
// d[m][n] = c[m][n] + sums over k, of which `group` products are one term; `fraction` and `lowest` as of Mma;
// lowest_of_c: the exponent of C's subnormal numbers.
typedef struct ScaledProduct {
  int64_t m, n, k, blocks, group, fraction, lowest, lowest_of_c;
  ScaledOperand a, b;
  const double *c;
  double *d;
} ScaledProduct;

// A matrix in shared memory, offsets in bytes (PTX ISA, "Shared memory descriptor"). The swizzles are in this order.
enum { SWIZZLE_NONE, SWIZZLE_32B, SWIZZLE_64B, SWIZZLE_128B, SWIZZLE_128B_ATOM32B };
typedef struct Matrix { int64_t address, leading, stride, swizzle; } Matrix;
// What is wrong with a descriptor, the first of these; 0: nothing.
enum { MATRIX_MODE = 1, MATRIX_CONSTANT = 2, MATRIX_BITS = 3, MATRIX_START = 4, MATRIX_BASE = 5 };
// How the K_BYTES of each row of an operand lie in it.
typedef struct MatrixRows { int64_t rows, element_bytes, mn_major; } MatrixRows;

// A thread that issues tcgen05.mma and tcgen05.commit: the label of its arrivals plus one, 0: not made yet; with detectors,
// its stream, and what reports call its MMAs of a kind and a group (`form`).
struct TensorThread {
  int64_t label;
  Stream *stream;
  int64_t form, text;
};

// Tensor memory of a CTA: cells [TENSOR_COLUMNS][TENSOR_LANES]; of each column a byte, 1 where it is allocated, and where
// an access has written all lanes; of each cell a byte, 1 where it is written.
typedef struct TensorCells {
  uint32_t *cells;
  const uint8_t *allocated;
  uint8_t *full, *written;
  Shadow *shadow;  // with detectors
  int64_t own_lanes;  // whether a warp that names others than those of its quarter is refused
} TensorCells;

// tcgen05.ld or st of a warp: shape, repetitions, columns from the first half to the second (SHAPE_HALVES), whether the
// lower halves of two columns are one register, the first cell; `count` registers, rows of LANES words.
enum { SHAPE_32X32B, SHAPE_16X64B, SHAPE_16X128B, SHAPE_16X256B, SHAPE_HALVES };
typedef struct TensorAccess {
  int64_t write, shape, repeat, split, pack, lane, column, count;
  uint8_t *registers[TENSOR_LANES];
} TensorAccess;
