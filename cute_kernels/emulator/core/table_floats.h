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

// .xorsign.abs: of magnitudes, with the exclusive or of the signs.
PURE u32 with_signs(u32 x, u32 signs) { return is_nan32(x) ? x : x | (signs & 0x80000000u); }
#define XORED(name) \
  PURE u32 name##_xorsign32(u32 x, u32 y) { return with_signs(name##32(x & 0x7FFFFFFF, y & 0x7FFFFFFF), x ^ y); }
XORED(min)
XORED(max)
XORED(min_nan)
XORED(max_nan)

// .rm, .rp, .rz: down, up, towards zero. A sum that is rounded to odd in FP64 lies on the right side of its neighbours.
PURE u32 below(u32 x) { return x << 1 == 0 ? 0x80000001u : x >> 31 ? x + 1 : x - 1; }
PURE u32 round_rm(double x) {
  u32 near = bits32((float)x);
  return (double)float32(near) > x ? below(near) : near;
}
PURE u32 round_rp(double x) { return round_rm(-x) ^ 0x80000000u; }
PURE u32 round_rz(double x) { return x > 0 ? round_rm(x) : round_rp(x); }
#define DIRECTED(mode, zero)                                                                       \
  RARE u32 sum_##mode(double a, double b) {                                                        \
    double sum = sum_to_odd(a, b);                                                                 \
    int cancels = sum == 0 && (bits64(a) ^ bits64(b)) >> 63;                                       \
    return cancels ? zero : canonical(round_##mode(sum));                                          \
  }                                                                                                \
  PURE u32 add_##mode##32(u32 x, u32 y) { return sum_##mode((double)float32(x), (double)float32(y)); }  \
  PURE u32 sub_##mode##32(u32 x, u32 y) { return add_##mode##32(x, y ^ 0x80000000u); }             \
  RARE u32 mul_##mode##32(u32 x, u32 y) {                                                          \
    return canonical(round_##mode((double)float32(x) * (double)float32(y)));                       \
  }                                                                                                \
  PURE u32 fma_##mode##32(u32 x, u32 y, u32 z) {                                                   \
    return sum_##mode((double)float32(x) * (double)float32(y), (double)float32(z));                \
  }
DIRECTED(rz, 0)
DIRECTED(rm, 0x80000000u)
DIRECTED(rp, 0)

// glibc 2.29 gave these two new versions, which differ from the old ones in errno alone: a wheel that asks for the old
// ones loads on systems of 2018.
#if defined(__GLIBC__) && defined(__x86_64__)
__asm__(".symver exp2, exp2@GLIBC_2.2.5");
__asm__(".symver log2, log2@GLIBC_2.2.5");
#elif defined(__GLIBC__) && defined(__aarch64__)
__asm__(".symver exp2, exp2@GLIBC_2.17");
__asm__(".symver log2, log2@GLIBC_2.17");
#endif

// .approx: in FP64, which is rounded once. The tables of the hardware are not documented.
UNARY(ex2, (float)exp2((double)a))
UNARY(lg2, (float)log2((double)a))
UNARY(sin, (float)sin((double)a))
UNARY(cos, (float)cos((double)a))
UNARY(tanh, (float)tanh((double)a))

#define FLUSHED1(f) flushed(f(flushed(a)))
#define FLUSHED2(f) flushed(f(flushed(a), flushed(b)))
#define FLUSHED3(f) flushed(f(flushed(a), flushed(b), flushed(c)))
// With .ftz or without, and of some operations with .sat.
#define FLUSHABLE1(name, f) O1(name, u32, u32, f(a)) O1(name##_ftz, u32, u32, FLUSHED1(f))
#define FLUSHABLE2(name, f) O2(name, u32, u32, u32, f(a, b)) O2(name##_ftz, u32, u32, u32, FLUSHED2(f))
#define FLUSHABLE3(name, f) O3(name, u32, u32, u32, u32, f(a, b, c)) O3(name##_ftz, u32, u32, u32, u32, FLUSHED3(f))
#define MODIFIED2(name, f)                                                                         \
  FLUSHABLE2(name, f) O2(name##_sat, u32, u32, u32, saturated(f(a, b)))                            \
  O2(name##_ftz_sat, u32, u32, u32, saturated(FLUSHED2(f)))
#define MODIFIED3(name, f)                                                                         \
  FLUSHABLE3(name, f) O3(name##_sat, u32, u32, u32, u32, saturated(f(a, b, c)))                    \
  O3(name##_ftz_sat, u32, u32, u32, u32, saturated(FLUSHED3(f)))
#define DIRECTED_OF(mode)                                                                          \
  MODIFIED2(add_##mode##_f32, add_##mode##32) MODIFIED2(sub_##mode##_f32, sub_##mode##32)          \
  MODIFIED2(mul_##mode##_f32, mul_##mode##32) MODIFIED3(fma_##mode##_f32, fma_##mode##32)

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

PURE u16 rectified(u16 x) { return x & 0x8000 ? 0 : x; }  // the one NaN of results has no sign
PURE u16 with_sign16(u16 x, u32 signs) { return x == NAN_F16 ? x : (u16)(x | (signs & 0x8000)); }
#define XORED_OF(name, f, t) \
  O2(name, u16, u16, u16, with_sign16(narrow_##t(f(wide_##t(a & 0x7FFF), wide_##t(b & 0x7FFF))), a ^ b))

PURE u16 saturated16(u16 x) { return narrow_f16(saturated(wide_f16(x))); }

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
  O1(neg_##t, u16, u16, narrow_##t(neg32(wide_##t(a))))                                            \
  O3(fma_relu_##t, u16, u16, u16, u16, rectified(fma_##t##_bits(a, b, c)))                         \
  XORED_OF(min_xorsign_##t, min32, t) XORED_OF(max_xorsign_##t, max32, t)                          \
  XORED_OF(min_NaN_xorsign_##t, min_nan32, t) XORED_OF(max_NaN_xorsign_##t, max_nan32, t)          \
  O1(ex2_##t, u16, u16, narrow_##t(f32_to_odd(exp2(value_##t(a)))))                                \
  O1(tanh_##t, u16, u16, narrow_##t(f32_to_odd(tanh(value_##t(a)))))

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

MODIFIED2(add_f32, add32) MODIFIED2(sub_f32, sub32) MODIFIED2(mul_f32, mul32) MODIFIED3(fma_f32, fma32)
DIRECTED_OF(rz) DIRECTED_OF(rm) DIRECTED_OF(rp)
FLUSHABLE2(div_f32, div32) FLUSHABLE1(rcp_f32, rcp32) FLUSHABLE1(sqrt_f32, sqrt32) FLUSHABLE1(rsqrt_f32, rsqrt32)
FLUSHABLE1(ex2_f32, ex232) FLUSHABLE1(lg2_f32, lg232) FLUSHABLE1(tanh_f32, tanh32)
FLUSHABLE1(sin_f32, sin32) FLUSHABLE1(cos_f32, cos32)
FLUSHABLE1(abs_f32, abs32) FLUSHABLE1(neg_f32, neg32)
FLUSHABLE2(min_f32, min32) FLUSHABLE2(max_f32, max32)
FLUSHABLE2(min_NaN_f32, min_nan32) FLUSHABLE2(max_NaN_f32, max_nan32)
FLUSHABLE2(min_xorsign_f32, min_xorsign32) FLUSHABLE2(max_xorsign_f32, max_xorsign32)
FLUSHABLE2(min_NaN_xorsign_f32, min_nan_xorsign32) FLUSHABLE2(max_NaN_xorsign_f32, max_nan_xorsign32)
ARITHMETIC_OF(f16) ARITHMETIC_OF(bf16)
O2(add_f16_sat, u16, u16, u16, saturated16(add_f16_bits(a, b)))
O2(sub_f16_sat, u16, u16, u16, saturated16(add_f16_bits(a, b ^ 0x8000)))
O2(mul_f16_sat, u16, u16, u16, saturated16(mul_f16_bits(a, b)))
O3(fma_f16_sat, u16, u16, u16, u16, saturated16(fma_f16_bits(a, b, c)))
FLOATS_OF(f32, f32, ITSELF) FLOATS_OF(f64, f64, ITSELF) FLOATS_OF(bf16, u16, OF_BF16) FLOATS_OF(f16, u16, OF_F16)
