// Sums of products as tensor cores compute them (docs/emulator/arithmetic.md says who measured it).
//
// A step is a number of bytes of K. The exact products of a step and D are aligned to the largest exponent among them,
// cut there to `fraction` bits behind the point, toward zero, and added exactly. The sum is cut to FP32 with `result`
// bits behind the point, toward zero, or rounded to FP16, to nearest even; the next step adds to that.
//
// A product's exponent is the sum of its factors' encoded exponents. With the quantum q = 2^(largest - fraction), a
// number M whose last digit is q, and rounding toward zero, M + x is M and the multiple of q below x: magnitudes are
// added to M, those of positive terms to one and those of negative terms to another one.
#include <fenv.h>
#include <math.h>

#include "integer_sums.h"
#include "products.h"

enum {
  WIDE_ROWS = 2,
  NARROW_ROWS = VECTOR == 64 ? 4 : 2,
  MOST_BLOCK_ROWS = 4,
  MOST_NARROW_FRACTION = 14,  // 33 terms of less than 2^(14 + 2) do not change the exponent of M
  LARGEST_NARROW = 110,       // exponent with which M is a number of FP32
  FINITE = 120,               // and with which sums are
  MOST_TERM = 256,
  LANES_OF_16 = VECTOR / 2,
};

typedef struct Sums {
  const Mma *mma;
  uint32_t *cells;
  const Terms *a, *b;
  int k, first, last;  // elements of K: of all steps, and of this one
  int halves, accumulate, specials;  // specials: operands have NaN or infinities
  int spare;  // by which the exponent of a product may be below the largest one without being cut
  int32_t (*tops)[TENSOR_LANES];  // largest exponents of the products of a block's rows
} Sums;

static _Thread_local Terms terms_a, terms_b;

// B of all CTAs, and A of one.
static void load_all_terms(const Mma *mma, int64_t part, int narrow) {
  int64_t columns = mma->n / mma->ctas;
  for (int64_t r = 0; r < mma->ctas; r++)
    load_terms(&terms_b, &mma->parts[r].b, columns, r * columns, &mma->b, 0, narrow);
  load_terms(&terms_a, &mma->parts[part].a, mma->m, 0, &mma->a, 1, narrow);
}

static int has_special(const Terms *terms, int64_t rows) {
  int32_t found = 0;
  for (int64_t i = 0; i < rows; i++) found |= terms->special[i];
  return found != 0;
}

// --- one result ------------------------------------------------------------------------------------------------------

static inline uint32_t result_bits(const Sums *s, double sum) {
  if (s->halves) {
    uint32_t bits = half_bits(sum);
    return bits == 0x8000 ? 0 : bits;
  }
  if (sum != sum) return 0x7FFFFFFF;
  float value = fabs(sum) >= 0x1p128 ? (sum < 0 ? -HUGE_VALF : HUGE_VALF) : (float)sum;
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  bits &= ~0u << (23 - s->mma->result);
  return bits << 1 ? bits : 0;
}

// For NaN, infinities, and what the vectors below have no room for.
static __attribute__((noinline)) uint32_t one_result(const Sums *s, int64_t row, int64_t lane, const uint32_t *cell) {
  const float *x = s->a->values + s->k * lane, *y = s->b->values + s->k * row;
  double old = 0, plain;
  if (s->accumulate && s->halves) {
    HalfBits bits = (HalfBits){0} + *cell;
    old = values_of_halves(bits)[0];
  } else if (s->accumulate) {
    float value;
    memcpy(&value, cell, sizeof value);
    old = value;
  }
  plain = old;
  int lowest = s->halves ? -14 : -126, top = (int)s->mma->lowest;
  if (old != 0) top = old == old && fabs(old) < HUGE_VAL && ilogb(old) > lowest ? ilogb(old) : lowest;
  for (int i = s->first; i < s->last; i++) {
    int exponent = s->a->exponents[TENSOR_LANES * i + lane] + s->b->exponents[s->k * row + i];
    top = exponent > top ? exponent : top;
    plain += (double)x[i] * y[i];
  }
  if (!isfinite(plain)) return result_bits(s, plain);  // no finite products are that large
  double quantum = power(top - (int)s->mma->fraction), units = 1 / quantum;
  int64_t sum = (int64_t)(old * units);
  for (int i = s->first; i < s->last; i++) sum += (int64_t)((double)x[i] * y[i] * units);
  return result_bits(s, (double)sum * quantum);
}

// --- blocks of results -----------------------------------------------------------------------------------------------

// Largest exponents of products, of some rows of B with LANES_OF_16 rows of A.
static inline void find_tops(const Sums *s, int64_t row, int rows, int64_t lane) {
  const int16_t *a = s->a->exponents + lane, *b = s->b->exponents + s->k * row;
  Int16s most[MOST_BLOCK_ROWS];
  UNROLLED for (int r = 0; r < rows; r++) most[r] = (Int16s){0} + 2 * NO_EXPONENT;
  for (int i = s->first; i < s->last; i++) {
    Int16s left = *(const Int16s *)(a + TENSOR_LANES * i);
    UNROLLED for (int r = 0; r < rows; r++) most[r] = larger(most[r], left + b[s->k * r + i]);
  }
  UNROLLED for (int r = 0; r < rows; r++)
    for (int i = 0; i < LANES_OF_16; i++) s->tops[r][lane + i] = most[r][i];
}

static inline Bits narrow_bits(Floats sum) { return (Bits)sum; }

static inline Floats narrow_halves(Bits cells) {
  return (Floats)((cells & 0x7FFF) << 13) * 0x1p112f * (Floats)((cells & 0x8000) << 16 | 0x3F800000);
}

static inline HalfBits half_bits_of_wide(Doubles sum) { return __builtin_convertvector(halves_of(sum), HalfBits); }

static inline Bits half_bits_of_narrow(Floats sum) {
  HalfFloats parts[2];
  HalfBits results[2];
  Bits joined;
  memcpy(parts, &sum, sizeof parts);
  for (int i = 0; i < 2; i++) results[i] = half_bits_of_wide(doubles_of(parts[i]));
  memcpy(&joined, results, sizeof joined);
  return joined;
}

#define BLOCK_OF(name) wide_##name
#define BLOCK_ROWS WIDE_ROWS
#define BLOCK_VECTORS WIDE_VECTORS_OF_TERMS
#define BLOCK_LANES DOUBLES
#define Real double
#define Reals Doubles
#define Words Longs
#define CellInts HalfInts
#define CellBits HalfBits
#define DIGITS 52
#define BIAS 1023
#define LARGEST 1000
#define product_added add_product
#define of_halves values_of_halves
#define of_floats(cells) doubles_of((HalfFloats)(cells))
#define to_halves half_bits_of_wide
#define to_floats wide_bits
#define to_finite(sum) ((HalfBits)floats_of(sum))
#define any_of any_half
#include "aligned_block.h"

#define BLOCK_OF(name) narrow_##name
#define BLOCK_ROWS NARROW_ROWS
#define BLOCK_VECTORS NARROW_VECTORS_OF_TERMS
#define BLOCK_LANES WORDS
#define Real float
#define Reals Floats
#define Words Ints
#define CellInts Ints
#define CellBits Bits
#define DIGITS 23
#define BIAS 127
#define LARGEST LARGEST_NARROW
#define product_added add_small_product
#define of_halves narrow_halves
#define of_floats(cells) ((Floats)(cells))
#define to_halves half_bits_of_narrow
#define to_floats narrow_bits
#define to_finite narrow_bits
#define any_of any
#include "aligned_block.h"

// --- instructions ----------------------------------------------------------------------------------------------------

// Kept apart, so that the rounding mode is set before the first operation and until after the last one.
static __attribute__((noinline)) void add_steps(Sums *s, int narrow) {
  int64_t step = s->mma->step * s->k / K_BYTES;
  for (s->first = 0; s->first < s->k; s->first = s->last, s->accumulate = 1) {
    s->last = s->first + (int)step;
    if (narrow) narrow_product(s);
    else wide_product(s);
  }
}

void multiply_aligned(const Mma *mma) {
  static _Thread_local int32_t tops[MOST_BLOCK_ROWS][TENSOR_LANES];
  int narrow = mma->fraction <= MOST_NARROW_FRACTION && is_byte_float(mma->a.element) && is_byte_float(mma->b.element);
  int mode = fegetround(), small = load_integers(mma);
  for (int64_t r = 0; r < mma->ctas; r++) {
    if (small && add_integers_aligned(mma, r)) continue;
    Sums sums = {
      .mma = mma, .cells = mma->parts[r].cells, .a = &terms_a, .b = &terms_b, .k = elements(mma->a.element),
      .halves = mma->d == SUM_F16, .accumulate = mma->accumulate != 0, .tops = tops,
      .spare = (int)mma->fraction - digits_of(mma->a.element) - digits_of(mma->b.element),
    };
    load_all_terms(mma, r, narrow);
    sums.specials = has_special(&terms_a, mma->m) | has_special(&terms_b, mma->n);
    fesetround(FE_TOWARDZERO);
    add_steps(&sums, narrow);
    fesetround(mode);
  }
}

// --- FP8 as FP16 -----------------------------------------------------------------------------------------------------

enum { HALVES = 2, PAIR = 2, HALF_K = K_BYTES / HALVES };

// Half `half` of K: of every four elements the lower two, or the upper two.
static void take_half(uint16_t (*to)[HALF_K], uint16_t (*from)[K_BYTES], int64_t rows, int half) {
  for (int64_t i = 0; i < rows; i++)
    for (int j = 0; j < HALF_K; j += PAIR) memcpy(to[i] + j, from[i] + HALVES * j + PAIR * half, sizeof *to[i] * PAIR);
}

// Adds D of `mma` to sums [n][m], to nearest even. A sum of FP32 is rounded twice, which is as once: 53 >= 2 * 24 + 2
// (Figueroa, "When is double rounding innocuous?", 1995).
static void add_sums(const Mma *mma, const uint32_t *sums) {
  int halves = mma->d == SUM_F16;
  for (int64_t j = 0; j < mma->n; j++)
    for (int64_t i = 0; i < mma->m; i += DOUBLES) {
      uint32_t *cells = row_of(mma, mma->parts[0].cells, j) + lane_offset(mma, i);
      Doubles sum = old_values(cells, halves, mma->accumulate != 0) + old_values(sums + j * mma->m + i, halves, 1);
      if (halves) {
        *(HalfBits *)cells = __builtin_convertvector(halves_of(sum), HalfBits);
        continue;
      }
      HalfBits nan = (HalfBits)__builtin_convertvector(sum != sum, HalfInts);
      *(HalfBits *)cells = ((HalfBits)floats_of(sum) & ~nan) | (nan & INT32_MAX);
    }
}

void multiply_split(const Mma *mma) {
  uint16_t a[MMA_SYNC_ROWS][K_BYTES], b[MMA_SYNC_COLUMNS][K_BYTES];
  uint16_t half_a[MMA_SYNC_ROWS][HALF_K], half_b[MMA_SYNC_COLUMNS][HALF_K];
  _Alignas(64) uint32_t sums[MMA_SYNC_COLUMNS * MMA_SYNC_ROWS];
  int64_t places[MMA_SYNC_ROWS * 2];
  for (int i = 0; i < MMA_SYNC_ROWS * 2; i++) places[i] = i;
  load_halves(a, &mma->parts[0].a, mma->m, &mma->a);
  load_halves(b, &mma->parts[0].b, mma->n, &mma->b);
  Mma product = *mma;
  product.a = (MmaType){F16, mma->a.negated, 16}, product.b = (MmaType){F16, mma->b.negated, 16};
  product.column_stride = mma->m, product.wrap = mma->n, product.group_stride = LANE_GROUP;
  product.parts[0] = (MmaPart){{(uint8_t *)half_a, NULL, places}, {(uint8_t *)half_b, NULL, places}, sums};
  for (int half = 0; half < HALVES; half++) {
    take_half(half_a, a, mma->m, half);
    take_half(half_b, b, mma->n, half);
    product.accumulate = half;
    multiply_aligned(&product);
  }
  add_sums(mma, sums);
}
