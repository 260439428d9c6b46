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

#include "products.h"

enum {
  WIDE_ROWS = 2,
  NARROW_ROWS = VECTOR == 64 ? 4 : 2,
  MOST_BLOCK_ROWS = 4,
  MOST_NARROW_FRACTION = 15,  // 33 terms of less than 2^(15 + 2) do not change the exponent of M
  LARGEST_NARROW = 110,       // exponent with which M is a number of FP32
  LANES_OF_16 = VECTOR / 2,
  UNCUT_ROWS = VECTOR == 64 ? 8 : 4,
  UNCUT_VECTORS = 2,
  UNCUT_LANES = UNCUT_VECTORS * WORDS,
};

typedef struct Sums {
  const Mma *mma;
  uint32_t *cells;
  const Terms *a, *b;
  int k, first, last;  // elements of K: of all steps, and of this one
  int halves, accumulate;
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

// --- one result ------------------------------------------------------------------------------------------------------

static inline double power(int exponent) {
  uint64_t bits = (uint64_t)(exponent + 1023) << 52;
  double value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

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

// Largest exponents of products, of some rows of B with all of A.
static inline void find_tops(const Sums *s, int64_t row, int rows) {
  const int16_t *a = s->a->exponents, *b = s->b->exponents + s->k * row;
  for (int64_t lane = 0; lane < s->mma->m; lane += LANES_OF_16) {
    Int16s most[MOST_BLOCK_ROWS];
    UNROLLED for (int r = 0; r < rows; r++) most[r] = (Int16s){0} + 2 * NO_EXPONENT;
    for (int i = s->first; i < s->last; i++) {
      Int16s left = *(const Int16s *)(a + TENSOR_LANES * i + lane);
      UNROLLED for (int r = 0; r < rows; r++) most[r] = larger(most[r], left + b[s->k * r + i]);
    }
    UNROLLED for (int r = 0; r < rows; r++)
      for (int i = 0; i < LANES_OF_16; i++) s->tops[r][lane + i] = most[r][i];
  }
}

static inline HalfBits wide_bits(Doubles sum) {
  HalfBits sign = __builtin_convertvector((LongBits)sum >> 32, HalfBits) & 0x80000000;
  Longs size = (Longs)sum & INT64_MAX;
  HalfBits large = (HalfBits)__builtin_convertvector((Longs)((Doubles)size >= 0x1p128), HalfInts);
  return ((HalfBits)floats_of(sum) & ~large) | ((sign | 0x7F800000) & large);
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
#define any_of any
#include "aligned_block.h"

// --- E4M3 whose products are not cut ---------------------------------------------------------------------------------
//
// Products of E4M3 are multiples of 2^-18, and of more if none of the operands has a digit that low. Where the largest
// exponent, D's too, is at most `fraction` above that of their last digits, nothing is cut: the sum is that of integers.
// So are sums of small numbers, and all those of integers that tests compare without a tolerance.

static _Thread_local Operand small_a, small_b;

typedef struct Uncut {
  int shift;            // integers are added in units of 2^(shift - 18)
  float units, quantum;  // of them in 1, and its inverse
  float limit;           // D's magnitude in them is below it
} Uncut;

// A magnitude in units of 2^-9 -> the exponent as it is encoded.
static inline int exponent_of_small(int64_t most) {
  int exponent = most ? 63 - __builtin_clzll((uint64_t)most) - 9 : -6;
  return exponent > -6 ? exponent : -6;
}

// Whether sums of integers and D fit, and no product is cut; then `to` says how they are added.
static int is_uncut(const Mma *mma, Uncut *to) {
  int64_t a = small_a.most, b = small_b.most;
  if (a > MOST_SMALL || b > MOST_SMALL || a * b * K_BYTES > INT32_MAX - (1 << 26)) return 0;
  int fraction = (int)mma->fraction, grid = __builtin_ctzll((uint64_t)small_a.digits | 1 << 15);
  grid += __builtin_ctzll((uint64_t)small_b.digits | 1 << 15);
  int finest = exponent_of_small(a) + exponent_of_small(b) - (fraction - 18);  // grid on which D must be
  if (finest > grid) return 0;
  // The finest one on which the largest D that cuts no product is an integer of 31 bits.
  int shift = grid + fraction + 1 - 30;
  shift = shift > finest ? shift : finest;
  shift = shift > 0 ? shift : 0;
  int bits = grid + fraction + 1 - shift;
  while (bits > 30 || (a * b * K_BYTES >> shift) + (1LL << bits) > INT32_MAX) bits--;
  *to = (Uncut){shift, (float)power(18 - shift), (float)power(shift - 18), (float)power(bits)};
  return 1;
}

// 0: nothing is done, an element of D would be cut, or would cut a product, or is special.
static inline int uncut_block(const Sums *s, const Uncut *uncut, int64_t row, int64_t lane, int accumulate) {
  Ints sums[UNCUT_ROWS][UNCUT_VECTORS] = {0}, wrong = {0};
  const Mma *mma = s->mma;
  uint32_t *cells[UNCUT_VECTORS];
  int vectors = (int)((mma->m - lane) / WORDS);
  UNROLLED for (int v = 0; v < UNCUT_VECTORS; v++)  // beyond m: the first ones, and nothing is stored
    cells[v] = row_of(mma, s->cells, row) + lane_offset(mma, v < vectors ? lane + WORDS * v : lane);
  const int32_t *a = (const int32_t *)small_a.pairs + lane, *b = (const int32_t *)small_b.pairs + PAIRS * row;
  for (int k = 0; k < PAIRS; k++)
    UNROLLED for (int r = 0; r < UNCUT_ROWS; r++) {
      Ints right = b[PAIRS * r + k] - (Ints){0};
      UNROLLED for (int v = 0; v < UNCUT_VECTORS; v++)
        sums[r][v] = dot2(sums[r][v], *(const Ints *)(a + TENSOR_LANES * k + WORDS * v), right);
    }
  UNROLLED for (int r = 0; r < UNCUT_ROWS; r++)
    UNROLLED for (int v = 0; v < UNCUT_VECTORS; v++) {
      sums[r][v] >>= uncut->shift;
      if (!accumulate) continue;
      Floats old = *(const Floats *)(cells[v] + r * mma->column_stride) * uncut->units;
      Ints fits = (Floats)((Ints)old & INT32_MAX) < uncut->limit;
      Ints whole = __builtin_convertvector((Floats)((Ints)old & fits), Ints);
      wrong |= ~fits | (__builtin_convertvector(whole, Floats) != old);
      sums[r][v] += whole;
    }
  if (any(wrong)) return 0;
  Ints kept = (Ints){0} + (int32_t)(~0u << (23 - mma->result));
  UNROLLED for (int r = 0; r < UNCUT_ROWS; r++)
    UNROLLED for (int v = 0; v < UNCUT_VECTORS; v++)
      if (v < vectors)
        *(Ints *)(cells[v] + r * mma->column_stride) =
            (Ints)(__builtin_convertvector(sums[r][v], Floats) * uncut->quantum) & kept;
  return 1;
}

// What `uncut_block` has no room for.
static void cut_block(const Sums *s, int64_t row, int64_t lane, int narrow) {
  int step = narrow ? NARROW_ROWS : WIDE_ROWS, lanes = narrow ? NARROW_BLOCK : WIDE_BLOCK;
  for (int64_t r = row; r < row + UNCUT_ROWS; r += step) {
    find_tops(s, r, step);
    for (int64_t l = lane; l < lane + UNCUT_LANES && l < s->mma->m; l += lanes) {
      if (narrow) narrow_block(s, r, l, 0);
      else wide_block(s, r, l, 0);
    }
  }
}

// Kept apart as `add_steps` is. Blocks that cannot be computed so are computed as all others.
static __attribute__((noinline)) void add_uncut(Sums *s, const Uncut *uncut, int64_t part, int narrow) {
  const Mma *mma = s->mma;
  int loaded = 0;
  s->first = 0, s->last = s->k;
  for (int64_t row = 0; row < mma->n; row += UNCUT_ROWS)
    for (int64_t lane = 0; lane < mma->m; lane += UNCUT_LANES) {
      if (s->accumulate ? uncut_block(s, uncut, row, lane, 1) : uncut_block(s, uncut, row, lane, 0)) continue;
      if (!loaded) load_all_terms(mma, part, narrow);
      loaded = 1;
      cut_block(s, row, lane, narrow);
    }
}

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
  int64_t columns = mma->n / mma->ctas;
  int narrow = mma->fraction <= MOST_NARROW_FRACTION && is_byte_float(mma->a.element) && is_byte_float(mma->b.element);
  int small =
      mma->step == K_BYTES && mma->d == SUM_F32 && mma->a.element == E4M3 && mma->b.element == E4M3;
  for (int64_t r = 0; r < mma->ctas && small; r++)
    load_small(&small_b, &mma->parts[r].b, columns, r * columns, &mma->b, 0);
  int mode = fegetround();
  for (int64_t r = 0; r < mma->ctas; r++) {
    Sums sums = {
      .mma = mma, .cells = mma->parts[r].cells, .a = &terms_a, .b = &terms_b, .k = elements(mma->a.element),
      .halves = mma->d == SUM_F16, .accumulate = mma->accumulate != 0, .tops = tops,
    };
    if (small) load_small(&small_a, &mma->parts[r].a, mma->m, 0, &mma->a, 1);
    Uncut uncut;
    int is_small_sum = small && is_uncut(mma, &uncut);
    if (!is_small_sum) load_all_terms(mma, r, narrow);
    fesetround(FE_TOWARDZERO);
    if (is_small_sum) add_uncut(&sums, &uncut, r, narrow);
    else add_steps(&sums, narrow);
    fesetround(mode);
  }
}
