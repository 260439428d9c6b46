// Defines the functions of the pure operations in the table TABLE, and the array OPERATIONS of them.
//
// A line of a table is the one place where an operation is defined:
//   O1(name, R, A, expression)        of one operand a; O2, O3, O4: a, b, c, e. R, A, ..: types of bytecode.h, R
//                                     unsigned or a float
//   P2(name, A, B, expression)        a predicate of a and b
//   OC(name, R, expression)           of two operands of type R and a carry c, a predicate: 0 or 1
//   PC(name, A, expression)           a predicate of such
// Expressions may use the constant `imm` of the instruction. Names are those of the registry (`PureOp.name` in Python),
// those with a constant at their end without it. Values of lanes and values that all lanes share have a function each,
// made of the same expression.
#include <string.h>

#include "bytecode.h"
#if defined(__SSE2__)
#include <immintrin.h>
#endif

#define PURE static inline __attribute__((always_inline, unused))
// Called for every lane: of rare operations, whose loops over lanes would take the compiler long to make vectors of.
#define RARE static __attribute__((noinline, unused))

// Words of 64 bits that hold a value.
PURE u64 word_u8(u8 x) { return x; }
PURE u64 word_u16(u16 x) { return x; }
PURE u64 word_u32(u32 x) { return x; }
PURE u64 word_u64(u64 x) { return x; }
PURE u32 bits32(float x) { uint32_t bits; memcpy(&bits, &x, sizeof bits); return bits; }
PURE u64 bits64(double x) { uint64_t bits; memcpy(&bits, &x, sizeof bits); return bits; }
PURE float float32(uint32_t bits) { float x; memcpy(&x, &bits, sizeof x); return x; }
PURE double float64(uint64_t bits) { double x; memcpy(&x, &bits, sizeof x); return x; }
PURE u64 word_f32(float x) { return bits32(x); }
PURE u64 word_f64(double x) { return bits64(x); }

// A mask of the lanes whose byte is -1 (the others are 0).
PURE u32 mask_of_marks(const int8_t marks[LANES]) {
#if defined(__AVX2__)
  return (u32)_mm256_movemask_epi8(_mm256_loadu_si256((const __m256i *)marks));
#elif defined(__SSE2__)
  u32 low = (u32)_mm_movemask_epi8(_mm_loadu_si128((const __m128i *)marks));
  return low | (u32)_mm_movemask_epi8(_mm_loadu_si128((const __m128i *)(marks + 16))) << 16;
#else
  u32 mask = 0;
  for (int lane = 0; lane < LANES; lane++) mask |= (u32)(marks[lane] & 1) << lane;
  return mask;
#endif
}

// Both forms of an operation: statements for the rows of lanes, and the word that they leave of values that all share.
#define FORMS(name, each, word)                                                                      \
  static const Instruction *lanes_##name(const Instruction *i, uint8_t *s, Machine *m) {             \
    int64_t imm = i->imm;                                                                            \
    each;                                                                                            \
    (void)m, (void)imm;                                                                              \
    return i + 1;                                                                                    \
  }                                                                                                  \
  static const Instruction *uniform_##name(const Instruction *i, uint8_t *s, Machine *m) {           \
    int64_t imm = i->imm;                                                                            \
    AT(u64, i->d) = word;                                                                            \
    (void)m, (void)imm;                                                                              \
    return i + 1;                                                                                    \
  }
#define ROW(type, name) type *name = ROW_OF(type, i->name)
#define MARKS int8_t marks[LANES] __attribute__((aligned(32)))
#define O1(name, R, A, ...)                                                                          \
  PURE R op_##name(A a, int64_t imm) { (void)imm; return (R)(__VA_ARGS__); }                         \
  FORMS(name, ROW(R, d); ROW(const A, a); EACH_LANE d[lane] = op_##name(a[lane], imm),               \
        word_##R(op_##name(AT(A, i->a), imm)))
#define O2(name, R, A, B, ...)                                                                       \
  PURE R op_##name(A a, B b, int64_t imm) { (void)imm; return (R)(__VA_ARGS__); }                    \
  FORMS(name, ROW(R, d); ROW(const A, a); ROW(const B, b);                                           \
        EACH_LANE d[lane] = op_##name(a[lane], b[lane], imm),                                        \
        word_##R(op_##name(AT(A, i->a), AT(B, i->b), imm)))
#define O3(name, R, A, B, C, ...)                                                                    \
  PURE R op_##name(A a, B b, C c, int64_t imm) { (void)imm; return (R)(__VA_ARGS__); }               \
  FORMS(name, ROW(R, d); ROW(const A, a); ROW(const B, b); ROW(const C, c);                          \
        EACH_LANE d[lane] = op_##name(a[lane], b[lane], c[lane], imm),                               \
        word_##R(op_##name(AT(A, i->a), AT(B, i->b), AT(C, i->c), imm)))
#define O4(name, R, A, B, C, E, ...)                                                                 \
  PURE R op_##name(A a, B b, C c, E e) { return (R)(__VA_ARGS__); }                                  \
  FORMS(name, ROW(R, d); ROW(const A, a); ROW(const B, b); ROW(const C, c);                          \
        const E *e = ROW_OF(E, imm); EACH_LANE d[lane] = op_##name(a[lane], b[lane], c[lane], e[lane]), \
        word_##R(op_##name(AT(A, i->a), AT(B, i->b), AT(C, i->c), AT(E, imm))))
#define P2(name, A, B, ...)                                                                          \
  PURE int op_##name(A a, B b) { return (__VA_ARGS__); }                                             \
  FORMS(name, MARKS; ROW(const A, a); ROW(const B, b);                                               \
        EACH_LANE marks[lane] = (int8_t)-op_##name(a[lane], b[lane]);                                \
        AT(u64, i->d) = mask_of_marks(marks),                                                        \
        (u64)op_##name(AT(A, i->a), AT(B, i->b)))
#define OC(name, R, ...)                                                                             \
  PURE R op_##name(R a, R b, u32 c) { return (R)(__VA_ARGS__); }                                     \
  FORMS(name, u32 carries = AT(u32, i->c); ROW(R, d); ROW(const R, a); ROW(const R, b);              \
        EACH_LANE d[lane] = op_##name(a[lane], b[lane], carries >> lane & 1),                        \
        word_##R(op_##name(AT(R, i->a), AT(R, i->b), AT(u32, i->c))))
#define PC(name, A, ...)                                                                             \
  PURE int op_##name(A a, A b, u32 c) { return (__VA_ARGS__); }                                      \
  FORMS(name, MARKS; u32 carries = AT(u32, i->c); ROW(const A, a); ROW(const A, b);                  \
        EACH_LANE marks[lane] = (int8_t)-op_##name(a[lane], b[lane], carries >> lane & 1);           \
        AT(u64, i->d) = mask_of_marks(marks),                                                        \
        (u64)op_##name(AT(A, i->a), AT(A, i->b), AT(u32, i->c)))
#include TABLE
#undef O1
#undef O2
#undef O3
#undef O4
#undef P2
#undef OC
#undef PC

#define ENTRY(name) {#name, lanes_##name, uniform_##name},
#define O1(name, ...) ENTRY(name)
#define O2(name, ...) ENTRY(name)
#define O3(name, ...) ENTRY(name)
#define O4(name, ...) ENTRY(name)
#define P2(name, ...) ENTRY(name)
#define OC(name, ...) ENTRY(name)
#define PC(name, ...) ENTRY(name)
const Operation OPERATIONS[] = {
#include TABLE
    {0, 0, 0}};
