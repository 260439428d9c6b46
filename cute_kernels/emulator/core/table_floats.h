// Floating-point arithmetic and comparisons; the format is that of operations.h. No include guard: it is included
// twice.
//
// FP32 results are taken as bits, with one NaN. Sums, products and roots are rounded once, by the processor; the
// compiler contracts nothing.
#ifndef FLOATS_OF
#include <math.h>

#include "halves.h"

#define BINARY(name, expression) \
  PURE u32 name##32(u32 x, u32 y) { float a = float32(x), b = float32(y); return canonical(bits32(expression)); }
BINARY(add, a + b)
BINARY(sub, a - b)
BINARY(mul, a * b)
BINARY(div, a / b)
#define UNARY(name, expression) \
  PURE u32 name##32(u32 x) { float a = float32(x); return canonical(bits32(expression)); }
UNARY(rcp, 1.0f / a)
UNARY(sqrt, __builtin_sqrtf(a))
UNARY(rsqrt, (float)(1.0 / __builtin_sqrt((double)a)))
PURE u32 fma32(u32 x, u32 y, u32 z) {
  return canonical(bits32(__builtin_fmaf(float32(x), float32(y), float32(z))));
}
PURE u32 abs32(u32 x) { return canonical(x & 0x7FFFFFFF); }
PURE u32 neg32(u32 x) { return canonical(x ^ 0x80000000u); }
// The number where one operand is NaN; -0 below +0.
PURE u32 min32(u32 x, u32 y) {
  float a = float32(x), b = float32(y);
  u32 chosen = is_nan32(x) ? y : is_nan32(y) ? x : a < b ? x : y;
  return canonical(a == 0 && b == 0 ? x | y : chosen);
}
PURE u32 max32(u32 x, u32 y) {
  float a = float32(x), b = float32(y);
  u32 chosen = is_nan32(x) ? y : is_nan32(y) ? x : a > b ? x : y;
  return canonical(a == 0 && b == 0 ? x & y : chosen);
}
// .NaN: NaN where one operand is.
PURE u32 min_nan32(u32 x, u32 y) { return is_nan32(x) || is_nan32(y) ? NAN_F32 : min32(x, y); }
PURE u32 max_nan32(u32 x, u32 y) { return is_nan32(x) || is_nan32(y) ? NAN_F32 : max32(x, y); }

#define FLUSHED1(f) flushed(f(flushed(a)))
#define FLUSHED2(f) flushed(f(flushed(a), flushed(b)))
#define FLUSHED3(f) flushed(f(flushed(a), flushed(b), flushed(c)))
#define MODIFIED1(name, f)                                                                         \
  O1(name, u32, u32, f(a)) O1(name##_ftz, u32, u32, FLUSHED1(f))                                   \
  O1(name##_sat, u32, u32, saturated(f(a))) O1(name##_ftz_sat, u32, u32, saturated(FLUSHED1(f)))
#define MODIFIED2(name, f)                                                                         \
  O2(name, u32, u32, u32, f(a, b)) O2(name##_ftz, u32, u32, u32, FLUSHED2(f))                      \
  O2(name##_sat, u32, u32, u32, saturated(f(a, b)))                                                \
  O2(name##_ftz_sat, u32, u32, u32, saturated(FLUSHED2(f)))
#define MODIFIED3(name, f)                                                                         \
  O3(name, u32, u32, u32, u32, f(a, b, c)) O3(name##_ftz, u32, u32, u32, u32, FLUSHED3(f))         \
  O3(name##_sat, u32, u32, u32, u32, saturated(f(a, b, c)))                                        \
  O3(name##_ftz_sat, u32, u32, u32, u32, saturated(FLUSHED3(f)))

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

// FP16 and BF16: products are exact in FP64, and so are sums of FP16 and what is rounded to odd of a fused product.
#define HALVES_OF(t)                                                                               \
  PURE double value_##t(u16 x) { return (double)float32(wide_##t(x)); }                            \
  PURE u16 fma_##t##_bits(u16 a, u16 b, u16 c) {                                                   \
    return narrow_##t(f32_to_odd(sum_to_odd(value_##t(a) * value_##t(b), value_##t(c))));          \
  }                                                                                                \
  PURE u16 mul_##t##_bits(u16 a, u16 b) { return narrow_##t(f32_to_odd(value_##t(a) * value_##t(b))); }
HALVES_OF(f16)
HALVES_OF(bf16)
PURE u16 add_f16_bits(u16 a, u16 b) { return narrow_f16(f32_to_odd(value_f16(a) + value_f16(b))); }
// 24 bits are more than 2 * 8 + 2: rounding the FP32 sum again is rounding once.
PURE u16 add_bf16_bits(u16 a, u16 b) { return narrow_bf16(bits32(float32(wide_bf16(a)) + float32(wide_bf16(b)))); }

#define ARITHMETIC_OF(t)                                                                           \
  O2(add_##t, u16, u16, u16, add_##t##_bits(a, b))                                                 \
  O2(sub_##t, u16, u16, u16, add_##t##_bits(a, b ^ 0x8000))                                        \
  O2(mul_##t, u16, u16, u16, mul_##t##_bits(a, b))                                                 \
  O3(fma_##t, u16, u16, u16, u16, fma_##t##_bits(a, b, c))                                         \
  O2(min_##t, u16, u16, u16, narrow_##t(min32(wide_##t(a), wide_##t(b))))                          \
  O2(max_##t, u16, u16, u16, narrow_##t(max32(wide_##t(a), wide_##t(b))))                          \
  O2(min_NaN_##t, u16, u16, u16, narrow_##t(min_nan32(wide_##t(a), wide_##t(b))))                  \
  O2(max_NaN_##t, u16, u16, u16, narrow_##t(max_nan32(wide_##t(a), wide_##t(b))))                  \
  O1(abs_##t, u16, u16, narrow_##t(abs32(wide_##t(a))))                                            \
  O1(neg_##t, u16, u16, narrow_##t(neg32(wide_##t(a))))

// Plain relations are false of NaN, those with u true.
#define FLOATS_OF(t, R, value)                                                                     \
  P2(setp_eq_##t, R, R, value(a) == value(b))                                                      \
  P2(setp_ne_##t, R, R, value(a) < value(b) || value(a) > value(b))                                \
  P2(setp_lt_##t, R, R, value(a) < value(b)) P2(setp_le_##t, R, R, value(a) <= value(b))           \
  P2(setp_gt_##t, R, R, value(a) > value(b)) P2(setp_ge_##t, R, R, value(a) >= value(b))           \
  P2(setp_equ_##t, R, R, !(value(a) < value(b) || value(a) > value(b)))                            \
  P2(setp_neu_##t, R, R, !(value(a) == value(b)))                                                  \
  P2(setp_ltu_##t, R, R, !(value(a) >= value(b))) P2(setp_leu_##t, R, R, !(value(a) > value(b)))   \
  P2(setp_gtu_##t, R, R, !(value(a) <= value(b))) P2(setp_geu_##t, R, R, !(value(a) < value(b)))   \
  P2(setp_num_##t, R, R, value(a) == value(a) && value(b) == value(b))                             \
  P2(setp_nan_##t, R, R, value(a) != value(a) || value(b) != value(b))
#define ITSELF(x) (x)
#define OF_BF16(x) float32(wide_bf16(x))
#define OF_F16(x) float32(wide_f16(x))
#endif

MODIFIED2(add_f32, add32) MODIFIED2(sub_f32, sub32) MODIFIED2(mul_f32, mul32) MODIFIED2(div_f32, div32)
MODIFIED2(min_f32, min32) MODIFIED2(max_f32, max32)
MODIFIED2(min_NaN_f32, min_nan32) MODIFIED2(max_NaN_f32, max_nan32)
MODIFIED1(abs_f32, abs32) MODIFIED1(neg_f32, neg32)
MODIFIED1(rcp_f32, rcp32) MODIFIED1(sqrt_f32, sqrt32) MODIFIED1(rsqrt_f32, rsqrt32)
MODIFIED3(fma_f32, fma32)
ARITHMETIC_OF(f16) ARITHMETIC_OF(bf16)
FLOATS_OF(f32, f32, ITSELF) FLOATS_OF(f64, f64, ITSELF) FLOATS_OF(bf16, u16, OF_BF16) FLOATS_OF(f16, u16, OF_F16)
