// Descriptors of tcgen05.mma, and where the rows of an operand lie in shared memory (PTX ISA, "Canonical layouts").
#include <stddef.h>
#include <string.h>

#include "descriptors.h"
#include "matrix.h"

enum { CORE_ROWS = 8, CHUNK = 16 };  // rows of a core matrix; bytes of one of them

static int64_t field(uint64_t bits, int first, int count) { return (int64_t)(bits >> first & ((1u << count) - 1)); }

// Whether a shape exists (PTX ISA, "Matrix Shape", dense kinds without .ws).
static int is_shape(int64_t m, int64_t n, int64_t group, int integers) {
  if (m != 64 * group && m != 128 * group) return 0;
  if (n < 8 * group || n > MOST_ROWS) return 0;
  int64_t step = integers ? 16 * group : 8 * group;
  return n % step == 0 || (integers && group == 1 && (n == 8 || n == 24));
}

int32_t mma_fields(const MmaKind *kind, int64_t group, int64_t descriptor, MmaFields *f) {
  enum { ALL = 0x7 | 1 << 6 | 1 << 23, TOP = 29, SATURATE = 1 << 3, NEGATE = 3 << 13 };  // sparsity; reserved; .ws
  enum { CODE_S32 = 2 };
  uint64_t bits = (uint64_t)descriptor;
  int integers = kind->d[CODE_S32] == SUM_S32;
  if (bits & (ALL | (integers ? NEGATE : SATURATE)) || field(bits, TOP, 3)) return MMA_BITS;
  *f = (MmaFields){
      .a = kind->elements[field(bits, 7, 3)], .b = kind->elements[field(bits, 10, 3)], .negate_a = field(bits, 13, 1),
      .negate_b = field(bits, 14, 1), .a_mn_major = field(bits, 15, 1), .b_mn_major = field(bits, 16, 1),
      .m = 16 * field(bits, 24, 5), .n = 8 * field(bits, 17, 6), .d = kind->d[field(bits, 4, 2)],
      .saturate = field(bits, 3, 1),
  };
  if (f->d == NO_TYPE) return MMA_D_TYPE;
  if (f->a == NO_TYPE) return MMA_A_TYPE;
  if (f->b == NO_TYPE) return MMA_B_TYPE;
  if (f->d == SUM_F16 && (f->a == BF16 || f->b == BF16)) return MMA_BF16;
  if (f->a_mn_major && is_narrow(f->a)) return MMA_A_MAJOR;
  if (f->b_mn_major && is_narrow(f->b)) return MMA_B_MAJOR;
  return is_shape(f->m, f->n, group, integers) ? 0 : MMA_SHAPE;
}

// --- matrices --------------------------------------------------------------------------------------------------------

// address ^= (address >> shift) & mask; rows are `span` bytes, `rows` of them (of MN-major matrices K) make a pattern.
typedef struct Pattern { int64_t span, shift, mask, rows; } Pattern;
static const Pattern patterns[] = {
    [SWIZZLE_NONE] = {0, 0, 0, 8},          [SWIZZLE_32B] = {32, 3, 0x10, 8},
    [SWIZZLE_64B] = {64, 3, 0x30, 8},       [SWIZZLE_128B] = {128, 3, 0x70, 8},
    [SWIZZLE_128B_ATOM32B] = {128, 2, 0x60, 4},
};

int32_t matrix_fields(int64_t descriptor, Matrix *matrix) {
  static const int8_t modes[] = {SWIZZLE_NONE, SWIZZLE_128B_ATOM32B, SWIZZLE_128B, -1, SWIZZLE_64B, -1, SWIZZLE_32B, -1};
  enum { TO_BE_ZERO = 0xFF8, BASE_OFFSET = 7 };  // from bit 49 on: an absolute leading dimension, reserved; base offset
  uint64_t bits = (uint64_t)descriptor;
  int mode = modes[bits >> 61];
  if (mode < 0) return MATRIX_MODE;
  if (field(bits, 46, 3) != 1) return MATRIX_CONSTANT;
  // No swizzle repeats no pattern: its base offset means nothing.
  if (bits >> 49 & (TO_BE_ZERO | (mode == SWIZZLE_NONE ? 0 : BASE_OFFSET))) return MATRIX_BITS;
  if (field(bits, 14, 2) || field(bits, 30, 2)) return MATRIX_BITS;
  *matrix = (Matrix){16 * field(bits, 0, 14), 16 * field(bits, 16, 14), 16 * field(bits, 32, 14), mode};
  const Pattern *pattern = &patterns[mode];
  // With base offset 0 the pattern is a function of absolute address bits, so that a matrix may start in any row of it:
  // with wgmma on an H200, starts 128 to 896 bytes into a 128B pattern read what TMA's pattern writes there. Nobody
  // looked at the pattern of 32-byte atoms.
  if (mode == SWIZZLE_128B_ATOM32B && matrix->address % (pattern->span * pattern->rows) >= pattern->span)
    return MATRIX_START;
  return 0;
}

// PTX ISA, wgmma, "Matrix descriptor format".
int32_t wgmma_matrix(int64_t descriptor, Matrix *matrix) {
  static const int8_t modes[] = {SWIZZLE_NONE, SWIZZLE_128B, SWIZZLE_64B, SWIZZLE_32B};
  uint64_t bits = (uint64_t)descriptor;
  int mode = modes[bits >> 62];
  if (field(bits, 49, 3) && mode != SWIZZLE_NONE) return MATRIX_BASE;
  if (field(bits, 14, 2) || field(bits, 30, 2) || field(bits, 46, 3) || field(bits, 52, 10)) return MATRIX_BITS;
  *matrix = (Matrix){16 * field(bits, 0, 14), 16 * field(bits, 16, 14), 16 * field(bits, 32, 14), mode};
  return 0;
}

// Offset of the byte `at` of K in a row of a K-major matrix, without the swizzle.
static int64_t along_k(const Matrix *matrix, const Pattern *pattern, int64_t row, int64_t at) {
  int64_t offset = row / CORE_ROWS * matrix->stride;
  if (pattern->span) return offset + row % CORE_ROWS * pattern->span + at;
  return offset + row % CORE_ROWS * CHUNK + at / CHUNK * matrix->leading;
}

// Likewise, of element k of a row of an MN-major matrix that begins `at` bytes behind the first row.
static int64_t along_mn(const Matrix *matrix, const Pattern *pattern, int64_t at, int64_t k) {
  if (!pattern->span)
    return at / CHUNK * matrix->stride + at % CHUNK + k / CORE_ROWS * matrix->leading + k % CORE_ROWS * CHUNK;
  int64_t offset = at / pattern->span * matrix->leading + at % pattern->span;
  return offset + k / pattern->rows * matrix->stride + k % pattern->rows * pattern->span;
}

void matrix_places(const Matrix *matrix, const MatrixRows *rows, int64_t *places) {
  const Pattern *pattern = &patterns[matrix->swizzle];
  int64_t unit = rows->mn_major ? rows->element_bytes : CHUNK, pieces = K_BYTES / unit;
  for (int64_t row = 0; row < rows->rows; row++)
    for (int64_t i = 0; i < pieces; i++) {
      int64_t offset = rows->mn_major ? along_mn(matrix, pattern, row * unit, i) : along_k(matrix, pattern, row, i * unit);
      int64_t address = matrix->address + offset;
      places[row * pieces + i] = (address ^ (address >> pattern->shift & pattern->mask)) / unit;
    }
}

// --- operands --------------------------------------------------------------------------------------------------------

enum { KEPT = 256, MEMORY = 1 << 16 };  // operands, and int64 for where they lie
enum { MOST_PLACES = MOST_ROWS * K_BYTES, MOST_CHUNKS = 1 << 14, WORD = 64 };  // of an operand; of a CTA

// Pieces of chunks that are marked: all as long as the first one where they are, else chunk by chunk.
static void find_pieces(SharedOperand *operand, const uint64_t *marked, int64_t *starts) {
  int64_t last = -2, length = 0, first_length = 0, count = 0;
  int even = 1;
  for (int64_t word = operand->low / CHUNK / WORD; word <= (operand->high - 1) / CHUNK / WORD; word++)
    for (uint64_t bits = marked[word]; bits; bits &= bits - 1) {
      int64_t chunk = word * WORD + __builtin_ctzll(bits);
      if (chunk == last + 1) {
        length++;
      } else {
        if (count > 1) even &= length == first_length;
        if (count == 1) first_length = length;
        length = 1;
        starts[count++] = chunk * CHUNK;
      }
      last = chunk;
    }
  even &= count <= 1 || length == first_length;
  operand->nbytes = CHUNK * length;
  if (!even) {
    count = 0;
    operand->nbytes = CHUNK;
    for (int64_t word = operand->low / CHUNK / WORD; word <= (operand->high - 1) / CHUNK / WORD; word++)
      for (uint64_t bits = marked[word]; bits; bits &= bits - 1)
        starts[count++] = (word * WORD + __builtin_ctzll(bits)) * CHUNK;
  }
  operand->starts = starts;
  operand->count = count;
}

// What is known of operands, which is the same everywhere: where they lie follows from what their key is made of.
typedef struct Kept { int64_t key; SharedOperand operand; } Kept;
static _Thread_local Kept kept[KEPT];
static _Thread_local int64_t memory[MEMORY], used;

void operands_make_room(void) {
  if (used + 2 * (MOST_PLACES + MOST_ROWS * K_BYTES / CHUNK) <= MEMORY) return;
  memset(kept, 0, sizeof kept);
  used = 0;
}

int shared_operand(const Matrix *matrix, const MatrixRows *rows, SharedOperand *operand) {
  int64_t offsets = matrix->address / CHUNK | matrix->leading / CHUNK << 14 | matrix->stride / CHUNK << 28;
  int64_t layout = matrix->swizzle | rows->mn_major << 3 | rows->element_bytes << 4 | rows->rows << 7;  // never 0
  int64_t key = offsets | layout << 42;
  Kept *entry = &kept[key_slot(&key, 1, KEPT)];
  *operand = entry->operand;
  if (entry->key == key) return 1;
  uint64_t marked[MOST_CHUNKS / WORD];
  int64_t unit = rows->mn_major ? rows->element_bytes : CHUNK, count = rows->rows * (K_BYTES / unit);
  int64_t *places = memory + used, low = INT64_MAX, high = 0;
  matrix_places(matrix, rows, places);
  for (int64_t i = 0; i < count; i++) {
    low = places[i] < low ? places[i] : low;
    high = places[i] > high ? places[i] : high;
  }
  SharedOperand found = {.places = places, .low = low * unit, .high = (high + 1) * unit};
  *operand = found;
  if (found.high > MOST_CHUNKS * CHUNK) return 0;
  memset(marked, 0, sizeof marked);
  for (int64_t i = 0; i < count; i++) {
    int64_t chunk = places[i] * unit / CHUNK;
    marked[chunk / WORD] |= (uint64_t)1 << chunk % WORD;
  }
  find_pieces(&found, marked, places + count);
  used += count + found.count;
  *entry = (Kept){key, found};
  *operand = found;
  return 1;
}
