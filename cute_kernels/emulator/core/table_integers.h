// Arithmetic and comparisons of integers; the format is that of operations.h. No include guard: it is included twice.
#ifndef INTEGERS_OF
PURE u64 high_u64(u64 a, u64 b) { return (u64)((unsigned __int128)a * b >> 64); }
PURE u32 within_s32(s64 x) { return (u32)(x > INT32_MAX ? INT32_MAX : x < INT32_MIN ? INT32_MIN : x); }
PURE u64 high_s64(s64 a, s64 b) { return (u64)((__int128)a * b >> 64); }

#define INTEGERS_OF(n)                                                                             \
  SIGNED_OR_NOT(s, n) SIGNED_OR_NOT(u, n)                                                          \
  O1(neg_s##n, u##n, u##n, (u##n)0 - a)                                                            \
  O1(abs_s##n, u##n, u##n, a >> (n - 1) ? (u##n)0 - a : a)                                         \
  O2(div_u##n, u##n, u##n, u##n, b ? a / (b ? b : 1) : (u##n)~(u##n)0)                             \
  O2(rem_u##n, u##n, u##n, u##n, b ? a % (b ? b : 1) : (u##n)~(u##n)0)                             \
  /* the most negative number by -1 traps on x86 */                                                \
  O2(div_s##n, u##n, s##n, s##n,                                                                   \
     b == -1 ? (s##n)((u##n)0 - (u##n)a) : b ? (s##n)(a / (b && b != -1 ? b : 1)) : (s##n)-1)      \
  O2(rem_s##n, u##n, s##n, s##n, b ? (b == -1 ? 0 : a % (b && b != -1 ? b : 1)) : (s##n)-1)        \
  P2(setp_eq_b##n, u##n, u##n, a == b) P2(setp_ne_b##n, u##n, u##n, a != b)
// .relu: negative results become zero.
#define RELU_OF(n)                                                                                 \
  O2(min_s##n##_relu, u##n, s##n, s##n, a < b ? a > 0 ? a : 0 : b > 0 ? b : 0)                     \
  O2(max_s##n##_relu, u##n, s##n, s##n, a > b ? a > 0 ? a : 0 : b > 0 ? b : 0)
// Sums and differences with a carry or borrow, and what they leave.
#define CARRIES_OF(n)                                                                              \
  OC(addc_u##n, u##n, a + b + c) PC(carry_u##n, u##n, a + b < a || a + b + c < a + b)              \
  OC(subc_u##n, u##n, a - b - c) PC(borrow_u##n, u##n, a < b || (a == b && c))
// Products of 16 bits are formed in 32: `int` would overflow.
#define SIGNED_OR_NOT(k, n)                                                                        \
  O2(add_##k##n, u##n, u##n, u##n, a + b)                                                          \
  O2(sub_##k##n, u##n, u##n, u##n, a - b)                                                          \
  O2(mul_lo_##k##n, u##n, u##n, u##n, 1u * a * b)                                                  \
  O2(min_##k##n, u##n, k##n, k##n, a < b ? a : b)                                                  \
  O2(max_##k##n, u##n, k##n, k##n, a > b ? a : b)                                                  \
  O3(sad_##k##n, u##n, k##n, k##n, u##n, c + (a > b ? (u##n)a - (u##n)b : (u##n)b - (u##n)a))      \
  P2(setp_lt_##k##n, k##n, k##n, a < b) P2(setp_le_##k##n, k##n, k##n, a <= b)                     \
  P2(setp_gt_##k##n, k##n, k##n, a > b) P2(setp_ge_##k##n, k##n, k##n, a >= b)
#endif

INTEGERS_OF(16) INTEGERS_OF(32) INTEGERS_OF(64)
RELU_OF(16) RELU_OF(32) CARRIES_OF(32) CARRIES_OF(64)
O2(add_sat_s32, u32, s32, s32, within_s32((s64)a + b))
O2(sub_sat_s32, u32, s32, s32, within_s32((s64)a - b))
O2(mul_hi_s16, u16, s16, s16, (s32)a * b >> 16)
O2(mul_hi_u16, u16, u16, u16, (u32)a * b >> 16)
O2(mul_hi_s32, u32, s32, s32, (s64)a * b >> 32)
O2(mul_hi_u32, u32, u32, u32, (u64)a * b >> 32)
O2(mul_hi_s64, u64, s64, s64, high_s64(a, b))
O2(mul_hi_u64, u64, u64, u64, high_u64(a, b))
O2(mul_wide_s16, u32, s16, s16, (s32)a * b)
O2(mul_wide_u16, u32, u16, u16, (u32)a * b)
O2(mul_wide_s32, u64, s32, s32, (s64)a * b)
O2(mul_wide_u32, u64, u32, u32, (u64)a * b)
O2(map_address, u32, u32, u32, b << RANK_SHIFT | (a & OFFSET_MASK))
