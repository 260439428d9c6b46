// Vectors of GCC and Clang, as wide as the registers of the instruction set that the core is compiled for.
#pragma once
#include <stdint.h>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

#if defined(__AVX512BW__)
#define VECTOR 64
#elif defined(__AVX2__)
#define VECTOR 32
#else
#define VECTOR 16
#endif
enum { WORDS = VECTOR / 4, DOUBLES = VECTOR / 8 };  // lanes of 32 and of 64 bits

#define UNROLLED _Pragma("GCC unroll 16")

#define VECTOR_OF(type, bytes) typedef type __attribute__((vector_size(bytes), aligned(1), may_alias))
VECTOR_OF(int32_t, VECTOR) Ints;
VECTOR_OF(uint32_t, VECTOR) Bits;
VECTOR_OF(float, VECTOR) Floats;
VECTOR_OF(int64_t, VECTOR) Longs;
VECTOR_OF(uint64_t, VECTOR) LongBits;
VECTOR_OF(int16_t, VECTOR) Int16s;
VECTOR_OF(uint16_t, VECTOR) Bit16s;
VECTOR_OF(uint8_t, VECTOR) Bytes;
VECTOR_OF(double, VECTOR) Doubles;
VECTOR_OF(float, VECTOR / 2) HalfFloats;   // as many as Doubles
VECTOR_OF(int32_t, VECTOR / 2) HalfInts;
VECTOR_OF(uint32_t, VECTOR / 2) HalfBits;

// sums + products of pairs of 16-bit integers
static inline Ints dot2(Ints sums, Ints a, Ints b) {
#if defined(__AVX512VNNI__) && VECTOR == 64
  return (Ints)_mm512_dpwssd_epi32((__m512i)sums, (__m512i)a, (__m512i)b);
#elif VECTOR == 64
  return sums + (Ints)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif VECTOR == 32
  return sums + (Ints)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
  return sums + (Ints)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
  return sums + (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
#endif
}

// a * b + c where the product is exact: then it is the same with one rounding or two.
static inline Doubles add_product(Doubles c, Doubles a, Doubles b) {
#if VECTOR == 64
  return (Doubles)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
#elif defined(__FMA__) && VECTOR == 32
  return (Doubles)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
#else
  return a * b + c;
#endif
}

static inline Floats add_small_product(Floats c, Floats a, Floats b) {
#if VECTOR == 64
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__) && VECTOR == 32
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

static inline Int16s larger(Int16s x, Int16s y) {
#if VECTOR == 64
  return (Int16s)_mm512_max_epi16((__m512i)x, (__m512i)y);
#elif VECTOR == 32
  return (Int16s)_mm256_max_epi16((__m256i)x, (__m256i)y);
#elif defined(__SSE2__)
  return (Int16s)_mm_max_epi16((__m128i)x, (__m128i)y);
#else
  Int16s less = x < y;
  return (y & less) | (x & ~less);
#endif
}

static inline Bytes larger_bytes(Bytes x, Bytes y) {
#if VECTOR == 64
  return (Bytes)_mm512_max_epu8((__m512i)x, (__m512i)y);
#elif VECTOR == 32
  return (Bytes)_mm256_max_epu8((__m256i)x, (__m256i)y);
#elif defined(__SSE2__)
  return (Bytes)_mm_max_epu8((__m128i)x, (__m128i)y);
#else
  Bytes less = (Bytes)(x < y);
  return (y & less) | (x & ~less);
#endif
}

// The upper 16 bits of products.
static inline Bit16s high_products(Bit16s x, Bit16s y) {
#if VECTOR == 64
  return (Bit16s)_mm512_mulhi_epu16((__m512i)x, (__m512i)y);
#elif VECTOR == 32
  return (Bit16s)_mm256_mulhi_epu16((__m256i)x, (__m256i)y);
#elif defined(__SSE2__)
  return (Bit16s)_mm_mulhi_epu16((__m128i)x, (__m128i)y);
#else
  Bit16s result;
  for (int i = 0; i < VECTOR / 2; i++) result[i] = (uint16_t)((uint32_t)x[i] * y[i] >> 16);
  return result;
#endif
}

static inline Ints larger_words(Ints x, Ints y) {
#if VECTOR == 64
  return (Ints)_mm512_max_epi32((__m512i)x, (__m512i)y);
#elif VECTOR == 32
  return (Ints)_mm256_max_epi32((__m256i)x, (__m256i)y);
#else
  Ints less = x < y;
  return (y & less) | (x & ~less);
#endif
}

static inline int32_t largest_of(Ints x) {
#if VECTOR == 64
  return _mm512_reduce_max_epi32((__m512i)x);
#elif VECTOR == 32
  __m128i y = _mm_max_epi32(_mm256_castsi256_si128((__m256i)x), _mm256_extracti128_si256((__m256i)x, 1));
  y = _mm_max_epi32(y, _mm_shuffle_epi32(y, 0x4E));
  return _mm_cvtsi128_si32(_mm_max_epi32(y, _mm_shuffle_epi32(y, 0xB1)));
#else
  int32_t words[WORDS], largest;
  __builtin_memcpy(words, &x, sizeof words);
  largest = words[0];
  for (int i = 1; i < WORDS; i++) largest = words[i] > largest ? words[i] : largest;
  return largest;
#endif
}

// As many bytes as there are words.
static inline Ints words_of(const uint8_t *bytes) {
#if VECTOR == 64
  return (Ints)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)bytes));
#elif VECTOR == 32
  return (Ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)bytes));
#elif defined(__SSE2__)
  int32_t four;
  __builtin_memcpy(&four, bytes, sizeof four);
  __m128i zero = _mm_setzero_si128();
  return (Ints)_mm_unpacklo_epi16(_mm_unpacklo_epi8(_mm_cvtsi32_si128(four), zero), zero);
#else
  Ints words;
  for (int i = 0; i < WORDS; i++) words[i] = bytes[i];
  return words;
#endif
}

// Of words below 256.
static inline void store_bytes(uint8_t *to, Ints words) {
#if VECTOR == 64
  _mm_storeu_si128((__m128i *)to, _mm512_cvtepi32_epi8((__m512i)words));
#elif VECTOR == 32
  __m256i bytes = _mm256_packus_epi16(_mm256_packs_epi32((__m256i)words, (__m256i)words), _mm256_setzero_si256());
  int32_t fours[2] = {_mm256_extract_epi32(bytes, 0), _mm256_extract_epi32(bytes, 4)};
  __builtin_memcpy(to, fours, sizeof fours);
#elif defined(__SSE2__)
  __m128i bytes = _mm_packus_epi16(_mm_packs_epi32((__m128i)words, (__m128i)words), _mm_setzero_si128());
  int32_t four = _mm_cvtsi128_si32(bytes);
  __builtin_memcpy(to, &four, sizeof four);
#else
  for (int i = 0; i < WORDS; i++) to[i] = (uint8_t)words[i];
#endif
}

static inline Doubles doubles_of(HalfFloats x) {
#if VECTOR == 64
  return (Doubles)_mm512_cvtps_pd((__m256)x);
#elif VECTOR == 32
  return (Doubles)_mm256_cvtps_pd((__m128)x);
#else
  return __builtin_convertvector(x, Doubles);
#endif
}

static inline HalfFloats floats_of(Doubles x) {
#if VECTOR == 64
  return (HalfFloats)_mm512_cvtpd_ps((__m512d)x);
#elif VECTOR == 32
  return (HalfFloats)_mm256_cvtpd_ps((__m256d)x);
#else
  return __builtin_convertvector(x, HalfFloats);
#endif
}

static inline int any(Ints marks) {
#if VECTOR == 64
  return _mm512_test_epi32_mask((__m512i)marks, (__m512i)marks) != 0;
#elif VECTOR == 32
  return !_mm256_testz_si256((__m256i)marks, (__m256i)marks);
#else
  int64_t words[2];
  __builtin_memcpy(words, &marks, sizeof words);
  return (words[0] | words[1]) != 0;
#endif
}

static inline int any_half(HalfInts marks) {
#if VECTOR == 64
  return !_mm256_testz_si256((__m256i)marks, (__m256i)marks);
#else
  int64_t words[2] = {0};
  __builtin_memcpy(words, &marks, sizeof marks);
  return (words[0] | words[1]) != 0;
#endif
}
