// Conversions between floats and integers; the format is that of operations.h. No include guard: it is included twice.
#ifndef TO_INTEGERS
#include <math.h>

#include "halves.h"

// Rounded by a mode and cut to [low, high]. 32 bits and fewer are exact in FP64.
PURE u32 rounded(double x, double low, double high, u32 of_nan) {
  double cut = x >= high ? high : x > low ? x : low;
  return x == x ? (u32)(s64)cut : of_nan;
}
RARE u64 rounded_s64(double x) {
  double inside = x > -0x1p63 && x < 0x1p63 ? x : 0;
  return x >= 0x1p63 ? INT64_MAX : inside == x ? (u64)(s64)inside : (u64)1 << 63;  // that of NaN too
}
RARE u64 rounded_u64(double x) {
  double inside = x > 0 && x < 0x1p64 ? x : 0;
  return x >= 0x1p64 ? UINT64_MAX : x == x ? (u64)inside : (u64)1 << 63;
}
#define FLUSHED(x) float32(flushed(x))
// NaN becomes 0, but the highest bit where source or result has 64 bits.
#define TO_INTEGER(mode, round, k, n, low, high)                                                   \
  O1(cvt_##mode##_##k##n##_f32, u##n, f32, rounded(round((double)a), low, high, 0))                \
  O1(cvt_##mode##_ftz_##k##n##_f32, u##n, u32, rounded(round((double)FLUSHED(a)), low, high, 0))   \
  O1(cvt_##mode##_##k##n##_f64, u##n, f64, rounded(round(a), low, high, 1u << (n - 1)))
#define TO_64_BITS(mode, round, k)                                                                 \
  O1(cvt_##mode##_##k##64_f32, u64, f32, rounded_##k##64(round((double)a)))                        \
  O1(cvt_##mode##_ftz_##k##64_f32, u64, u32, rounded_##k##64(round((double)FLUSHED(a))))           \
  O1(cvt_##mode##_##k##64_f64, u64, f64, rounded_##k##64(round(a)))
#define TO_INTEGERS(mode, round)                                                                   \
  TO_INTEGER(mode, round, s, 8, -0x1p7, 0x1p7 - 1) TO_INTEGER(mode, round, u, 8, 0, 0x1p8 - 1)     \
  TO_INTEGER(mode, round, s, 16, -0x1p15, 0x1p15 - 1)                                              \
  TO_INTEGER(mode, round, u, 16, 0, 0x1p16 - 1)                                                    \
  TO_INTEGER(mode, round, s, 32, -0x1p31, 0x1p31 - 1)                                              \
  TO_INTEGER(mode, round, u, 32, 0, 0x1p32 - 1)                                                    \
  TO_64_BITS(mode, round, s) TO_64_BITS(mode, round, u)                                            \
  O1(cvt_##mode##_f32, u32, f32, canonical(bits32((float)round((double)a))))

// .relu: negative numbers become zero, NaN stays. .satfinite: nothing beyond the largest number.
PURE u32 positive(u32 x) { return is_nan32(x) || float32(x) > 0 ? x : 0; }
PURE u32 within(u32 x, u32 largest) {
  u32 magnitude = x & 0x7FFFFFFF;
  return is_nan32(x) || magnitude < largest ? x : (x & 0x80000000u) | largest;
}
PURE u16 cut_bf16(u32 x) { return (u16)(is_nan32(x) ? NAN_F16 : x >> 16); }
enum { LARGEST_F16 = 0x477FE000, LARGEST_BF16 = 0x7F7F0000 };
#define TO_HALF(name, narrow, largest)                                                             \
  O1(name, u16, u32, narrow(a)) O1(name##_relu, u16, u32, narrow(positive(a)))                     \
  O1(name##_satfinite, u16, u32, narrow(within(a, largest)))                                       \
  O1(name##_satfinite_relu, u16, u32, narrow(within(positive(a), largest)))
#define FROM_INTEGER(k, n)                                                                         \
  O1(cvt_f32_##k##n, f32, k##n, (float)a) O1(cvt_f64_##k##n, f64, k##n, (double)a)
#define HALF_FROM_INTEGER(k, n)                                                                    \
  O1(cvt_f16_##k##n, u16, k##n, narrow_f16(f32_to_odd((double)a)))                                 \
  O1(cvt_bf16_##k##n, u16, k##n, narrow_bf16(f32_to_odd((double)a)))
PURE u32 rounded_tf32(u32 x, u32 half) {
  return (x & 0x7FFFFFFF) < 0x7F800000 ? (x + half) & 0xFFFFE000u : x;
}

// Rounded to `e` bits of exponent, with the bias of IEEE 754, and `f` of fraction: the code of a finite |x|, FP64. By
// random numbers of so many bits: away from zero where their sum with the bits that are dropped has a carry.
enum { TO_NEAREST, TO_ZERO, DOWN, UP, BY_RANDOM, TO_ODD };
PURE u64 rounded_up(int mode, u64 kept, u64 rest, int shift, int negative, u64 random, int bits) {
  u64 half = (u64)1 << (shift - 1);
  return mode == TO_NEAREST ? rest > half || (rest == half && (kept & 1))
       : mode == BY_RANDOM ? (rest + (random << (shift - bits))) >> shift
       : mode == TO_ODD ? rest && !(kept & 1) : mode == (negative ? DOWN : UP) && rest;
}
RARE u64 code_of(u64 x, int e, int f, int mode, u64 random, int bits) {
  int exponent = (int)(x >> 52 & 0x7FF), least = 1025 - (1 << (e - 1));
  u64 number = (x & (((u64)1 << 52) - 1)) | (u64)(exponent > 0) << 52;
  int below = exponent < least ? least - exponent : 0, shift = 52 - f + below;
  for (; shift > 63; shift--) number = number > 1 ? number >> 1 | (number & 1) : number;  // that bits are lost is kept
  u64 kept = number >> shift, rest = number & (((u64)1 << shift) - 1);
  kept += rounded_up(mode, kept, rest, shift, (int)(x >> 63), random, bits);
  return below ? kept : ((u64)(exponent - least) << f) + kept;
}
// Of a format with infinities: NaN of 16 bits is canonical, that of FP32 keeps the upper bits of its payload.
RARE u32 narrow64(double x, int e, int f, int mode) {
  u64 word = bits64(x), magnitude = word & ~((u64)1 << 63), infinity = (((u64)1 << e) - 1) << f;
  if (magnitude > (u64)0x7FF << 52) return f == 23 ? bits32((float)x) : NAN_F16;
  u64 code = magnitude == (u64)0x7FF << 52 ? infinity : code_of(word, e, f, mode, 0, 0);
  int outwards = mode == TO_NEAREST || mode == (word >> 63 ? DOWN : UP) || magnitude == (u64)0x7FF << 52;
  return (u32)(word >> 63) << (e + f) | (u32)(code < infinity ? code : infinity - !outwards);
}
RARE u32 random_half(u32 x, u32 random, int e, int f, int bits) {
  u64 number = bits64((double)float32(x)), infinity = ((1u << e) - 1) << f;
  u64 code = code_of(number, e, f, BY_RANDOM, random & ((1u << bits) - 1), bits);
  u32 finite = (x & 0x7FFFFFFF) < 0x7F800000;
  return is_nan32(x) ? NAN_F16 : x >> 31 << 15 | (u32)(finite && code < infinity ? code : infinity);
}
// 64 bits to FP64.
RARE double wide64(u64 magnitude, int negative, int mode) {
  int shift = magnitude >> 53 ? 11 - __builtin_clzll(magnitude) : 0;
  u64 kept = magnitude >> shift, rest = magnitude & (((u64)1 << shift) - 1);
  if (shift) kept += rounded_up(mode, kept, rest, shift, negative, 0, 0);
  double number = (double)kept * float64((u64)(1023 + shift) << 52);
  return negative ? -number : number;
}
#define WIDE_INTEGER(name, mode)                                                                   \
  O1(cvt_f64_s64_##name, f64, s64, wide64(a < 0 ? -(u64)a : (u64)a, a < 0, mode))                  \
  O1(cvt_f64_u64_##name, f64, u64, wide64(a, 0, mode))
#define FROM_DOUBLE(name, mode)                                                                    \
  O1(cvt_f16_f64_##name, u16, f64, narrow64(a, 5, 10, mode))                                       \
  O1(cvt_bf16_f64_##name, u16, f64, narrow64(a, 8, 7, mode))
#define TO_HALF_BY_RANDOM(t, e, f, bits, largest)                                                  \
  O2(cvt_##t##_f32_rs, u16, u32, u16, random_half(a, b, e, f, bits))                               \
  O2(cvt_##t##_f32_rs_relu, u16, u32, u16, random_half(positive(a), b, e, f, bits))                \
  O2(cvt_##t##_f32_rs_satfinite, u16, u32, u16, random_half(within(a, largest), b, e, f, bits))    \
  O2(cvt_##t##_f32_rs_satfinite_relu, u16, u32, u16,                                               \
     random_half(within(positive(a), largest), b, e, f, bits))
PURE u16 cut_f16(u32 x) { return (u16)narrow64((double)float32(x), 5, 10, TO_ZERO); }
enum { LARGEST_TF32 = 0x7F7FE000 };
#define TO_TF32(mode, ...)                                                                         \
  PURE u32 mode##_tf32(u32 x) { return __VA_ARGS__; }
#define OF_TF32(mode)                                                                              \
  O1(cvt_##mode##_tf32, u32, u32, mode##_tf32(a))                                                  \
  O1(cvt_##mode##_tf32_relu, u32, u32, mode##_tf32(positive(a)))                                   \
  O1(cvt_##mode##_tf32_satfinite, u32, u32, mode##_tf32(within(a, LARGEST_TF32)))                  \
  O1(cvt_##mode##_tf32_satfinite_relu, u32, u32, mode##_tf32(within(positive(a), LARGEST_TF32)))
TO_TF32(rna, rounded_tf32(x, 0x1000))
TO_TF32(rn, is_nan32(x) ? NAN_F32 : rounded_tf32(x, 0xFFF + (x >> 13 & 1)))
TO_TF32(rz, is_nan32(x) ? NAN_F32 : x & 0xFFFFE000u)

// Codes of eight bits and fewer: `e` bits of exponent and `f` of fraction, with the bias of IEEE 754. To nearest even;
// what is too large becomes the largest number.
RARE u8 narrow_code(u32 x, u32 e, u32 f, u32 largest, u32 of_nan) {
  u32 magnitude = x & 0x7FFFFFFF, bias = (1u << (e - 1)) - 1, dropped = 23 - f;
  u32 normal = (magnitude + (1u << (dropped - 1)) - 1 + (magnitude >> dropped & 1)) >> dropped;
  // The last bit of this number is where that of a subnormal code is: the sum rounds there.
  u32 unit = (127 + 1 + 23 - bias - f) << 23;
  u32 subnormal = bits32(float32(magnitude) + float32(unit)) - unit;
  u32 code = magnitude < (128 - bias) << 23 ? subnormal : normal - ((127 - bias) << f);
  u32 number = magnitude >= 0x7F800000 || code > largest ? largest : code;
  return (u8)(is_nan32(x) ? of_nan : x >> 31 << (e + f) | number);
}
// .relu: numbers with a sign become zero.
PURE u32 without_sign(u32 x) { return x >> 31 && !is_nan32(x) ? 0 : x; }
// `imm`: whether the random bits count from the other end, as those of a number's neighbour do (B200).
RARE u8 random_code(u32 x, u32 random, int from_low, int e, int f, u32 largest, u32 of_nan) {
  u32 finite = (x & 0x7FFFFFFF) < 0x7F800000, turned = 0;
  for (int bit = 0; bit < 16; bit++) turned |= (random >> bit & 1) << (15 - bit);
  if (from_low) random = turned;
  u64 code = finite ? code_of(bits64((double)float32(x)), e, f, BY_RANDOM, random, 16) : largest;
  return (u8)(is_nan32(x) ? of_nan : x >> 31 << (e + f) | (code < largest ? code : largest));
}
#define TO_CODE(t, e, f, largest, of_nan)                                                          \
  O2(cvt_##t##_f32_rs, u8, u32, u16, random_code(a, b, imm, e, f, largest, of_nan))                \
  O2(cvt_##t##_f32_rs_relu, u8, u32, u16, random_code(without_sign(a), b, imm, e, f, largest, of_nan))  \
  O1(cvt_##t##_f32, u8, u32, narrow_code(a, e, f, largest, of_nan))                                \
  O1(cvt_##t##_f32_relu, u8, u32, narrow_code(without_sign(a), e, f, largest, of_nan))
// Finite codes to FP16, exactly: 2^(127 - bias) is what the exponents of FP32 differ by.
RARE u16 wide_code(u32 code, u32 e, u32 f) {
  u32 magnitude = (code & ((1u << (e + f)) - 1)) << (23 - f), bias = (1u << (e - 1)) - 1;
  u16 number = narrow_f16(bits32(float32(magnitude) * float32((254 - bias) << 23)));
  return (u16)(number | (code >> (e + f) & 1) << 15);
}
PURE u16 wide_e4m3(u8 code) { return (code & 0x7F) == 0x7F ? NAN_F16 : wide_code(code, 4, 3); }
PURE u16 wide_e5m2(u8 code) { return (code & 0x7F) > 0x7C ? NAN_F16 : (u16)(code << 8); }
// `imm`: how far to the right the code is shifted first.
#define FROM_CODE(t, e, f) O1(cvt_f16_##t, u16, u8, wide_code((u32)a >> imm, e, f))

// Scales: the exponent field of FP32, of subnormal numbers 0; upwards one more where it is less than the magnitude.
PURE u32 scale_rz(u32 x) { return x >> 23 & 255; }
PURE u32 scale_rp(u32 x) {
  u32 scale = scale_rz(x), fraction = x & 0x7FFFFF;
  // Code 0 is 2^-127, a subnormal number.
  return scale < 255 && fraction > (scale ? 0 : 0x400000) ? scale + 1 : scale;
}
PURE u32 finite_scale(u32 x, u32 scale) { return is_nan32(x) ? 255 : scale < 254 ? scale : 254; }
PURE u16 bf16_of_scale(u8 x) { return x == 255 ? NAN_F16 : x ? (u16)(x << 7) : 0x40; }
#endif

TO_INTEGERS(rni, __builtin_rint) TO_INTEGERS(rzi, __builtin_trunc)
TO_INTEGERS(rmi, __builtin_floor) TO_INTEGERS(rpi, __builtin_ceil)
TO_HALF(cvt_bf16_f32_rn, narrow_bf16, LARGEST_BF16) TO_HALF(cvt_bf16_f32_rz, cut_bf16, LARGEST_BF16)
TO_HALF(cvt_f16_f32_rn, narrow_f16, LARGEST_F16) TO_HALF(cvt_f16_f32_rz, cut_f16, LARGEST_F16)
TO_HALF_BY_RANDOM(f16, 5, 10, 13, LARGEST_F16) TO_HALF_BY_RANDOM(bf16, 8, 7, 16, LARGEST_BF16)
WIDE_INTEGER(rz, TO_ZERO) WIDE_INTEGER(rm, DOWN) WIDE_INTEGER(rp, UP) WIDE_INTEGER(odd, TO_ODD)
FROM_DOUBLE(rn, TO_NEAREST) FROM_DOUBLE(rz, TO_ZERO) FROM_DOUBLE(rm, DOWN) FROM_DOUBLE(rp, UP)
O1(cvt_f32_f64_rz, u32, f64, narrow64(a, 8, 23, TO_ZERO)) O1(cvt_f32_f64_rm, u32, f64, narrow64(a, 8, 23, DOWN))
O1(cvt_f32_f64_rp, u32, f64, narrow64(a, 8, 23, UP)) O1(flush_f32, u32, u32, flushed(a))
O1(cvt_sat_f64, f64, f64, a > 0 ? a < 1 ? a : 1 : 0)
FROM_INTEGER(s, 8) FROM_INTEGER(u, 8) FROM_INTEGER(s, 16) FROM_INTEGER(u, 16)
FROM_INTEGER(s, 32) FROM_INTEGER(u, 32) FROM_INTEGER(s, 64) FROM_INTEGER(u, 64)
HALF_FROM_INTEGER(s, 8) HALF_FROM_INTEGER(u, 8) HALF_FROM_INTEGER(s, 16) HALF_FROM_INTEGER(u, 16)
HALF_FROM_INTEGER(s, 32) HALF_FROM_INTEGER(u, 32)
O1(cvt_f32_bf16, u32, u16, wide_bf16(a)) O1(cvt_f32_f16, u32, u16, wide_f16(a))
O1(cvt_f32_f64, f32, f64, (float)a) O1(cvt_f64_f32, f64, f32, (double)a)
O1(cvt_f64_bf16, f64, u16, (double)float32(wide_bf16(a))) O1(cvt_f64_f16, f64, u16, (double)float32(wide_f16(a)))
OF_TF32(rna) OF_TF32(rn) OF_TF32(rz)
O1(cvt_sat_f32, u32, u32, saturated(a)) O1(cvt_sat_ftz_f32, u32, u32, saturated(flushed(a)))
TO_CODE(e4m3x2, 4, 3, 0x7E, 0x7F) TO_CODE(e5m2x2, 5, 2, 0x7B, 0x7F)
TO_CODE(e2m1x2, 2, 1, 0x07, 0x07) TO_CODE(e2m3x2, 2, 3, 0x1F, 0x1F) TO_CODE(e3m2x2, 3, 2, 0x1F, 0x1F)
O1(cvt_f16_e4m3x2, u16, u8, wide_e4m3(a)) O1(cvt_f16_e5m2x2, u16, u8, wide_e5m2(a))
FROM_CODE(e2m1x2, 2, 1) FROM_CODE(e2m3x2, 2, 3) FROM_CODE(e3m2x2, 3, 2)
O1(cvt_ue8m0_f32_rz, u8, u32, scale_rz(a)) O1(cvt_ue8m0_f32_rz_satfinite, u8, u32, finite_scale(a, scale_rz(a)))
O1(cvt_ue8m0_f32_rp, u8, u32, scale_rp(a)) O1(cvt_ue8m0_f32_rp_satfinite, u8, u32, finite_scale(a, scale_rp(a)))
O1(cvt_bf16_ue8m0, u16, u8, bf16_of_scale(a))
