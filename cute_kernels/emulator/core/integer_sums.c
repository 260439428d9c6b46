// Sums of products of E4M3 as tensor cores compute them (silicon.c), in integers, where these are small.
//
// Products are integers P in units of 2^-18. With a quantum of 2^g of these units, a term that is cut toward zero is
// P - sign(P) * (|P| mod 2^g): the sum of all terms is the exact one less the sum of what is cut off. The exact one is
// that of pairs of 16-bit integers. What is cut off takes the lower g bits of a product, which 16-bit integers have up
// to g = 16, and is 0 where both factors together have g last zeros. Where g is larger, what is left of products is
// made of their upper bits, beyond the 16th.
#include <fenv.h>
#include <math.h>

#include "integer_sums.h"
#include "products.h"

VECTOR_OF(uint8_t, K_BYTES) RowBytes;  // of a row of B

enum {
  BLOCK_ROWS = VECTOR == 64 ? 8 : 4,           // of B, in a block
  TOGETHER = 2,                          // of them, whose cut sums stay in registers
  FEW = 2, MANY = VECTOR == 64 ? 4 : 2,  // vectors of results in a block
  LIFTED = 70,                           // exponents are stored with this added, those of zeros as 0
  IS_EXPONENT = 128,                     // sums of two are at least this
  BIASED = 2 * LIFTED - 127,             // less this, they are biased as those of FP32
  MOST_REMAINDER = 15,                   // g, of remainders that are 16-bit integers
  MOST_BIASED = 127 + 10,                // exponent up to which D in units of 2^-18 has 29 bits
  MOST_FINITE = 127 + 120,               // exponent up to which sums are finite
  NO_DIGIT = 60,                         // zeros at the end of 0
  SIGNS = 4,                             // of two numbers
  MANY_LANES = MANY * WORDS,
};

// Two elements of A of a block's lanes: what a block reads lies together, for it to stay in the first cache.
typedef struct PairOfA {
  int32_t values[MANY_LANES];
  uint32_t sizes[MANY_LANES];
  int32_t minus_signs[SIGNS][MANY_LANES];  // of products with b of these signs: -1, or 1 if negative
} PairOfA;

// What terms are cut by. Magnitudes are in units of 2^-9, two in a word, as the pairs of matrix.h.
typedef struct Planes {
  _Alignas(64) PairOfA a[TENSOR_LANES / MANY_LANES][PAIRS];
  _Alignas(64) uint8_t a_exponents[MOST_K][TENSOR_LANES];
  uint32_t b_exponents[MOST_ROWS][MOST_K];  // in each of the four bytes
  _Alignas(64) uint32_t b_sizes[MOST_ROWS][PAIRS];
  uint32_t b_signs[MOST_ROWS][PAIRS];       // 1: the first is negative, 2: the second, 3: both
  uint8_t b_zeros[MOST_ROWS][MOST_K];       // at the end of magnitudes
  _Alignas(64) uint8_t tops[MOST_ROWS][TENSOR_LANES];  // largest exponents of products, lifted twice; 0: none
} Planes;

static _Thread_local Operand small_a, small_b;
static _Thread_local Planes planes;
static _Thread_local int has_planes_of_b;

typedef struct Integers {
  const Mma *mma;
  uint32_t *cells;
  const int32_t *a, *b;  // pairs of `small_a` and `small_b`
  Planes *planes;        // here, for the address of what a thread has takes a call
  int accumulate, first, last;  // elements of K of this step
  int leaves_room;              // for a D of 29 bits beside the sum of all products
} Integers;

// A magnitude in units of 2^-9 -> the exponent as it is encoded.
static inline int exponent_of_small(int64_t most) {
  int exponent = most ? 63 - __builtin_clzll((uint64_t)most) - 9 : -6;
  return exponent > -6 ? exponent : -6;
}

// --- blocks in which nothing is cut ----------------------------------------------------------------------------------
//
// Products are multiples of more than 2^-18 if none of the operands has a digit that low. Where the largest exponent,
// D's too, is at most `fraction` above that of their last digits, the sum is that of integers: so are all those that
// tests compare without a tolerance.

typedef struct Uncut {
  int shift;            // integers are added in units of 2^(shift - 18)
  float units, quantum;  // of them in 1, and its inverse
  float limit;           // D's magnitude in them is below it
  int32_t cut;           // bits of D beyond those that its own exponent leaves
} Uncut;

// Whether no product is cut; then `to` says how they are added.
static int is_uncut(const Mma *mma, Uncut *to) {
  int64_t a = small_a.most, b = small_b.most;
  int fraction = (int)mma->fraction, grid = __builtin_ctzll((uint64_t)small_a.digits | 1 << 15);
  grid += __builtin_ctzll((uint64_t)small_b.digits | 1 << 15);
  int finest = exponent_of_small(a) + exponent_of_small(b) - (fraction - 18);  // grid on which D must be
  if (finest > grid || mma->step < K_BYTES) return 0;
  // The finest one on which the largest D that cuts no product is an integer of 31 bits.
  int shift = grid + fraction + 1 - 30;
  shift = shift > finest ? shift : finest;
  shift = shift > 0 ? shift : 0;
  int bits = grid + fraction + 1 - shift;
  while (bits > 30 || (a * b * K_BYTES >> shift) + (1LL << bits) > INT32_MAX) bits--;
  int32_t cut = fraction < 23 ? (1 << (23 - fraction)) - 1 : 0;  // a D above all products, which it alone is cut by
  *to = (Uncut){shift, (float)power(18 - shift), (float)power(shift - 18), (float)power(bits), cut};
  return 1;
}

// 0: nothing is done, an element of D would be cut, or would cut a product, or is special.
static inline int uncut_block(const Integers *s, const Uncut *uncut, int64_t row, int64_t lane, int accumulate) {
  enum { VECTORS = FEW };
  Ints sums[BLOCK_ROWS][VECTORS] = {0}, wrong = {0};
  const Mma *mma = s->mma;
  uint32_t *cells[VECTORS];
  int vectors = (int)((mma->m - lane) / WORDS);
  UNROLLED for (int v = 0; v < VECTORS; v++)  // beyond m: the first ones, and nothing is stored
    cells[v] = row_of(mma, s->cells, row) + lane_offset(mma, v < vectors ? lane + WORDS * v : lane);
  const int32_t *a = s->a + lane, *b = s->b + PAIRS * row;
  for (int k = 0; k < PAIRS; k++)
    UNROLLED for (int r = 0; r < BLOCK_ROWS; r++) {
      Ints right = b[PAIRS * r + k] - (Ints){0};
      UNROLLED for (int v = 0; v < VECTORS; v++)
        sums[r][v] = dot2(sums[r][v], *(const Ints *)(a + TENSOR_LANES * k + WORDS * v), right);
    }
  UNROLLED for (int r = 0; r < BLOCK_ROWS; r++)
    UNROLLED for (int v = 0; v < VECTORS; v++) {
      sums[r][v] >>= uncut->shift;
      if (!accumulate) continue;
      Floats given = *(const Floats *)(cells[v] + r * mma->column_stride), old = given * uncut->units;
      Ints fits = (Floats)((Ints)old & INT32_MAX) < uncut->limit;
      Ints whole = __builtin_convertvector((Floats)((Ints)old & fits), Ints);
      wrong |= ~fits | (__builtin_convertvector(whole, Floats) != old) | (((Ints)given & uncut->cut) != 0);
      sums[r][v] += whole;
    }
  if (any(wrong)) return 0;
  Ints kept = (Ints){0} + (int32_t)(~0u << (23 - mma->result));
  UNROLLED for (int r = 0; r < BLOCK_ROWS; r++)
    UNROLLED for (int v = 0; v < VECTORS; v++)
      if (v < vectors)
        *(Ints *)(cells[v] + r * mma->column_stride) =
            (Ints)(__builtin_convertvector(sums[r][v], Floats) * uncut->quantum) & kept;
  return 1;
}

// --- what cutting takes ----------------------------------------------------------------------------------------------

static inline Ints word_of(Ints first, Ints second) { return (first & 0xFFFF) | (Ints)((Bits)second << 16); }

static void fill_planes_of_a(const Integers *s, int64_t rows) {
  Planes *to = s->planes;
  for (int pair = 0; pair < PAIRS; pair++)
    for (int64_t lane = 0; lane < rows; lane += WORDS) {
      Bits word = *(const Bits *)(s->a + TENSOR_LANES * pair + lane);
      Ints sizes[2], minus[2];
      UNROLLED for (int i = 0; i < 2; i++) {
        Ints value = (Ints)(i ? word : word << 16) >> 16, sign = value >> 31, size = (value ^ sign) - sign;
        Ints exponent = larger_words(((Ints)__builtin_convertvector(size, Floats) >> 23) - (127 + 9), (Ints){0} - 6);
        exponent = (exponent + LIFTED) & (size != 0);
        store_bytes(to->a_exponents[2 * pair + i] + lane, exponent);
        sizes[i] = size, minus[i] = ~sign | 1;
      }
      PairOfA *both = &to->a[lane / MANY_LANES][pair];
      *(Bits *)(both->values + lane % MANY_LANES) = word;
      *(Ints *)(both->sizes + lane % MANY_LANES) = word_of(sizes[0], sizes[1]);
      UNROLLED for (int i = 0; i < SIGNS; i++)
        *(Ints *)(both->minus_signs[i] + lane % MANY_LANES) =
            word_of(i & 1 ? -minus[0] : minus[0], i & 2 ? -minus[1] : minus[1]);
    }
}

static void fill_planes_of_b(const Mma *mma, const int32_t *pairs, Planes *to) {
  static _Thread_local uint8_t codes[MOST_ROWS][K_BYTES];
  int64_t columns = mma->n / mma->ctas;
  for (int64_t r = 0; r < mma->ctas; r++) load_codes(codes + r * columns, &mma->parts[r].b, columns, mma->b.unit);
  for (int64_t row = 0; row < mma->n; row++) {
    RowBytes code = *(const RowBytes *)codes[row] & 127, field = code >> 3, zero = (RowBytes)(code == 0);
    RowBytes subnormal = (RowBytes)(field == 0), digits = (code & 7) | (8 & ~subnormal), exponents;
    field -= subnormal;  // the exponent of subnormal numbers is that of the first normal ones
    exponents = (field + (LIFTED - 7)) & ~zero;
    // 3, less 1 for each of the three lower digits at or below which there is one.
    digits = 3 + (RowBytes)((digits & 1) != 0) + (RowBytes)((digits & 3) != 0) + (RowBytes)((digits & 7) != 0);
    *(RowBytes *)to->b_zeros[row] = ((digits + field - 1) & ~zero) | (NO_DIGIT & zero);
    for (int k = 0; k < MOST_K; k++) to->b_exponents[row][k] = exponents[k] * 0x01010101u;
    for (int pair = 0; pair < PAIRS; pair += WORDS) {
      Bits word = *(const Bits *)(pairs + PAIRS * row + pair);
      Ints first = (Ints)(word << 16) >> 31, second = (Ints)word >> 31;
      Ints sizes = word_of(((Ints)(word << 16) >> 16 ^ first) - first, ((Ints)word >> 16 ^ second) - second);
      *(Ints *)(to->b_sizes[row] + pair) = sizes;
      *(Ints *)(to->b_signs[row] + pair) = (first & 1) | (second & 2);
    }
  }
}

static void find_tops(const Integers *s) {
  enum { AT_ONCE = 4 };
  Planes *to = s->planes;
  for (int64_t lane = 0; lane < s->mma->m; lane += VECTOR)
    for (int64_t row = 0; row < s->mma->n; row += AT_ONCE) {
      Bytes most[AT_ONCE] = {0};
      for (int k = s->first; k < s->last; k++) {
        Bytes left = *(const Bytes *)(to->a_exponents[k] + lane);
        UNROLLED for (int r = 0; r < AT_ONCE; r++)
          most[r] = larger_bytes(most[r], left + (Bytes)((Bits){0} + to->b_exponents[row + r][k]));
      }
      UNROLLED for (int r = 0; r < AT_ONCE; r++)
        *(Bytes *)(to->tops[row + r] + lane) = most[r] & (Bytes)(most[r] >= IS_EXPONENT);
    }
}

// Zeros at the end of A's elements in some lanes, the fewest of them for each k.
static void zeros_of_lanes(const Planes *from, int64_t lane, int64_t lanes, RowBytes *to) {
  RowBytes zeros;
  for (int k = 0; k < MOST_K; k += 2) {
    uint64_t all = 0, two;
    const uint32_t *sizes = from->a[lane / MANY_LANES][k / 2].sizes + lane % MANY_LANES;
    for (int64_t i = 0; i < lanes; i += 2) memcpy(&two, sizes + i, sizeof two), all |= two;
    all |= all >> 32;
    zeros[k] = all & 0xFFFF ? (uint8_t)__builtin_ctzll(all) : NO_DIGIT;
    zeros[k + 1] = all >> 16 & 0xFFFF ? (uint8_t)__builtin_ctzll(all >> 16) : NO_DIGIT;
  }
  *to = zeros;
}

// Whether factors of one k have less than g last zeros together, in some rows of B: else no product is cut.
static inline int is_cut(uint8_t (*b_zeros)[MOST_K], int rows, const RowBytes *zeros, int g) {
  RowBytes cut = {0};
  for (int r = 0; r < rows; r++) cut |= (RowBytes)(*(const RowBytes *)b_zeros[r] + *zeros < (uint8_t)g);
  uint64_t words[4];
  memcpy(words, &cut, sizeof words);
  return (words[0] | words[1] | words[2] | words[3]) != 0;
}

// --- blocks in which something may be cut ----------------------------------------------------------------------------

// A block: biased exponents of the largest terms, what is cut off them (2^g - 1, twice), and sums of products.
typedef struct Block {
  Ints tops[BLOCK_ROWS][MANY], below[BLOCK_ROWS][MANY], sums[BLOCK_ROWS][MANY];
  int64_t row, lane;
  uint32_t *cells[MANY];
  int words, used, most;  // vectors; those that lie within m; of `tops`
} Block;

static inline Ints power_of_two(Ints g) { return __builtin_convertvector((Floats)((g + 127) << 23), Ints); }

static inline Ints limited(Ints x, int32_t most) {
  Ints many = x > most;
  return (x & ~many) | (most & many);
}

static inline Bits cells_of(const Integers *s, const Block *block, int r, int v) {
  return s->accumulate ? *(const Bits *)(block->cells[v] + r * s->mma->column_stride) : (Bits){0};
}

// g is the biased exponent of the largest term less this.
static inline int32_t bias_of(const Mma *mma) { return 127 + (int32_t)mma->fraction - 18; }

// Sums of the upper 16 bits of products, cut, where g is larger than MOST_REMAINDER; others stay.
static __attribute__((noinline)) void sum_upper_bits(const Integers *s, Block *block, int r) {
  const Planes *from = s->planes;
  int64_t row = block->row + r, first = block->lane % MANY_LANES;
  for (int v = 0; v < block->words; v++) {
    Ints g = block->tops[r][v] - bias_of(s->mma), large = g > MOST_REMAINDER, total = {0};
    Ints unit = power_of_two(limited(larger_words(g - 16, (Ints){0}), 15)), kept = word_of(-unit, -unit);
    for (int pair = s->first / 2; pair < s->last / 2; pair++) {
      const PairOfA *both = &from->a[block->lane / MANY_LANES][pair];
      Bit16s sizes = *(const Bit16s *)(both->sizes + first + WORDS * v);
      Ints terms = (Ints)high_products(sizes, (Bit16s)((Bits){0} + from->b_sizes[row][pair])) & kept;
      total = dot2(total, terms, *(const Ints *)(both->minus_signs[from->b_signs[row][pair]] + first + WORDS * v));
    }
    block->sums[r][v] = (block->sums[r][v] & ~large) | ((Ints)(-(Bits)total << 16) & large);
  }
}

// D, where it is no integer of units of 2^-18, or too large. `large`: there may be NaN or infinities, in D or of it.
static inline HalfBits added_in_double(const Mma *mma, HalfBits bits, HalfInts sums, HalfInts tops, int large) {
  HalfBits kept = (HalfBits){0} + (~0u << (23 - mma->result)), nan = (HalfBits)((bits & INT32_MAX) > 0x7F800000);
  // A number whose last digit is the quantum: adding it cuts, as the rounding mode is toward zero.
  HalfInts last = tops + (1023 - 127 + 52 - (int32_t)mma->fraction) - (tops == 0);
  Doubles magic = (Doubles)(__builtin_convertvector(last, Longs) << 52), old = doubles_of((HalfFloats)bits);
  Doubles size = (Doubles)((Longs)old & INT64_MAX);
  size = (size + magic) - magic;
  old = (Doubles)((Longs)size | ((Longs)old & INT64_MIN));
  Doubles total = __builtin_convertvector(sums, Doubles) * 0x1p-18 + old;
  HalfBits results = (HalfBits)floats_of(total);
  if (large) results = wide_bits(total);
  results &= kept;
  results &= ~(HalfBits)(results << 1 == 0);
  if (large) results = (results & ~nan) | (nan & INT32_MAX);
  return results;
}

static inline void add_in_double(const Integers *s, Block *block, int words, int large) {
  for (int r = 0; r < BLOCK_ROWS; r++)
    UNROLLED for (int v = 0; v < words; v++) {
      if (v >= block->used) continue;
      uint32_t *to = block->cells[v] + r * s->mma->column_stride;
      UNROLLED for (int h = 0; h < 2; h++) {
        HalfBits *half = (HalfBits *)to + h;
        HalfBits old = s->accumulate ? *half : (HalfBits){0};
        *half = added_in_double(
            s->mma, old, ((const HalfInts *)&block->sums[r][v])[h], ((const HalfInts *)&block->tops[r][v])[h], large);
      }
    }
}

static inline void find_quanta(const Integers *s, Block *block, int words) {
  Ints most = {0};
  int32_t bias = bias_of(s->mma);
  for (int r = 0; r < BLOCK_ROWS; r++) {
    const uint8_t *lifted = s->planes->tops[block->row + r] + block->lane;
    UNROLLED for (int v = 0; v < words; v++) {
      Ints old = (Ints)(cells_of(s, block, r, v) << 1 >> 24);
      Ints tops = larger_words(old, words_of(lifted + WORDS * v) - BIASED);
      most = larger_words(most, tops);
      Ints unit = power_of_two(limited(larger_words(tops - bias, (Ints){0}), MOST_REMAINDER)) - 1;
      block->tops[r][v] = tops, block->below[r][v] = unit | (Ints)((Bits)unit << 16);
    }
  }
  block->most = largest_of(most);
}

// With `cut`, of products that are cut.
static inline void sum_products(const Integers *s, Block *block, int row, int words, int cut) {
  Ints totals[TOGETHER][MANY], below[TOGETHER][MANY];
  UNROLLED for (int r = 0; r < TOGETHER; r++)
    UNROLLED for (int v = 0; v < words; v++) totals[r][v] = (Ints){0}, below[r][v] = block->below[row + r][v];
  const Planes *from = s->planes;
  const int32_t *b = s->b + PAIRS * (block->row + row);
  const uint32_t *sizes = from->b_sizes[block->row + row], *signs = from->b_signs[block->row + row];
  const PairOfA *a = from->a[block->lane / MANY_LANES];
  int64_t first = block->lane % MANY_LANES;
  for (int pair = s->first / 2; pair < s->last / 2; pair++)
    UNROLLED for (int r = 0; r < TOGETHER; r++) {
      Ints right = b[PAIRS * r + pair] - (Ints){0};
      Bit16s size = (Bit16s)((Bits){0} + sizes[PAIRS * r + pair]);
      const int32_t *minus = a[pair].minus_signs[signs[PAIRS * r + pair]] + first;
      UNROLLED for (int v = 0; v < words; v++) {
        totals[r][v] = dot2(totals[r][v], *(const Ints *)(a[pair].values + first + WORDS * v), right);
        if (!cut) continue;
        Ints rest = (Ints)(*(const Bit16s *)(a[pair].sizes + first + WORDS * v) * size) & below[r][v];
        totals[r][v] = dot2(totals[r][v], rest, *(const Ints *)(minus + WORDS * v));
      }
    }
  UNROLLED for (int r = 0; r < TOGETHER; r++)
    UNROLLED for (int v = 0; v < words; v++) block->sums[row + r][v] = totals[r][v];
}

// Adds D in 32-bit integers. 0: nothing is stored, for an element does not fit.
static inline int add_in_integers(const Integers *s, Block *block, int words) {
  const Mma *mma = s->mma;
  Ints kept = (Ints){0} + (int32_t)(~0u << (23 - mma->result)), wrong = {0};
  int32_t bias = bias_of(mma);
  for (int r = 0; r < BLOCK_ROWS; r++)
    UNROLLED for (int v = 0; v < words; v++) {
      Floats units = (Floats)cells_of(s, block, r, v) * 0x1p18f;
      Ints whole = __builtin_convertvector(units, Ints), below = block->below[r][v] & 0x7FFF;
      if (v < block->used)
        wrong |= (block->tops[r][v] < bias) & (__builtin_convertvector(whole, Floats) != units);
      whole = (whole + (whole >> 31 & below)) & ~below;
      block->below[r][v] = (Ints)(__builtin_convertvector(block->sums[r][v] + whole, Floats) * 0x1p-18f) & kept;
    }
  if (any(wrong)) return 0;
  for (int r = 0; r < BLOCK_ROWS; r++)
    UNROLLED for (int v = 0; v < words; v++)
      if (v < block->used) *(Ints *)(block->cells[v] + r * mma->column_stride) = block->below[r][v];
  return 1;
}

// BLOCK_ROWS rows of B by vectors of lanes. `zeros`: of these lanes.
static inline void cut_block(const Integers *s, int64_t row, int64_t lane, const RowBytes *zeros, int words) {
  const Mma *mma = s->mma;
  Block block;
  int used = (int)((mma->m - lane) / WORDS);
  block.row = row, block.lane = lane, block.words = words, block.used = used < words ? used : words;
  UNROLLED for (int v = 0; v < words; v++)  // beyond m: the first ones, and nothing is stored
    block.cells[v] = row_of(mma, s->cells, row) + lane_offset(mma, v < used ? lane + WORDS * v : lane);
  find_quanta(s, &block, words);
  int g = block.most - bias_of(mma);
  int cut = g > 0 && is_cut(s->planes->b_zeros + row, BLOCK_ROWS, zeros, g < 40 ? g : 40);
  for (int r = 0; r < BLOCK_ROWS; r += TOGETHER) {
    if (cut) sum_products(s, &block, r, words, 1);
    else sum_products(s, &block, r, words, 0);
  }
  if (__builtin_expect(g > MOST_REMAINDER, 0))
    for (int r = 0; r < BLOCK_ROWS; r++) sum_upper_bits(s, &block, r);
  if (block.most <= MOST_BIASED && g <= MOST_REMAINDER && s->leaves_room && add_in_integers(s, &block, words)) return;
  if (block.most < MOST_FINITE) add_in_double(s, &block, words, 0);
  else add_in_double(s, &block, words, 1);
}

// --- instructions ----------------------------------------------------------------------------------------------------

enum { FEW_LANES = FEW * WORDS, LANE_BLOCKS = TENSOR_LANES / FEW_LANES };

static void prepare_to_cut(const Integers *s, RowBytes *zeros) {
  int64_t blocks = (s->mma->m + FEW_LANES - 1) / FEW_LANES;
  if (s->first == 0) fill_planes_of_a(s, FEW_LANES * blocks);
  if (!has_planes_of_b) fill_planes_of_b(s->mma, s->b, s->planes);
  has_planes_of_b = 1;
  for (int64_t i = 0; i < blocks; i++) zeros_of_lanes(s->planes, FEW_LANES * i, FEW_LANES, &zeros[i]);
  find_tops(s);
}

static void add_cut(const Integers *s, const RowBytes *zeros) {
  const Mma *mma = s->mma;
  for (int64_t lane = 0; lane < mma->m;) {
    RowBytes least = zeros[lane / FEW_LANES];
    if (MANY > FEW && mma->m - lane > FEW_LANES) {
      RowBytes other = zeros[lane / FEW_LANES + 1], less = (RowBytes)(other < least);
      least = (other & less) | (least & ~less);
      for (int64_t row = 0; row < mma->n; row += BLOCK_ROWS) cut_block(s, row, lane, &least, MANY);
      lane += MANY * WORDS;
    } else {
      for (int64_t row = 0; row < mma->n; row += BLOCK_ROWS) cut_block(s, row, lane, &least, FEW);
      lane += FEW_LANES;
    }
  }
}

// Blocks that `uncut_block` has no room for are cut; all others too, where those are many.
static void add_uncut(const Integers *s, const Uncut *uncut, RowBytes *zeros) {
  const Mma *mma = s->mma;
  int tried = 0, failed = 0, prepared = 0;
  for (int64_t row = 0; row < mma->n; row += BLOCK_ROWS)
    for (int64_t lane = 0; lane < mma->m; lane += FEW_LANES) {
      if (2 * failed <= tried) {
        tried++;
        if (s->accumulate ? uncut_block(s, uncut, row, lane, 1) : uncut_block(s, uncut, row, lane, 0)) continue;
        failed++;
      }
      if (!prepared) prepare_to_cut(s, zeros);
      prepared = 1;
      cut_block(s, row, lane, &zeros[lane / FEW_LANES], FEW);
    }
}

int load_integers(const Mma *mma) {
  if (mma->d != SUM_F32 || mma->a.element != E4M3 || mma->b.element != E4M3) return 0;
  int64_t columns = mma->n / mma->ctas;
  has_planes_of_b = 0;
  for (int64_t r = 0; r < mma->ctas; r++)
    load_small(&small_b, &mma->parts[r].b, columns, r * columns, &mma->b, 0);
  return small_b.most <= MOST_SMALL;
}

// Kept apart, so that the rounding mode is set before the first operation and until after the last one.
static __attribute__((noinline)) void add_steps(Integers *s, const Uncut *uncut) {
  RowBytes zeros[LANE_BLOCKS];
  s->last = K_BYTES;
  if (uncut) {
    add_uncut(s, uncut, zeros);
    return;
  }
  for (s->first = 0; s->first < K_BYTES; s->first = s->last, s->accumulate = 1) {
    s->last = s->first + (int)s->mma->step;
    prepare_to_cut(s, zeros);
    add_cut(s, zeros);
  }
}

int add_integers_aligned(const Mma *mma, int64_t part) {
  load_small(&small_a, &mma->parts[part].a, mma->m, 0, &mma->a, 1);
  int64_t most = small_a.most * small_b.most * K_BYTES;
  if (small_a.most > MOST_SMALL || most > INT32_MAX) return 0;
  Uncut room, *uncut = is_uncut(mma, &room) ? &room : NULL;
  if (!uncut && VECTOR < 32) return 0;  // the sums of silicon.c are up to three times as fast there
  Integers s = {
    .mma = mma, .cells = mma->parts[part].cells, .a = (const int32_t *)small_a.pairs,
    .b = (const int32_t *)small_b.pairs, .planes = &planes,
    .accumulate = mma->accumulate != 0, .leaves_room = most < INT32_MAX - (1 << 29),
  };
  int mode = fegetround();
  fesetround(FE_TOWARDZERO);
  add_steps(&s, uncut);
  fesetround(mode);
  return 1;
}
