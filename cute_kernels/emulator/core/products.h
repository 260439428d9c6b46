// What exact products (matrix.c) and those of silicon (silicon.c) have in common: where D lies, and its formats.
#pragma once
#include <string.h>

#include "matrix.h"
#include "vectors.h"

// The cells of a row of B (a column of D), and where among them a row of A is.
static inline uint32_t *row_of(const Mma *mma, uint32_t *cells, int64_t row) {
  if (row >= mma->wrap) cells += mma->wrap_offset, row -= mma->wrap;
  return cells + row * mma->column_stride;
}

static inline int64_t lane_offset(const Mma *mma, int64_t lane) {
  return lane / LANE_GROUP * mma->group_stride + lane % LANE_GROUP;
}

static inline double power(int exponent) {
  uint64_t bits = (uint64_t)(exponent + 1023) << 52;
  double value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

// FP16 bits of doubles, rounded to nearest even whatever the rounding mode is; NaN is 0x7FFF.
static inline Longs halves_of(Doubles values) {
  Longs bits = (Longs)values, sign = bits >> 48 & 0x8000, size = bits & INT64_MAX, one = (Longs){0} + 1;
  Longs normal = (size + (one << 41) - 1 + (size >> 42 & 1)) >> 42;
  normal -= (1023 - 15) << 10;
  // A multiple of 2^-24 is a significand shifted by the exponent; beyond 55 bits nothing is left of it.
  Longs shift = 1051 - (size >> 52), far = shift > 55, wrong = far | (shift < 1);
  shift = (shift & ~wrong) | (55 & wrong);
  LongBits digits = (LongBits)((size & ((one << 52) - 1)) | one << 52);
  LongBits odd = digits >> (LongBits)shift & 1;
  Longs tiny = (Longs)((digits + ((LongBits)one << (LongBits)(shift - 1)) - 1 + odd) >> (LongBits)shift);
  Longs is_tiny = (Doubles)size < 0x1p-14, is_large = (Doubles)size >= 65520.0, is_nan = values != values;
  Longs result = (tiny & is_tiny) | (normal & ~is_tiny);
  result = (is_large & 0x7C00) | (~is_large & result);
  return (is_nan & 0x7FFF) | (~is_nan & (result | sign));
}

// FP32 bits of doubles, rounded as the rounding mode says; numbers that are too large are infinities.
static inline HalfBits wide_bits(Doubles sum) {
  HalfBits sign = __builtin_convertvector((LongBits)sum >> 32, HalfBits) & 0x80000000;
  Longs size = (Longs)sum & INT64_MAX;
  HalfBits large = (HalfBits)__builtin_convertvector((Longs)((Doubles)size >= 0x1p128), HalfInts);
  return ((HalfBits)floats_of(sum) & ~large) | ((sign | 0x7F800000) & large);
}

static inline uint32_t half_bits(double value) { return (uint32_t)halves_of((Doubles){0} + value)[0]; }

// Values of FP16 in the lower halves of cells.
static inline Doubles values_of_halves(HalfBits cells) {
  HalfBits special = (HalfBits)((cells & 0x7C00) == 0x7C00) & 0x7F800000;
  HalfFloats value = (HalfFloats)((cells & 0x7FFF) << 13) * 0x1p112f;
  value = (HalfFloats)((HalfBits)value | special | (cells & 0x8000) << 16);
  return doubles_of(value);
}

static inline Doubles old_values(const uint32_t *cells, int halves, int accumulate) {
  if (!accumulate) return (Doubles){0};
  if (halves) return values_of_halves(*(const HalfBits *)cells);
  return doubles_of(*(const HalfFloats *)cells);
}
