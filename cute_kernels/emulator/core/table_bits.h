// Operations on bits, and changes of width; the format is that of operations.h. No include guard: it is included twice.
#ifndef BITS_OF
// Ones in the low `length` bits; `length` may be anything up to 255.
PURE u32 low_u32(u32 length) { return length > 31 ? ~0u : (1u << (length & 31)) - 1; }
PURE u64 low_u64(u64 length) { return length > 63 ? ~(u64)0 : ((u64)1 << (length & 63)) - 1; }

// A field of bits: position and length are the lowest bytes of the operands. The sign is the field's highest bit, or
// the register's where the field leaves the register.
#define FIELD_OF(n)                                                                                \
  PURE u##n extract_u##n(u##n x, u32 start, u32 length) {                                          \
    start &= 255;                                                                                  \
    return (start < n ? x >> (start & (n - 1)) : 0) & low_u##n(length & 255);                      \
  }                                                                                                \
  PURE u##n extract_s##n(u##n x, u32 start, u32 length) {                                          \
    start &= 255, length &= 255;                                                                   \
    u##n mask = low_u##n(length);                                                                  \
    u##n shifted = (u##n)((s##n)x >> (start < n ? start : n - 1));                                 \
    u32 end = start + length - 1, top = end < n ? end : n - 1;                                     \
    u##n fill = x >> (top & (n - 1)) & 1 ? ~mask : 0;                                              \
    return length ? (shifted & mask) | fill : 0;                                                   \
  }                                                                                                \
  PURE u##n insert_u##n(u##n field, u##n base, u32 start, u32 length) {                            \
    start &= 255;                                                                                  \
    u##n mask = start < n ? low_u##n(length & 255) << (start & (n - 1)) : 0;                       \
    return (base & ~mask) | (field << (start & (n - 1)) & mask);                                   \
  }
FIELD_OF(32)
FIELD_OF(64)

PURE u32 permuted_byte(u64 source, u32 selector) {
  u32 byte = (u32)(source >> (selector & 7) * 8) & 255;
  return selector & 8 ? (byte & 128 ? 255 : 0) : byte;
}
PURE u32 permute(u32 a, u32 b, u32 selector) {
  u64 source = (u64)b << 32 | a;
  return permuted_byte(source, selector) | permuted_byte(source, selector >> 4) << 8 |
         permuted_byte(source, selector >> 8) << 16 | permuted_byte(source, selector >> 12) << 24;
}

// Bit k of the table: the result where a, b, c are bits 2, 1, 0 of k.
PURE u32 logic3(u32 a, u32 b, u32 c, int64_t table) {
  u32 result = 0;
  for (int k = 0; k < 8; k++) {
    u32 taken = (u32)-(table >> k & 1);
    result |= taken & (k & 4 ? a : ~a) & (k & 2 ? b : ~b) & (k & 1 ? c : ~c);
  }
  return result;
}

PURE u64 reversed(u64 x) {
  x = (x >> 1 & 0x5555555555555555u) | (x & 0x5555555555555555u) << 1;
  x = (x >> 2 & 0x3333333333333333u) | (x & 0x3333333333333333u) << 2;
  x = (x >> 4 & 0x0F0F0F0F0F0F0F0Fu) | (x & 0x0F0F0F0F0F0F0F0Fu) << 4;
  return __builtin_bswap64(x);
}
PURE u32 leading(u64 x, u32 width) { return x ? (u32)__builtin_clzll(x) - (64 - width) : width; }

// fns: the position of the |offset|-th set bit from `base` on, upwards or (negative offsets) downwards; of offset 0 the
// base itself, if that bit is set. All ones where there is none.
PURE u32 nth_set(u32 mask, u32 base, s32 offset) {
  u32 upwards = base < 32 ? mask & ~low_u32(base) : 0, downwards = mask & low_u32(base < 31 ? base + 1 : 32);
  u32 bits = offset > 0 ? upwards : offset < 0 ? downwards : base < 32 ? mask & 1u << base : 0;
  u32 count = (u32)__builtin_popcount(bits), nth = offset > 0 ? (u32)offset : offset < 0 ? 0 - (u32)offset : 1;
  if (nth > count) return ~0u;
  for (u32 below = offset < 0 ? count - nth : nth - 1; below; below--) bits &= bits - 1;
  return (u32)__builtin_ctz(bits);
}
// bmsk: `length` ones from a position on.
PURE u32 ones_from(u32 position, u32 length) { return position < 32 ? low_u32(length) << (position & 31) : 0; }

// `bits` bits of x from bit `low`, with their sign or without.
PURE u32 piece_s(u32 x, int low, int bits) { return (u32)((s32)(x << (32 - low - bits)) >> (32 - bits)); }
PURE u32 piece_u(u32 x, int low, int bits) { return x << (32 - low - bits) >> (32 - bits); }
#define DOT4(p, q) \
  c + p(a, 0, 8) * q(b, 0, 8) + p(a, 8, 8) * q(b, 8, 8) + p(a, 16, 8) * q(b, 16, 8) + p(a, 24, 8) * q(b, 24, 8)
#define DOT2(p, q, first) c + p(a, 0, 16) * q(b, 8 * first, 8) + p(a, 16, 16) * q(b, 8 * first + 8, 8)
#define DOTS_OF(p, q)                                                                              \
  O3(dp4a_8_0_##p##32_##q##32, u32, u32, u32, u32, DOT4(piece_##p, piece_##q))                     \
  O3(dp2a_16_0_##p##32_##q##32, u32, u32, u32, u32, DOT2(piece_##p, piece_##q, 0))                 \
  O3(dp2a_16_2_##p##32_##q##32, u32, u32, u32, u32, DOT2(piece_##p, piece_##q, 2))

// The low `imm` bits of a register, extended by their sign or by zeros.
PURE u64 extended_s(u64 x, int64_t width) { return (u64)((s64)(x << (64 - width)) >> (64 - width)); }
PURE u64 extended_u(u64 x, int64_t width) { return x << (64 - width) >> (64 - width); }
// cvt.sat: a number of `imm` & 255 bits, limited to what `imm` >> 8 bits can hold; signed or not as the names say.
PURE u64 least_u(u64 x, u64 most) { return x < most ? x : most; }
PURE u64 least_s(s64 x, u64 most) { return x < 0 ? 0 : least_u((u64)x, most); }
PURE u64 within_s(s64 x, s64 most) { return (u64)(x > most ? most : x < -most - 1 ? -most - 1 : x); }
#define EXTENSIONS_OF(n, source)                                                                   \
  O1(extend_s_##n##_##source, u##n, u##source, extended_s(a, imm))                                 \
  O1(extend_u_##n##_##source, u##n, u##source, extended_u(a, imm))                                 \
  O1(resize_u##source##_u##n, u##n, u##source, a)
#define SLICES_OF(n, width) O1(slice##n##_##width, u##width, u##n, a >> imm)

#define BITS_OF(n)                                                                                 \
  O2(and_b##n, u##n, u##n, u##n, a & b) O2(or_b##n, u##n, u##n, u##n, a | b)                       \
  O2(xor_b##n, u##n, u##n, u##n, a ^ b) O1(not_b##n, u##n, u##n, ~a)                               \
  O2(shl_b##n, u##n, u##n, u32, b < n ? a << (b & (n - 1)) : 0)                                    \
  O2(shr_b##n, u##n, u##n, u32, b < n ? a >> (b & (n - 1)) : 0)                                    \
  O2(shr_u##n, u##n, u##n, u32, b < n ? a >> (b & (n - 1)) : 0)                                    \
  O2(shr_s##n, u##n, s##n, u32, a >> (b < n ? b : n - 1))                                          \
  O1(shl_b##n##_by, u##n, u##n, imm < n ? a << (imm & (n - 1)) : 0)                                \
  O1(shr_b##n##_by, u##n, u##n, imm < n ? a >> (imm & (n - 1)) : 0)                                \
  O1(shr_u##n##_by, u##n, u##n, imm < n ? a >> (imm & (n - 1)) : 0)                                \
  O1(shr_s##n##_by, u##n, s##n, a >> (imm < n ? imm : n - 1))
#endif

BITS_OF(16) BITS_OF(32) BITS_OF(64)
O3(bfe_u32, u32, u32, u32, u32, extract_u32(a, b, c)) O3(bfe_u64, u64, u64, u32, u32, extract_u64(a, b, c))
O3(bfe_s32, u32, u32, u32, u32, extract_s32(a, b, c)) O3(bfe_s64, u64, u64, u32, u32, extract_s64(a, b, c))
O4(bfi_b32, u32, u32, u32, u32, u32, insert_u32(a, b, c, e))
O4(bfi_b64, u64, u64, u64, u32, u32, insert_u64(a, b, c, e))
O3(shf_r_wrap, u32, u32, u32, u32, ((u64)b << 32 | a) >> (c & 31))
O3(shf_l_wrap, u32, u32, u32, u32, ((u64)b << 32 | a) << (c & 31) >> 32)
O3(shf_r_clamp, u32, u32, u32, u32, ((u64)b << 32 | a) >> (c < 32 ? c : 32))
O3(shf_l_clamp, u32, u32, u32, u32, ((u64)b << 32 | a) << (c < 32 ? c : 32) >> 32)
O3(prmt_b32, u32, u32, u32, u32, permute(a, b, c))
O3(lop3, u32, u32, u32, u32, logic3(a, b, c, imm))
DOTS_OF(s, s) DOTS_OF(s, u) DOTS_OF(u, s) DOTS_OF(u, u)
O3(fns_b32, u32, u32, u32, s32, nth_set(a, b, c))
O2(bmsk_clamp, u32, u32, u32, ones_from(a, b)) O2(bmsk_wrap, u32, u32, u32, ones_from(a & 31, b & 31))
O1(popc_b32, u32, u32, __builtin_popcount(a)) O1(popc_b64, u32, u64, __builtin_popcountll(a))
O1(clz_b32, u32, u32, leading(a, 32)) O1(clz_b64, u32, u64, leading(a, 64))
O1(brev_b32, u32, u32, reversed(a) >> 32) O1(brev_b64, u64, u64, reversed(a))
O1(bfind_u32, u32, u32, 31 - leading(a, 32)) O1(bfind_u64, u32, u64, 63 - leading(a, 64))
O1(bfind_s32, u32, s32, 31 - leading((u32)(a ^ a >> 31), 32))
O1(bfind_s64, u32, s64, 63 - leading((u64)(a ^ a >> 63), 64))

EXTENSIONS_OF(8, 8) EXTENSIONS_OF(8, 16) EXTENSIONS_OF(8, 32) EXTENSIONS_OF(8, 64)
EXTENSIONS_OF(16, 8) EXTENSIONS_OF(16, 16) EXTENSIONS_OF(16, 32) EXTENSIONS_OF(16, 64)
EXTENSIONS_OF(32, 8) EXTENSIONS_OF(32, 16) EXTENSIONS_OF(32, 32) EXTENSIONS_OF(32, 64)
EXTENSIONS_OF(64, 8) EXTENSIONS_OF(64, 16) EXTENSIONS_OF(64, 32) EXTENSIONS_OF(64, 64)
SLICES_OF(16, 8) SLICES_OF(32, 8) SLICES_OF(64, 8) SLICES_OF(32, 16) SLICES_OF(64, 16) SLICES_OF(64, 32)
O1(saturate_s_s, u64, u64, within_s((s64)extended_s(a, imm & 255), (s64)low_u64((u64)(imm >> 8) - 1)))
O1(saturate_s_u, u64, u64, least_s((s64)extended_s(a, imm & 255), low_u64((u64)imm >> 8)))
O1(saturate_u_s, u64, u64, least_u(extended_u(a, imm & 255), low_u64((u64)(imm >> 8) - 1)))
O1(saturate_u_u, u64, u64, least_u(extended_u(a, imm & 255), low_u64((u64)imm >> 8)))
O2(join_nibbles, u8, u8, u8, a | b << 4)
O2(pack2x8, u16, u8, u8, a | b << 8)
O2(pack2x16, u32, u16, u16, a | (u32)b << 16)
O2(pack2x32, u64, u32, u32, a | (u64)b << 32)
O2(copysign_u32, u32, u32, u32, (a & 0x80000000u) | (b & 0x7FFFFFFFu))
O2(copysign_u64, u64, u64, u64, (a & (u64)1 << 63) | (b & ~((u64)1 << 63)))
