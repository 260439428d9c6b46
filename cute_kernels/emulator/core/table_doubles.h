// FP64 arithmetic; the format is that of operations.h. No include guard: it is included twice.
//
// Which NaN a result is, is open in the PTX ISA. Here it is the first operand that is NaN, quiet, and 0xFFF8000000000000
// where none is: that of x86 would depend on how the compiler orders operands.
#ifndef DOUBLES_OF
#include <fenv.h>
#include <math.h>

PURE int is_nan64(u64 x) { return (x & ~((u64)1 << 63)) > (u64)0x7FF << 52; }
PURE u64 nan_of(double result, u64 a, u64 b, u64 c) {
  u64 nan = is_nan64(a) ? a : is_nan64(b) ? b : is_nan64(c) ? c : (u64)0xFFF8 << 48, bits = bits64(result);
  return is_nan64(bits) ? nan | (u64)1 << 51 : bits;
}
// The number where one operand is NaN; -0 below +0.
PURE double min64(u64 x, u64 y) {
  double a = float64(x), b = float64(y);
  u64 chosen = is_nan64(x) ? y : is_nan64(y) ? x : a < b ? x : y;
  return float64(a == 0 && b == 0 ? x | y : chosen);
}
PURE double max64(u64 x, u64 y) {
  double a = float64(x), b = float64(y);
  u64 chosen = is_nan64(x) ? y : is_nan64(y) ? x : a > b ? x : y;
  return float64(a == 0 && b == 0 ? x & y : chosen);
}

// Rounded by the processor in a direction. `volatile`: the compiler does not know that results depend on it.
#define ROUNDED(name, expression)                                                                  \
  RARE double name(int mode, u64 x, u64 y, u64 z) {                                                \
    volatile double a = float64(x), b = float64(y), c = float64(z);                                \
    int before = fegetround();                                                                     \
    fesetround(mode);                                                                              \
    volatile double result = expression;                                                           \
    fesetround(before);                                                                            \
    (void)c;                                                                                       \
    return result;                                                                                 \
  }
ROUNDED(sum64, a + b)
ROUNDED(difference64, a - b)
ROUNDED(product64, a * b)
ROUNDED(fused64, fma(a, b, c))

#define D1(name, expression) O1(name, u64, u64, nan_of(expression, a, a, a))
#define D2(name, expression) O2(name, u64, u64, u64, nan_of(expression, a, b, b))
#define D3(name, expression) O3(name, u64, u64, u64, u64, nan_of(expression, a, b, c))
#define DOUBLES_OF(mode, direction)                                                                \
  D2(add_##mode##_f64, sum64(direction, a, b, b)) D2(sub_##mode##_f64, difference64(direction, a, b, b))  \
  D2(mul_##mode##_f64, product64(direction, a, b, b)) D3(fma_##mode##_f64, fused64(direction, a, b, c))
#endif

D2(add_f64, float64(a) + float64(b)) D2(sub_f64, float64(a) - float64(b))
D2(mul_f64, float64(a) * float64(b)) D2(div_f64, float64(a) / float64(b))
D3(fma_f64, __builtin_fma(float64(a), float64(b), float64(c)))
D1(rcp_f64, 1.0 / float64(a)) D1(sqrt_f64, __builtin_sqrt(float64(a)))
D1(rsqrt_f64, 1.0 / __builtin_sqrt(float64(a)))
D1(cvt_rni_f64, __builtin_rint(float64(a))) D1(cvt_rzi_f64, __builtin_trunc(float64(a)))
D1(cvt_rmi_f64, __builtin_floor(float64(a))) D1(cvt_rpi_f64, __builtin_ceil(float64(a)))
D2(min_f64, min64(a, b)) D2(max_f64, max64(a, b))
O1(abs_f64, u64, u64, a & ~((u64)1 << 63)) O1(neg_f64, u64, u64, a ^ (u64)1 << 63)
DOUBLES_OF(rz, FE_TOWARDZERO) DOUBLES_OF(rm, FE_DOWNWARD) DOUBLES_OF(rp, FE_UPWARD)
