// Lanes that execute together: elect.sync, bar.warp.sync, operands that PTX wants to be the same in all of them; and what
// tells the race detector alone how a warp's accesses are ordered. lane_faults.py words what is wrong.
#include "bytecode.h"

#define FORM(name) \
  static const Instruction *run_##name(const Instruction *i, uint8_t *s, __attribute__((unused)) Machine *m)

// Something is wrong with lanes, or with their operands at an address.
#define wrong(i, m, what, ...)                                                                       \
  ((m)->tables->place = place_of(i), stops((m)->tables, what, __VA_ARGS__, .lanes.executing = (m)->active), \
   leave(m, ERROR))

// The value a of the executing lanes, whose result is that of one.
#define AGREED_OF(n)                                                                                                  \
  FORM(agreed_u##n) {                                                                                                 \
    const u##n *a = ROW_OF(u##n, i->a);                                                                               \
    u##n value = m->active ? a[__builtin_ctz(m->active)] : 0;                                                         \
    int differs = 0;                                                                                                  \
    for (int lane = 0; lane < LANES; lane++) differs |= a[lane] != value && m->active >> lane & 1;                    \
    if (differs) return wrong(i, m, LANES_DIFFER, .lanes.operands = WHERE(a), .lanes.bits = n);                                    \
    AT(u64, i->d) = value;                                                                                            \
    return i + 1;                                                                                                     \
  }
AGREED_OF(8)
AGREED_OF(16)
AGREED_OF(32)
AGREED_OF(64)

// Of the lanes `left` the first, and all executing ones that name the same member mask, the operand a.
static uint32_t group_of(const Instruction *i, const uint8_t *s, const Machine *m, uint32_t left, uint32_t *members) {
  const u32 *masks = (const u32 *)(const void *)(s + i->a);
  uint32_t lanes = 0;
  *members = masks[i->c & ROWS_A ? __builtin_ctz(left) : 0];
  if (!(i->c & ROWS_A)) return m->active;
  for (int lane = 0; lane < LANES; lane++) lanes |= (uint32_t)(masks[lane] == *members) << lane;
  return lanes & m->active;
}

// A group of lanes has to be all live ones that its member mask names.
static int32_t refused(const uint8_t *s, const Machine *m, uint32_t lanes, uint32_t members) {
  if (members & m->active & ~lanes) return MASKS_DIFFER;
  return members & ((const WarpHeader *)s)->live & ~lanes || lanes & ~members ? WRONG_MEMBERS : GO;
}

FORM(elect) {  // the lowest lane of each group
  uint32_t members, lanes, elected = 0;
  for (uint32_t left = m->active; left; left &= ~lanes) {
    lanes = group_of(i, s, m, left, &members);
    int32_t what = refused(s, m, lanes, members);
    if (what != GO) return wrong(i, m, what, .lanes.operands = WHERE(s + i->a), .lanes.members = members, .lanes.mask = lanes);
    elected |= lanes & -lanes;
  }
  AT(u64, i->d) = elected;
  return i + 1;
}

// Where lanes that have parted may come one after the other to an instruction that PTX has them execute together; a: member
// masks (FLAG: all lanes of the warp).
FORM(gather) {
  WarpHeader *warp = (WarpHeader *)s;
  uint32_t wanted = i->c & FLAG ? warp->live : 0;
  warp->gathers = 0;
  if (!warp->parted) return i + 1;
  for (uint32_t left = i->c & FLAG ? 0 : m->active; left; left &= left - 1)
    wanted |= ((const u32 *)(const void *)(s + i->a))[i->c & ROWS_A ? __builtin_ctz(left) : 0];
  wanted &= warp->live & ~m->mask;
  return wanted ? gather(i, s, m, wanted) : i + 1;
}

FORM(converge) {  // FLAG: all lanes of the warp, which run together; else a: their member masks
  Tables *t = m->tables;
  uint32_t members, lanes;
  t->place = place_of(i);
  if (!takes_logs(t)) return leave(m, ERROR);
  for (uint32_t left = m->active; left; left &= ~lanes) {
    lanes = i->c & FLAG ? m->active : group_of(i, s, m, left, &members);
    int32_t what = i->c & FLAG ? GO : refused(s, m, lanes, members);
    if (what != GO) return wrong(i, m, what, .lanes.operands = WHERE(s + i->a), .lanes.members = members, .lanes.mask = lanes);
    if (t->context) agent_converge(t->context->agent, lanes);
  }
  return i + 1;
}

// Orders of the race detector: with detectors alone, and after what the warp did before.
#define ORDER(name, effect)                                                                                           \
  FORM(name) {                                                                                                        \
    (void)s;                                                                                                          \
    Tables *t = m->tables;                                                                                            \
    t->place = place_of(i);                                                                                           \
    if (!takes_logs(t)) return leave(m, ERROR);                                                                    \
    if (t->context) effect;                                                                                           \
    return i + 1;                                                                                                     \
  }
ORDER(fence_proxy, agent_fence_proxy(t->context->agent, m->active, i->imm & 255))
ORDER(tensor_fence, agent_fence_tensor(t->context->agent, i->imm & 255))
ORDER(complete_tensor, agent_complete_tensor(t->context->agent, i->imm & 255))
FORM(tensor_wait) {
  if (m->active != ((WarpHeader *)s)->live) return wrong(i, m, WRONG_LANES, .lanes.mask = m->active);
  return run_complete_tensor(i, s, m);
}

#define ENTRY(name) {#name, run_##name, 0}
const Operation together_operations[] = {
    ENTRY(agreed_u8), ENTRY(agreed_u16), ENTRY(agreed_u32), ENTRY(agreed_u64), ENTRY(elect), ENTRY(gather), ENTRY(converge),
    ENTRY(fence_proxy), ENTRY(tensor_fence), ENTRY(tensor_wait), {0, 0, 0},
};
