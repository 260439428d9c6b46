// Conversions between floats and integers; the format is that of operations.h. No include guard: it is included twice.
#ifndef TO_INTEGERS
#include <math.h>

#include "halves.h"

// Rounded by a mode and cut to [low, high]; NaN becomes zero. 32 bits and fewer are exact in FP64.
PURE u32 rounded(double x, double low, double high) {
  double cut = x >= high ? high : x > low ? x : low;
  return (u32)(s64)(x == x ? cut : 0.0);
}
#define TO_INTEGER(mode, round, k, n, low, high)                                                   \
  O1(cvt_##mode##_##k##n##_f32, u##n, f32, rounded(round((double)a), low, high))                   \
  O1(cvt_##mode##_ftz_##k##n##_f32, u##n, u32, rounded(round((double)float32(flushed(a))), low, high))
#define TO_INTEGERS(mode, round)                                                                   \
  TO_INTEGER(mode, round, s, 8, -0x1p7, 0x1p7 - 1) TO_INTEGER(mode, round, u, 8, 0, 0x1p8 - 1)     \
  TO_INTEGER(mode, round, s, 16, -0x1p15, 0x1p15 - 1)                                              \
  TO_INTEGER(mode, round, u, 16, 0, 0x1p16 - 1)                                                    \
  TO_INTEGER(mode, round, s, 32, -0x1p31, 0x1p31 - 1)                                              \
  TO_INTEGER(mode, round, u, 32, 0, 0x1p32 - 1)                                                    \
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
PURE u32 round_tf32(u32 x) {
  return (x & 0x7FFFFFFF) < 0x7F800000 ? (x + 0x1000) & 0xFFFFE000u : x;
}
#endif

TO_INTEGERS(rni, __builtin_rint) TO_INTEGERS(rzi, __builtin_trunc)
TO_INTEGERS(rmi, __builtin_floor) TO_INTEGERS(rpi, __builtin_ceil)
TO_HALF(cvt_bf16_f32_rn, narrow_bf16, LARGEST_BF16) TO_HALF(cvt_bf16_f32_rz, cut_bf16, LARGEST_BF16)
TO_HALF(cvt_f16_f32_rn, narrow_f16, LARGEST_F16)
FROM_INTEGER(s, 8) FROM_INTEGER(u, 8) FROM_INTEGER(s, 16) FROM_INTEGER(u, 16)
FROM_INTEGER(s, 32) FROM_INTEGER(u, 32) FROM_INTEGER(s, 64) FROM_INTEGER(u, 64)
O1(cvt_f32_bf16, u32, u16, wide_bf16(a)) O1(cvt_f32_f16, u32, u16, wide_f16(a)) O1(widen_bf16, u32, u16, wide_bf16(a))
O1(cvt_f32_f64, f32, f64, (float)a) O1(cvt_f64_f32, f64, f32, (double)a)
O1(cvt_f64_bf16, f64, u16, (double)float32(wide_bf16(a))) O1(cvt_f64_f16, f64, u16, (double)float32(wide_f16(a)))
O1(cvt_rna_tf32, u32, u32, round_tf32(a))
O1(cvt_sat_f32, u32, u32, saturated(a)) O1(cvt_sat_ftz_f32, u32, u32, saturated(flushed(a)))
