// Moves between the places of a warp's state and the exchange rows, selection, and operations on predicates.
#include <string.h>

#include "bytecode.h"

#define FORM(form, name) \
  static const Instruction *form##_##name(const Instruction *i, uint8_t *s, __attribute__((unused)) Machine *m)
// What the lanes of a mask have of one row and the others of another one.
static const u32 lane_bits[LANES] __attribute__((aligned(64))) = {
    1u << 0,  1u << 1,  1u << 2,  1u << 3,  1u << 4,  1u << 5,  1u << 6,  1u << 7,  1u << 8,  1u << 9,  1u << 10,
    1u << 11, 1u << 12, 1u << 13, 1u << 14, 1u << 15, 1u << 16, 1u << 17, 1u << 18, 1u << 19, 1u << 20, 1u << 21,
    1u << 22, 1u << 23, 1u << 24, 1u << 25, 1u << 26, 1u << 27, 1u << 28, 1u << 29, 1u << 30, 1u << 31,
};

#define MOVES_OF(n)                                                                                                   \
  FORM(lanes, move_u##n) {                                                                                            \
    memcpy(ROW_OF(u##n, i->d), ROW_OF(u##n, i->a), LANES * sizeof(u##n));                                             \
    return i + 1;                                                                                                     \
  }                                                                                                                   \
  /* a value of all lanes in every lane */                                                                            \
  FORM(lanes, spread_u##n) {                                                                                          \
    u##n *d = ROW_OF(u##n, i->d), value = AT(u##n, i->a);                                                             \
    EACH_LANE d[lane] = value;                                                                                        \
    return i + 1;                                                                                                     \
  }                                                                                                                   \
  /* the lanes that run take a value over */                                                                          \
  FORM(lanes, merge_u##n) {                                                                                           \
    u##n *d = ROW_OF(u##n, i->d);                                                                                     \
    const u##n *a = ROW_OF(u##n, i->a);                                                                               \
    u32 mask = m->mask;                                                                                               \
    if (mask == UINT32_MAX) memcpy(d, a, LANES * sizeof(u##n));                                                       \
    else EACH_LANE d[lane] = mask & lane_bits[lane] ? a[lane] : d[lane];                                              \
    return i + 1;                                                                                                     \
  }                                                                                                                   \
  FORM(lanes, select_u##n) {                                                                                          \
    u##n *d = ROW_OF(u##n, i->d);                                                                                     \
    const u##n *a = ROW_OF(u##n, i->a), *b = ROW_OF(u##n, i->b);                                                      \
    u32 mask = AT(u32, i->c);                                                                                         \
    EACH_LANE d[lane] = mask & lane_bits[lane] ? a[lane] : b[lane];                                                   \
    return i + 1;                                                                                                     \
  }                                                                                                                   \
  FORM(uniform, select_u##n) {                                                                                        \
    AT(u64, i->d) = AT(u64, i->c) ? AT(u64, i->a) : AT(u64, i->b);                                                    \
    return i + 1;                                                                                                     \
  }                                                                                                                   \
  /* the value of one lane, of the first that executes with FLAG, else of lane 0 */                                  \
  FORM(lanes, lane_u##n) {                                                                                            \
    int lane = i->c & FLAG && m->active ? __builtin_ctz(m->active) : 0;                                                    \
    AT(u64, i->d) = ROW_OF(u##n, i->a)[lane];                                                                         \
    return i + 1;                                                                                                     \
  }                                                                                                                   \
  /* to row d of the exchange area, and from row a */                                                                 \
  FORM(lanes, put_u##n) {                                                                                             \
    memcpy(m->rows + i->d * EXCHANGE_ROW, ROW_OF(u##n, i->a), LANES * sizeof(u##n));                                  \
    return i + 1;                                                                                                     \
  }                                                                                                                   \
  FORM(lanes, get_u##n) {                                                                                             \
    memcpy(ROW_OF(u##n, i->d), m->rows + i->a * EXCHANGE_ROW, LANES * sizeof(u##n));                                  \
    return i + 1;                                                                                                     \
  }                                                                                                                   \
  FORM(uniform, get_u##n) {                                                                                           \
    AT(u64, i->d) = *(u##n *)(m->rows + i->a * EXCHANGE_ROW);                                                         \
    return i + 1;                                                                                                     \
  }
MOVES_OF(8)
MOVES_OF(16)
MOVES_OF(32)
MOVES_OF(64)

FORM(uniform, move) {
  AT(u64, i->d) = AT(u64, i->a);
  return i + 1;
}
FORM(uniform, put) {
  *(u64 *)(m->rows + i->d * EXCHANGE_ROW) = AT(u64, i->a);
  return i + 1;
}

// Predicates: a mask of lanes, or 0 or 1.
#define PREDICATES(name, of_masks, of_bits)                                                                           \
  FORM(lanes, name) {                                                                                                 \
    u32 a = AT(u32, i->a), b = AT(u32, i->b);                                                                         \
    AT(u64, i->d) = (u32)(of_masks);                                                                                  \
    return i + 1;                                                                                                     \
  }                                                                                                                   \
  FORM(uniform, name) {                                                                                               \
    u64 a = AT(u64, i->a), b = AT(u64, i->b);                                                                         \
    AT(u64, i->d) = (u64)(of_bits);                                                                                   \
    return i + 1;                                                                                                     \
  }
PREDICATES(and_pred, a & b, a & b)
PREDICATES(or_pred, a | b, a | b)
PREDICATES(xor_pred, a ^ b, a ^ b)
PREDICATES(not_pred, ~a + 0 * b, !a + 0 * b)
FORM(lanes, select_pred) {
  u32 p = AT(u32, i->c);
  AT(u64, i->d) = (AT(u32, i->a) & p) | (AT(u32, i->b) & ~p);
  return i + 1;
}
FORM(lanes, spread_pred) {
  AT(u64, i->d) = AT(u64, i->a) ? UINT32_MAX : 0;
  return i + 1;
}
FORM(lanes, merge_pred) {
  AT(u64, i->d) = (AT(u32, i->a) & m->mask) | (AT(u32, i->d) & ~m->mask);
  return i + 1;
}
FORM(lanes, lane_pred) {
  int lane = i->c & FLAG && m->active ? __builtin_ctz(m->active) : 0;
  AT(u64, i->d) = AT(u32, i->a) >> lane & 1;
  return i + 1;
}
FORM(lanes, get_pred) {
  AT(u64, i->d) = *(u32 *)(m->rows + i->a * EXCHANGE_ROW);
  return i + 1;
}
FORM(uniform, get_pred) {
  AT(u64, i->d) = *(u64 *)(m->rows + i->a * EXCHANGE_ROW) & 1;
  return i + 1;
}

#define ENTRIES_OF(n)                                                                                                 \
  {"move_u" #n, lanes_move_u##n, uniform_move}, {"spread_u" #n, lanes_spread_u##n, 0},                                \
      {"merge_u" #n, lanes_merge_u##n, 0}, {"select_u" #n, lanes_select_u##n, uniform_select_u##n},                   \
      {"lane_u" #n, lanes_lane_u##n, 0}, {"put_u" #n, lanes_put_u##n, uniform_put},                                   \
      {"get_u" #n, lanes_get_u##n, uniform_get_u##n}
const Operation move_operations[] = {
    ENTRIES_OF(8), ENTRIES_OF(16), ENTRIES_OF(32), ENTRIES_OF(64),
    {"move_pred", uniform_move, uniform_move}, {"spread_pred", lanes_spread_pred, 0},
    {"merge_pred", lanes_merge_pred, 0}, {"select_pred", lanes_select_pred, uniform_select_u64},
    {"lane_pred", lanes_lane_pred, 0}, {"put_pred", uniform_put, uniform_put},
    {"get_pred", lanes_get_pred, uniform_get_pred}, {"and_pred", lanes_and_pred, uniform_and_pred},
    {"or_pred", lanes_or_pred, uniform_or_pred}, {"xor_pred", lanes_xor_pred, uniform_xor_pred},
    {"not_pred", lanes_not_pred, uniform_not_pred}, {0, 0, 0},
};
