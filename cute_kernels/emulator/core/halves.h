// FP16 and BF16 as bits, and FP32 rounded to them. Written out in integers: not every compiler has a type for FP16, and
// loops over lanes of these become vector instructions.
#pragma once
#include "bytecode.h"

enum { NAN_F16 = 0x7FFF };          // of FP16 and BF16 results
enum { NAN_F32 = 0x7FFFFFFF };      // PTX ISA: the canonical NaN of FP32 results

PURE u32 is_nan32(u32 x) { return (x & 0x7FFFFFFF) > 0x7F800000; }
// The bits of an FP32 result: every NaN is the same.
PURE u32 canonical(u32 x) { return is_nan32(x) ? NAN_F32 : x; }
// .ftz: subnormal numbers become zeros of their sign.
PURE u32 flushed(u32 x) { return (x & 0x7FFFFFFF) < 0x00800000 ? x & 0x80000000u : x; }
// .sat: into [0, 1], NaN to +0.
PURE u32 saturated(u32 x) { float a = float32(x); return a > 0 ? a < 1 ? x : 0x3F800000u : 0; }

PURE u32 wide_bf16(u16 x) { return (u32)x << 16; }
// Every NaN becomes the canonical one.
PURE u32 wide_f16(u16 x) {
  u32 sign = (u32)(x & 0x8000) << 16, magnitude = (u32)(x & 0x7FFF) << 13;
  // 2^112 is what the biases of the exponents differ by; the product is exact, of subnormal numbers too.
  u32 finite = bits32(float32(magnitude) * 0x1p112f);
  return (magnitude > 0x0F800000 ? NAN_F32 : magnitude == 0x0F800000 ? sign | 0x7F800000 : sign | finite);
}

// To nearest even.
PURE u16 narrow_bf16(u32 x) { return (u16)(is_nan32(x) ? NAN_F16 : (x + 0x7FFF + (x >> 16 & 1)) >> 16); }
PURE u16 narrow_f16(u32 x) {
  u32 sign = x >> 16 & 0x8000, magnitude = x & 0x7FFFFFFF;
  u32 normal = (magnitude - 0x38000000 + 0xFFF + (magnitude >> 13 & 1)) >> 13;
  // The sum with 1/2 rounds where the last bit of a subnormal FP16 is.
  u32 subnormal = bits32(float32(magnitude) + 0.5f) - 0x3F000000;
  u32 finite = magnitude < 0x38800000 ? subnormal : normal;
  u32 number = magnitude >= 0x47800000 ? 0x7C00 : finite;
  return (u16)(magnitude > 0x7F800000 ? NAN_F16 : sign | number);
}

// Rounding to odd: a second rounding to a format with at least two bits less is then right.
PURE double sum_to_odd(double a, double b) {
  double s = a + b, bb = s - a, error = (a - (s - bb)) + (b - bb);  // a + b == s + error exactly
  u64 bits = bits64(s), infinite = (u64)0x7FF << 52, magnitude = ~((u64)1 << 63);
  int even = error != 0 && (bits & magnitude) < infinite && (bits64(error) & magnitude) < infinite && !(bits & 1);
  int outwards = (error > 0) == (s > 0);
  return float64(bits + (even ? outwards ? (u64)1 : ~(u64)0 : 0));
}
PURE u32 f32_to_odd(double x) {
  float near = (float)x;
  double wide = (double)near;
  u32 bits = bits32(near);
  int inexact = wide != x && x == x, away = __builtin_fabs(wide) > __builtin_fabs(x);
  return inexact ? (bits - (u32)away) | 1 : bits;
}
