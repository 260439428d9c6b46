// Instructions that do what Python functions do: MMAs of warps and warpgroups; clocks.
//
// Each does the frequent case whole, leaves its result in the first exchange row, and skips the `d` instructions behind
// it, which call Python for all other cases.
#include <string.h>

#include "bytecode.h"
#include "meter.h"

#define FORM(name) \
  static const Instruction *run_##name(const Instruction *i, uint8_t *s, __attribute__((unused)) Machine *m)
#define DONE(done) return (done) ? i + 1 + i->d : i + 1

// A clock, of 64 bits with FLAG, else of 32, to the word d.
FORM(read_clock) {
  uint64_t now = (uint64_t)(m->tables->clock += CLOCK_STEP);
  AT(u64, i->d) = i->c & FLAG ? now : (uint32_t)now;
  return i + 1;
}

// --- units -----------------------------------------------------------------------------------------------------------

// One value of all lanes: in the word at an offset or, where it varies, in a row of lanes. 0: they differ.
static int together(const uint8_t *s, uint32_t offset, int varies, int64_t *value) {
  int64_t differ = 0;
  *value = AT(const s64, offset);
  if (!varies) return 1;
  const s64 *lanes = ROW_OF(const s64, offset);
  for (int lane = 0; lane < LANES; lane++) differ |= lanes[lane] ^ *value;
  return !differ;
}

// mma.sync by the whole warp. The list b: number of the form, registers of A, B, C and D.
FORM(warp_mma) {
  const uint32_t *list = m->program->lists + i->b;
  DONE(m->active == UINT32_MAX && warp_mma(&m->tables->warp_mmas[list[0]], s, list + 1));
}

// wgmma.mma_async by the whole warp. The list b: number of the form, words with who issues, scale-d, descriptor of B
// and of A (0: in registers), registers of A, and those of D, ended by 0. Of scale-d and the descriptors, c says by bits
// whether they vary between lanes.
FORM(wgmma) {
  enum { HEAD = 5, A_REGISTERS = A_WORDS / LANES };
  const uint32_t *list = m->program->lists + i->b;
  int64_t who = AT(s64, list[1]);
  Wgmma issued;
  WgmmaPart *part = &issued.parts[(who >> 16) % WGMMA_WARPS];
  if (m->active != UINT32_MAX) return i + 1;
  issued.form = list[0];
  issued.accumulate = i->c & 1 ? AT(u32, list[2]) : AT(s64, list[2]) ? UINT32_MAX : 0;
  if (issued.accumulate && issued.accumulate != UINT32_MAX) return i + 1;
  issued.accumulate = issued.accumulate != 0;
  if (!together(s, list[3], i->c & 2, &issued.b)) return i + 1;
  issued.a = 0;
  if (list[4] && !together(s, list[4], i->c & 4, &issued.a)) return i + 1;
  for (int k = 0; k < A_REGISTERS && !list[4]; k++)
    memcpy(part->a + LANES * k, s + list[HEAD + k], LANES * sizeof *part->a);
  part->state = s;
  part->registers = list + HEAD + (list[4] ? 0 : A_REGISTERS);
  DONE(wgmma_issue(m->tables, who, &issued, i->imm));
}
FORM(wgmma_commit) { DONE(m->active == UINT32_MAX && wgmma_commit(m->tables, AT(s64, i->a))); }
FORM(wgmma_wait) {  // c: as of try_wait, whether the warp never diverges here
  int64_t who = AT(s64, i->a);
  if (m->active != UINT32_MAX) return i + 1;
  if (wgmma_wait(m->tables, who, i->imm)) return i + 1 + i->d;
  return i->c && wgmma_waits(m->tables, who, i->imm) ? wait_for(i, s, m, WAITS_GROUPS, (int32_t)i->imm) : i + 1;
}

#define ENTRY(name) {#name, run_##name, 0}
const Operation unit_operations[] = {
    ENTRY(read_clock), ENTRY(warp_mma), ENTRY(wgmma), ENTRY(wgmma_commit), ENTRY(wgmma_wait), {0, 0, 0},
};
