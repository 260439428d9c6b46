// Reads the rows of a matrix from shared memory, and decodes them.
#include <math.h>
#include <string.h>

#include "products.h"

enum { PIECE = 16 };  // bytes of a row of a K-major matrix that lie together

int initialised(const MmaOperand *from, int64_t rows, int64_t unit) {
  if (!from->states) return 1;
  int64_t pieces = rows * (K_BYTES / unit);
  uint64_t wrong = 0;
  if (unit == 16)
    for (int64_t i = 0; i < pieces; i++) {
      uint64_t words[2];
      memcpy(words, from->states + 16 * from->places[i], sizeof words);
      wrong |= (words[0] ^ 0x0101010101010101u) | (words[1] ^ 0x0101010101010101u);
    }
  else
    for (int64_t i = 0; i < pieces; i++)
      for (int64_t j = 0; j < unit; j++) wrong |= from->states[unit * from->places[i] + j] ^ 1u;
  return !wrong;
}

static inline void read_row(uint8_t *row, const MmaOperand *from, int64_t index, int64_t unit) {
  const int64_t *places = from->places + index * (K_BYTES / unit);
  switch (unit) {
    case 16: for (int i = 0; i < 2; i++) memcpy(row + 16 * i, from->data + 16 * places[i], 16); break;
    case 4: for (int i = 0; i < 8; i++) memcpy(row + 4 * i, from->data + 4 * places[i], 4); break;
    case 2: for (int i = 0; i < 16; i++) memcpy(row + 2 * i, from->data + 2 * places[i], 2); break;
    default: for (int i = 0; i < 32; i++) row[i] = from->data[places[i]];
  }
}

enum { CODES = VECTOR > 16 ? 16 : 8 };  // elements that are decoded together
VECTOR_OF(uint8_t, CODES) Codes;
VECTOR_OF(int16_t, 2 * CODES) Shorts;
VECTOR_OF(uint16_t, 2 * CODES) ShortBits;

static inline Shorts widened(const uint8_t *codes) {
#if defined(__AVX2__)
  return (Shorts)_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)codes));
#elif defined(__SSE2__)
  return (Shorts)_mm_unpacklo_epi8(_mm_loadl_epi64((const __m128i *)codes), _mm_setzero_si128());
#else
  return __builtin_convertvector(*(const Codes *)codes, Shorts);
#endif
}

// Values of E4M3 in units of 2^-9, right up to 60. `most`: codes of the largest magnitudes so far.
static inline Shorts small_e4m3(Shorts all, Shorts *most) {
  Shorts code = all & 127, exponent = code >> 3, normal = exponent != 0, larger = code > *most;
  Shorts value = (code & 7) | (normal & 8);
  *most = (code & larger) | (*most & ~larger);
  exponent += normal;
#if defined(__AVX512BW__)
  value <<= exponent;
#else  // by constants: few instruction sets shift vectors of 16 bits by others
  for (int bit = 0; bit < 4; bit++) {
    Shorts shifts = (exponent & (int16_t)(1 << bit)) != 0;
    value = (value << (1 << bit) & shifts) | (value & ~shifts);
  }
#endif
  Shorts sign = -(all >> 7);
  return (Shorts)((ShortBits)(value ^ sign) - (ShortBits)sign);  // beyond 60 this may wrap around
}

static inline void small_row(const uint8_t *codes, int16_t *out, int64_t element, int16_t negated, Shorts *most, Shorts *digits) {
  for (int i = 0; i < PIECE; i += CODES) {
    Shorts value = widened(codes + i);
    if (element == E4M3) value = small_e4m3(value, most);
    if (element == S8) value = (value ^ 128) - 128;
    *digits |= value;
    *(Shorts *)(out + i) = (value ^ (int16_t)-negated) + negated;
  }
}

static int64_t largest_small(Shorts most, int64_t element) {
  if (element != E4M3) return element == S8 ? 128 : 255;
  int code = 0;
  for (int i = 0; i < CODES; i++) code = most[i] > code ? most[i] : code;
  return code < 8 ? code : (8 | (code & 7)) << ((code >> 3) - 1);  // of NaN, too large a one
}

// Puts LANE_GROUP rows of pairs side by side.
static inline void transpose(int32_t block[LANE_GROUP][PAIRS], int32_t *columns) {
#if VECTOR == 64
  __m512i a[LANE_GROUP], b[LANE_GROUP];
  UNROLLED for (int i = 0; i < LANE_GROUP; i++) a[i] = _mm512_loadu_si512(block[i]);
  UNROLLED for (int i = 0; i < LANE_GROUP; i += 2) {
    b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
  }
  UNROLLED for (int i = 0; i < LANE_GROUP; i += 4) UNROLLED for (int j = 0; j < 2; j++) {
    a[i + 2 * j] = _mm512_unpacklo_epi64(b[i + j], b[i + j + 2]);
    a[i + 2 * j + 1] = _mm512_unpackhi_epi64(b[i + j], b[i + j + 2]);
  }
  // Quarter q of a[4 g + j] has rows 4 g to 4 g + 3 of column 4 q + j.
  UNROLLED for (int j = 0; j < 4; j++) {
    __m512i even0 = _mm512_shuffle_i32x4(a[j], a[j + 4], 0x88), even1 = _mm512_shuffle_i32x4(a[j + 8], a[j + 12], 0x88);
    __m512i odd0 = _mm512_shuffle_i32x4(a[j], a[j + 4], 0xDD), odd1 = _mm512_shuffle_i32x4(a[j + 8], a[j + 12], 0xDD);
    int32_t *to = columns + TENSOR_LANES * j;
    _mm512_storeu_si512(to, _mm512_shuffle_i32x4(even0, even1, 0x88));
    _mm512_storeu_si512(to + 4 * TENSOR_LANES, _mm512_shuffle_i32x4(odd0, odd1, 0x88));
    _mm512_storeu_si512(to + 8 * TENSOR_LANES, _mm512_shuffle_i32x4(even0, even1, 0xDD));
    _mm512_storeu_si512(to + 12 * TENSOR_LANES, _mm512_shuffle_i32x4(odd0, odd1, 0xDD));
  }
#else
  for (int k = 0; k < PAIRS; k++)
    for (int lane = 0; lane < LANE_GROUP; lane++) columns[TENSOR_LANES * k + lane] = block[lane][k];
#endif
}

static inline void load_small_rows(
    Operand *to, const MmaOperand *from, int64_t rows, int64_t first, const MmaType *type, int64_t element,
    int side_by_side) {
  uint8_t row[K_BYTES];
  Shorts most = {0}, digits = {0};
  int16_t negated = type->negated != 0;
  _Alignas(64) int32_t block[LANE_GROUP][PAIRS];
  for (int64_t i = 0; i < rows; i++) {
    int16_t *out = side_by_side ? (int16_t *)block[i % LANE_GROUP] : to->pairs + K_BYTES * (first + i);
    const uint8_t *low = row, *high = row + PIECE;
    if (type->unit == PIECE) {
      low = from->data + PIECE * from->places[2 * i];
      high = from->data + PIECE * from->places[2 * i + 1];
    } else {
      read_row(row, from, i, type->unit);
    }
    small_row(low, out, element, negated, &most, &digits);
    small_row(high, out + PIECE, element, negated, &most, &digits);
    if (side_by_side && i % LANE_GROUP == LANE_GROUP - 1) transpose(block, (int32_t *)to->pairs + i - (LANE_GROUP - 1));
  }
  int64_t largest = largest_small(most, element);
  to->most = first && to->most > largest ? to->most : largest;
  if (!first) to->digits = 0;
  for (int i = 0; i < CODES; i++) to->digits |= (uint16_t)digits[i];
}

void load_small(
    Operand *to, const MmaOperand *from, int64_t rows, int64_t first, const MmaType *type, int side_by_side) {
  if (type->element != E4M3) load_small_rows(to, from, rows, first, type, type->element, side_by_side);
  else if (side_by_side) load_small_rows(to, from, rows, first, type, E4M3, 1);
  else load_small_rows(to, from, rows, first, type, E4M3, 0);
}

void load_codes(uint8_t (*to)[K_BYTES], const MmaOperand *from, int64_t rows, int64_t unit) {
  for (int64_t i = 0; i < rows; i++) read_row(to[i], from, i, unit);
}

static inline float as_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

static inline float float_of_e4m3(uint32_t code) {
  float size = (code & 127) == 127 ? __builtin_nanf("") : as_float((code & 127) << 20) * 0x1p120f;
  return code & 128 ? -size : size;
}

#if defined(__F16C__)
static inline void floats_of_halves(const uint16_t *halves, float *out, int count) {
  for (int i = 0; i < count; i += 8)
    _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(halves + i))));
}
#else
static inline float float_of_half(uint32_t half) {
  uint32_t size = (half & 0x7FFF) << 13, sign = (half & 0x8000) << 16;
  uint32_t special = (half & 0x7C00) == 0x7C00 ? 0x7F800000 : 0;
  float value = as_float(size) * 0x1p112f;  // moves the exponent, and makes numbers of subnormal ones
  memcpy(&size, &value, sizeof size);
  return as_float(size | special | sign);
}

static inline void floats_of_halves(const uint16_t *halves, float *out, int count) {
  for (int i = 0; i < count; i++) out[i] = float_of_half(halves[i]);
}
#endif

static inline void decode_row(const uint8_t *row, int64_t element, float *restrict out) {
  uint16_t halves[K_BYTES];
  uint32_t words[8];
  memcpy(words, row, sizeof words);
  if (element == E5M2)
    for (int i = 0; i < 32; i++) halves[i] = (uint16_t)(row[i] << 8);
  else
    memcpy(halves, row, K_BYTES);
  switch (element) {
    case E4M3: for (int i = 0; i < 32; i++) out[i] = float_of_e4m3(row[i]); break;
    case E5M2: floats_of_halves(halves, out, 32); break;
    case F16: floats_of_halves(halves, out, 16); break;
    case BF16: for (int i = 0; i < 16; i++) out[i] = as_float((uint32_t)halves[i] << 16); break;
    case TF32: for (int i = 0; i < 8; i++) out[i] = as_float(words[i] & 0xFFFFE000); break;  // 19 bits are read
    case S8: for (int i = 0; i < 32; i++) out[i] = (int8_t)row[i]; break;
    default: for (int i = 0; i < 32; i++) out[i] = row[i];
  }
}

void load_halves(uint16_t (*to)[K_BYTES], const MmaOperand *from, int64_t rows, const MmaType *type) {
  uint8_t row[K_BYTES];
  float values[K_BYTES];
  for (int64_t i = 0; i < rows; i++) {
    read_row(row, from, i, type->unit);
    decode_row(row, type->element, values);
    for (int j = 0; j < K_BYTES; j += DOUBLES) {
      Longs bits = halves_of(doubles_of(*(const HalfFloats *)(values + j)));
      for (int k = 0; k < DOUBLES; k++) to[i][j + k] = (uint16_t)bits[k];
    }
  }
}

static inline Bits smaller(Bits x, Bits y) {
  Bits less = (Bits)((Ints)x < (Ints)y);
  return (x & less) | (y & ~less);
}

// The largest finite magnitude of a row; `lowest`: bits of FP32 of the smallest last digits so far.
static inline float measure(const float *values, int k, Bits *lowest) {
  Bits most = {0};
  for (int j = 0; j < k; j += WORDS) {
    Bits bits = *(const Bits *)(values + j) & INT32_MAX;
    bits &= (Bits)(bits < 0x7F800000);
    most = ~smaller(~most, ~bits);
    Bits digits = (bits & 0x7FFFFF) | 0x800000;
    // A power of two that is too small is 0 here, which `grid_of` takes for no grid.
    Floats unit = (Floats)(bits & 0x7F800000) * (__builtin_convertvector((Ints)(digits & -digits), Floats) * 0x1p-23f);
    Bits absent = (Bits)(bits == 0);
    *lowest = smaller(*lowest, ((Bits)unit & ~absent) | (absent & 0x7F800000));
  }
  uint32_t largest = 0;
  for (int i = 0; i < WORDS; i++) largest = most[i] > largest ? most[i] : largest;
  return as_float(largest);
}

static inline void load_rows(
    Operand *to, const MmaOperand *from, int64_t rows, int64_t first, const MmaType *type, int k, int side_by_side) {
  uint8_t row[K_BYTES];
  _Alignas(64) float block[LANE_GROUP][MOST_K] = {0};  // zeros behind the last of few elements
  float sign = type->negated ? -1 : 1;
  Bits lowest = (Bits){0} + 0x7F800000;
  for (int64_t i = 0; i < rows; i++) {
    float *values = block[i % LANE_GROUP];
    read_row(row, from, i, type->unit);
    decode_row(row, type->element, values);
    to->largest[first + i] = measure(values, k, &lowest);
    if (!side_by_side) {
      double *out = to->values + k * (first + i);
      for (int j = 0; j < k; j += DOUBLES) *(Doubles *)(out + j) = doubles_of(*(const HalfFloats *)(values + j) * sign);
    } else if (i % LANE_GROUP == LANE_GROUP - 1) {
      double *columns = to->values + i - (LANE_GROUP - 1);
      for (int j = 0; j < k; j++)
        for (int lane = 0; lane < LANE_GROUP; lane++) columns[TENSOR_LANES * j + lane] = block[lane][j] * sign;
    }
  }
  uint32_t least = first ? to->lowest : 0x7F800000;
  for (int i = 0; i < WORDS; i++) least = lowest[i] < least ? lowest[i] : least;
  to->lowest = least;
}

void load_values(
    Operand *to, const MmaOperand *from, int64_t rows, int64_t first, const MmaType *type, int side_by_side) {
  load_rows(to, from, rows, first, type, elements(type->element), side_by_side);
}

// The exponent as it is encoded, of a finite number that is not 0.
static inline int16_t exponent_of(float value, int lowest) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  int encoded = (int)(bits >> 23 & 255), exponent = encoded - 127 > lowest ? encoded - 127 : lowest;
  return (int16_t)(bits << 1 == 0 || encoded == 255 ? NO_EXPONENT : exponent);
}

static inline void load_row_terms(
    Terms *to, const MmaOperand *from, int64_t index, int64_t row, const MmaType *type, int k, float *restrict finite,
    int16_t *restrict exponents) {
  uint8_t bytes[K_BYTES];
  float *restrict values = to->values + k * row;
  uint32_t sign = (uint32_t)(type->negated != 0) << 31;
  int lowest = lowest_exponent(type->element), special = 0, least = INT16_MAX;
  read_row(bytes, from, index, type->unit);
  decode_row(bytes, type->element, values);
  for (int j = 0; j < k; j++) {
    uint32_t bits;
    memcpy(&bits, &values[j], sizeof bits);
    bits ^= sign;
    int is_special = (bits & 0x7F800000) == 0x7F800000;
    special |= is_special;
    values[j] = as_float(bits);
    finite[j] = as_float(is_special ? 0 : bits);
    exponents[j] = exponent_of(values[j], lowest);
    int exponent = exponents[j] == NO_EXPONENT ? INT16_MAX : exponents[j];
    least = exponent < least ? exponent : least;
  }
  to->least[row] = least;
  to->special[row] = -special;
}

static inline float positive(float value) { return value > 0 ? value : 0; }

// Puts the terms of LANE_GROUP rows of A, which begin at `lane`, side by side. `block` is known where this is compiled:
// the places in `sizes` are not divided out for each element.
static inline void spread(
    Terms *to, float rows[LANE_GROUP][MOST_K], int16_t exponents[LANE_GROUP][MOST_K], int64_t lane, int k, int block,
    int narrow) {
  enum { TOGETHER = VECTOR / 4 < LANE_GROUP ? VECTOR / 4 : LANE_GROUP };  // lanes, in one block with those beside them
  int together = block < TOGETHER ? block : TOGETHER;
  for (int j = 0; j < k; j++) {
    _Alignas(64) float column[LANE_GROUP];
    for (int l = 0; l < LANE_GROUP; l++) column[l] = rows[l][j];
    for (int l = 0; l < LANE_GROUP; l++) to->exponents[TENSOR_LANES * j + lane + l] = exponents[l][j];
    for (int start = 0; start < LANE_GROUP; start += together) {
      int64_t first = lane + start, place = (first / block * k + j) * PLANES * block + first % block;
      for (int l = 0; l < together; l++) {
        float value = column[start + l];
        if (narrow) {
          to->narrow_sizes[place + l] = positive(value), to->narrow_sizes[place + block + l] = positive(-value);
          to->narrow_sizes[place + 2 * block + l] = value;
        } else {
          to->wide_sizes[place + l] = positive(value), to->wide_sizes[place + block + l] = positive(-value);
          to->wide_sizes[place + 2 * block + l] = value;
        }
      }
    }
  }
}

static void load_terms_of_a(Terms *to, const MmaOperand *from, int64_t rows, const MmaType *type, int k, int narrow) {
  _Alignas(64) float group[LANE_GROUP][MOST_K];
  int16_t exponents[LANE_GROUP][MOST_K];
  for (int64_t i = 0; i < rows; i++) {
    int64_t last = i % LANE_GROUP;
    load_row_terms(to, from, i, i, type, k, group[last], exponents[last]);
    if (last < LANE_GROUP - 1) continue;
    if (narrow) spread(to, group, exponents, i - last, k, NARROW_BLOCK, 1);
    else spread(to, group, exponents, i - last, k, WIDE_BLOCK, 0);
  }
}

static void load_terms_of_b(
    Terms *to, const MmaOperand *from, int64_t rows, int64_t first, const MmaType *type, int k, int narrow) {
  _Alignas(64) float finite[MOST_K];
  for (int64_t i = 0; i < rows; i++) {
    int64_t row = first + i;
    load_row_terms(to, from, i, row, type, k, finite, to->exponents + k * row);
    for (int j = 0; j < k; j++) to->negative[k * row + j] = finite[j] < 0;
    if (narrow)
      for (int j = 0; j < k; j++) to->narrow_sizes[k * row + j] = __builtin_fabsf(finite[j]);
    else
      for (int j = 0; j < k; j++) to->wide_sizes[k * row + j] = __builtin_fabsf(finite[j]);
  }
}

void load_terms(
    Terms *to, const MmaOperand *from, int64_t rows, int64_t first, const MmaType *type, int side_by_side, int narrow) {
  int k = elements(type->element);
  if (side_by_side) load_terms_of_a(to, from, rows, type, k, narrow);
  else load_terms_of_b(to, from, rows, first, type, k, narrow);
}
