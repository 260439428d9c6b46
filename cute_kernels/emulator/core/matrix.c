// Matrix products with sums that are exact and rounded once; those as tensor cores compute them are in silicon.c.
//
// Small integers are multiplied in pairs of 16 bits and added in 32 bits. Products of all other elements are exact in
// double and added there, with a bound of the error: where all numbers within it round to the same result, that is the
// result (Ziv's test, "Fast evaluation of elementary mathematical functions", 1991). Else the sum is computed exactly.
#include <math.h>
#include <string.h>

#include "products.h"

// A product is computed in blocks of rows of B by vectors of rows of A, whose sums stay in registers.
enum {
  SMALL_ROWS = VECTOR == 64 ? 8 : 4,
  SMALL_VECTORS = 2,
  WIDE_ROWS = 4,
  WIDE_VECTORS = VECTOR == 64 ? 4 : 2,
};
typedef struct Product {
  const Mma *mma;
  uint32_t *cells;
  const Operand *a, *b;
  int k;
  double grid;  // `grid_of`
} Product;

static _Thread_local Operand operand_a, operand_b;

// --- small integers --------------------------------------------------------------------------------------------------

static inline double two_sum(double x, double y, double *error) {
  double sum = x + y, part = sum - x;
  *error = (x - (sum - part)) + (y - part);
  return sum;
}

// `sum + rest` rounded to odd: rounding that once more, to FP32 or less, cannot go wrong (53 >= 24 + 2).
static inline double to_odd(double sum, double rest) {
  int64_t bits;
  memcpy(&bits, &sum, sizeof bits);
  if (rest != 0 && !(bits & 1)) bits += (rest > 0) == (sum > 0) ? 1 : -1;
  memcpy(&sum, &bits, sizeof bits);
  return sum;
}

static inline uint32_t float_bits(double value) {
  float result = (float)value;
  uint32_t bits;
  memcpy(&bits, &result, sizeof bits);
  return value != value ? 0x7FFFFFFF : bits;
}

// Where FP32 does not hold a sum: in double, rounded to odd and then to FP32 (`to_odd`).
static __attribute__((noinline)) void add_large(uint32_t *cells, Ints sums, int accumulate) {
  HalfInts halves[2];
  memcpy(halves, &sums, sizeof halves);
  for (int h = 0; h < 2; h++) {
    HalfBits *to = (HalfBits *)(cells + DOUBLES * h);
    Doubles x = __builtin_convertvector(halves[h], Doubles) * 0x1p-18, old = {0};
    if (accumulate) old = doubles_of((HalfFloats)*to);
    Doubles total = x + old, part = total - x, rest = (x - (total - part)) + (old - part);
    Longs bits = (Longs)total, away = (rest > 0) ^ (total > 0);
    Longs inexact = (rest != 0) & ((bits & 1) == 0) & ((bits & INT64_MAX) < (Longs)((Doubles){0} + HUGE_VAL));
    bits += (1 + 2 * away) & inexact;
    HalfBits nan = (HalfBits)__builtin_convertvector(total != total, HalfInts);
    *to = ((HalfBits)floats_of((Doubles)bits) & ~nan) | (nan & INT32_MAX);
  }
}

// NaN, which only the accumulator can have brought, gets the pattern that instructions leave.
static __attribute__((noinline)) void only_one_nan(uint32_t *cells, int64_t stride) {
  for (int r = 0; r < SMALL_ROWS; r++, cells += stride) {
    Floats value = *(const Floats *)cells;
    Bits nan = (Bits)(value != value);
    *(Bits *)cells = ((Bits)value & ~nan) | (nan & INT32_MAX);
  }
}

static inline Ints add_integers(Ints sum, Ints old, int saturate) {
  Ints total = (Ints)((Bits)sum + (Bits)old);
  if (!saturate) return total;
  Ints overflow = ((sum ^ total) & (old ^ total)) >> 31;
  return (overflow & ((sum >> 31) ^ INT32_MAX)) | (~overflow & total);
}

static inline void small_block(const Product *p, int64_t row, int64_t lane, int floats, int accumulate) {
  Ints sums[SMALL_ROWS][SMALL_VECTORS] = {0};
  int64_t stride = p->mma->column_stride;
  uint32_t *cells[SMALL_VECTORS];
  int vectors = (int)((p->mma->m - lane) / WORDS);
  UNROLLED for (int v = 0; v < SMALL_VECTORS; v++)  // beyond m: the first ones, and nothing is stored
    cells[v] = row_of(p->mma, p->cells, row) + lane_offset(p->mma, v < vectors ? lane + WORDS * v : lane);
  const int32_t *a = (const int32_t *)p->a->pairs + lane, *b = (const int32_t *)p->b->pairs + PAIRS * row;
  for (int k = 0; k < PAIRS; k++) {
    Ints left[SMALL_VECTORS];
    UNROLLED for (int v = 0; v < SMALL_VECTORS; v++) left[v] = *(const Ints *)(a + TENSOR_LANES * k + WORDS * v);
    UNROLLED for (int r = 0; r < SMALL_ROWS; r++) {
      Ints right = b[PAIRS * r + k] - (Ints){0};
      UNROLLED for (int v = 0; v < SMALL_VECTORS; v++) sums[r][v] = dot2(sums[r][v], left[v], right);
    }
  }
  if (!floats) {
    UNROLLED for (int v = 0; v < SMALL_VECTORS; v++) {
      if (v >= vectors) break;
      UNROLLED for (int r = 0; r < SMALL_ROWS; r++) {
        Ints *to = (Ints *)(cells[v] + r * stride);
        *to = accumulate ? add_integers(sums[r][v], *to, (int)p->mma->saturate) : sums[r][v];
      }
    }
    return;
  }
  Bits large = {0};
  UNROLLED for (int r = 0; r < SMALL_ROWS; r++)
    UNROLLED for (int v = 0; v < SMALL_VECTORS; v++) large |= (Bits)(sums[r][v] + (1 << 24));
  if (__builtin_expect(any((Ints)(large >> 25)), 0)) {
    UNROLLED for (int v = 0; v < SMALL_VECTORS; v++) {
      if (v >= vectors) break;
      UNROLLED for (int r = 0; r < SMALL_ROWS; r++) add_large(cells[v] + r * stride, sums[r][v], accumulate);
    }
    return;
  }
  // Integers up to 2^24 are FP32 numbers, so that the addition is the only rounding. A vector is stored before the next
  // one is made: more do not fit in the registers.
  Floats total[SMALL_VECTORS] = {0}, unit = (Floats){0} + 0x1p-18f;
  UNROLLED for (int r = 0; r < SMALL_ROWS; r++)
    UNROLLED for (int v = 0; v < SMALL_VECTORS; v++) {
      Floats *to = (Floats *)(cells[v] + r * stride), result = __builtin_convertvector(sums[r][v], Floats);
      if (accumulate) result = add_small_product(*to, result, unit);
      else result *= unit;
      if (accumulate) total[v] += result;  // NaN if one of them is
      if (v < vectors) *to = result;
    }
  if (!accumulate) return;
  UNROLLED for (int v = 0; v < SMALL_VECTORS; v++)
    if (v < vectors && __builtin_expect(any(total[v] != total[v]), 0)) only_one_nan(cells[v], stride);
}

static void multiply_small(const Product *p) {
  int floats = p->mma->d == SUM_F32;
  for (int64_t lane = 0; lane < p->mma->m; lane += WORDS * SMALL_VECTORS)
    for (int64_t row = 0; row < p->mma->n; row += SMALL_ROWS) {
      if (!floats) small_block(p, row, lane, 0, p->mma->accumulate != 0);
      else if (p->mma->accumulate) small_block(p, row, lane, 1, 1);
      else small_block(p, row, lane, 1, 0);
    }
}

// --- all other elements ----------------------------------------------------------------------------------------------

// Parts do not overlap, the last is the largest (Shewchuk, "Adaptive Precision Floating-Point Arithmetic and Fast Robust
// Geometric Predicates", 1997, Grow-Expansion).
double exact_sum(const double *terms, int count) {
  double parts[MOST_K + 2];
  int used = 0;
  for (int i = 0; i < count; i++) {
    double x = terms[i], error;
    int kept = 0;
    for (int j = 0; j < used; j++) {
      x = two_sum(x, parts[j], &error);
      if (error != 0) parts[kept++] = error;
    }
    parts[kept++] = x;
    used = kept;
  }
  double sum = parts[--used], rest = 0;
  while (used && rest == 0) sum = two_sum(sum, parts[--used], &rest);
  return to_odd(sum, rest);
}

// All products are multiples of it, and so few that their sums are exact; 0: there is none.
static double grid_of(const Product *p) {
  uint32_t bits[] = {p->a->lowest, p->b->lowest};
  float low[2];
  double high[2] = {0};
  memcpy(low, bits, sizeof low);
  for (int64_t i = 0; i < p->mma->m; i++) high[0] = p->a->largest[i] > high[0] ? p->a->largest[i] : high[0];
  for (int64_t i = 0; i < p->mma->n; i++) high[1] = p->b->largest[i] > high[1] ? p->b->largest[i] : high[1];
  double grid = (double)low[0] * low[1];
  return p->k * high[0] * high[1] < 0x1p50 * grid && grid < 0x1p900 ? grid : 0;
}

// The bits of one result that the error leaves open.
static uint32_t settle(Product *p, int64_t row, int64_t lane, double old, double sum) {
  if (isfinite(sum)) {
    double terms[MOST_K + 1];
    for (int i = 0; i < p->k; i++) terms[i] = p->b->values[p->k * row + i] * p->a->values[TENSOR_LANES * i + lane];
    terms[p->k] = old;
    sum = exact_sum(terms, p->k + 1) + 0.0;  // of zeros it is 0, not -0; elsewhere adding the error has done that
  }
  return p->mma->d == SUM_F16 ? half_bits(sum) : float_bits(sum);
}

// No error where the products are on a grid on which D is too, and not too large: then the sums are exact.
static inline Doubles without_error(const Product *p, Doubles old, Doubles error) {
  Doubles magic = (Doubles){0} + 0x1.8p52, steps = old * (1 / p->grid), size = (Doubles)((Longs)steps & INT64_MAX);
  Longs exact = (size < 0x1p50) & ((steps + magic) - magic == steps);
  return (Doubles)((Longs)error & ~exact);
}

// What rounding gives at both ends of an error: the results, and which are open; of NaN too.
static inline HalfInts round_both(Doubles sum, Doubles error, int halves, HalfBits *results) {
  if (halves) {
    Longs low = halves_of(sum - error), high = halves_of(sum + error);
    *results = __builtin_convertvector(high, HalfBits);
    return __builtin_convertvector((low != high) | (sum != sum), HalfInts);
  }
  HalfFloats low = floats_of(sum - error), high = floats_of(sum + error);
  *results = (HalfBits)high;
  return low != high;
}

static __attribute__((noinline)) void settle_all(
    Product *p, uint32_t *cells, int64_t row, int64_t lane, Doubles sum, Doubles error, int halves) {
  HalfBits results;
  Doubles old = old_values(cells, halves, p->mma->accumulate != 0);
  if (p->grid > 0) error = without_error(p, old, error);
  HalfInts open = round_both(sum, error, halves, &results);
  for (int i = 0; i < DOUBLES; i++) cells[i] = open[i] ? settle(p, row, lane + i, old[i], sum[i]) : results[i];
}

static inline void wide_block(
    Product *p, int64_t row, int64_t lane, int k, int halves, int accumulate, int on_grid) {
  Doubles sums[WIDE_ROWS][WIDE_VECTORS], bound[WIDE_VECTORS];
  uint32_t *cells[WIDE_VECTORS];
  int64_t stride = p->mma->column_stride;
  int vectors = (int)((p->mma->m - lane) / DOUBLES);
  UNROLLED for (int v = 0; v < WIDE_VECTORS; v++)  // beyond m: the first ones, and nothing is stored
    cells[v] = row_of(p->mma, p->cells, row) + lane_offset(p->mma, v < vectors ? lane + DOUBLES * v : lane);
  UNROLLED for (int r = 0; r < WIDE_ROWS; r++)
    UNROLLED for (int v = 0; v < WIDE_VECTORS; v++)
      sums[r][v] = old_values(cells[v] + r * stride, halves, accumulate);
  const double *a = p->a->values + lane, *b = p->b->values + k * row;
  for (int i = 0; i < k; i++)
    UNROLLED for (int r = 0; r < WIDE_ROWS; r++) {
      Doubles right = b[k * r + i] - (Doubles){0};
      UNROLLED for (int v = 0; v < WIDE_VECTORS; v++)
        sums[r][v] = add_product(sums[r][v], *(const Doubles *)(a + TENSOR_LANES * i + DOUBLES * v), right);
    }
  // Each of k additions errs by at most 2^-53 of a partial sum, whose magnitude is at most that of D and of all
  // products, hence that of the result and twice that of all products; 8 more are for the arithmetic of the bound.
  double unit = (k + 8) * 0x1p-53;
  UNROLLED for (int v = 0; v < WIDE_VECTORS; v++)
    bound[v] = *(const Doubles *)(p->a->largest + lane + DOUBLES * v) * (2 * unit * k);
  HalfBits results[WIDE_ROWS][WIDE_VECTORS];
  HalfInts open = {0};
#define ERROR(r, v) (bound[v] * p->b->largest[row + r] + unit * (Doubles)((Longs)sums[r][v] & INT64_MAX))
  UNROLLED for (int r = 0; r < WIDE_ROWS; r++)
    UNROLLED for (int v = 0; v < WIDE_VECTORS; v++) {
      Doubles error = ERROR(r, v);
      if (on_grid) error = without_error(p, old_values(cells[v] + r * stride, halves, accumulate), error);
      open |= round_both(sums[r][v], error, halves, &results[r][v]);
    }
  int doubt = __builtin_expect(any_half(open), 0);
  UNROLLED for (int r = 0; r < WIDE_ROWS; r++)
    UNROLLED for (int v = 0; v < WIDE_VECTORS; v++) {
      if (v >= vectors) continue;
      uint32_t *to = cells[v] + r * stride;
      if (doubt) settle_all(p, to, row + r, lane + DOUBLES * v, sums[r][v], ERROR(r, v), halves);
      else *(HalfBits *)to = results[r][v];
    }
#undef ERROR
}

static void multiply_wide(Product *p) {
  int halves = p->mma->d == SUM_F16, accumulate = p->mma->accumulate != 0;
  for (int64_t lane = 0; lane < p->mma->m; lane += DOUBLES * WIDE_VECTORS)
    for (int64_t row = 0; row < p->mma->n; row += WIDE_ROWS) {
      if (halves || p->k != 16) wide_block(p, row, lane, p->k, halves, accumulate, p->grid > 0);
      else if (p->grid > 0) wide_block(p, row, lane, 16, 0, accumulate, 1);
      else wide_block(p, row, lane, 16, 0, accumulate, 0);
    }
}

// --- instructions ----------------------------------------------------------------------------------------------------

static int may_execute(const Mma *mma) {
  for (int64_t r = 0; r < mma->ctas; r++) {
    const MmaPart *part = &mma->parts[r];
    if (!initialised(&part->b, mma->n / mma->ctas, mma->b.unit)) return 0;
    if (!initialised(&part->a, mma->m, mma->a.unit)) return 0;
  }
  return 1;
}

int32_t mma_execute(const Mma *mma) {
  if (!may_execute(mma)) return 0;
  if (mma->fraction && mma->d != SUM_S32) {
    if (mma->split) multiply_split(mma);
    else multiply_aligned(mma);
    return 1;
  }
  Operand *a = &operand_a, *b = &operand_b;
  int64_t columns = mma->n / mma->ctas;
  int small = is_small(mma->a.element) && is_small(mma->b.element) && mma->d != SUM_F16, loaded = 0;
  for (int64_t r = 0; r < mma->ctas && small; r++)
    load_small(b, &mma->parts[r].b, columns, r * columns, &mma->b, 0);
  for (int64_t r = 0; r < mma->ctas; r++) {
    const MmaPart *part = &mma->parts[r];
    Product product = {.mma = mma, .cells = part->cells, .a = a, .b = b, .k = elements(mma->a.element)};
    if (small && b->most <= MOST_SMALL) {
      load_small(a, &part->a, mma->m, 0, &mma->a, 1);
      if (a->most <= MOST_SMALL && a->most * b->most * K_BYTES <= INT32_MAX) {
        multiply_small(&product);
        continue;
      }
    }
    for (int64_t q = 0; q < mma->ctas && !loaded; q++)
      load_values(b, &mma->parts[q].b, columns, q * columns, &mma->b, 0);
    loaded = 1;
    load_values(a, &part->a, mma->m, 0, &mma->a, 1);
    product.grid = grid_of(&product);
    multiply_wide(&product);
  }
  return 1;
}
