// Instructions that do what Python functions do: MMAs of warps; clocks.
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

// mma.sync by the whole warp. The list b: number of the form, registers of A, B, C and D.
FORM(warp_mma) {
  const uint32_t *list = m->program->lists + i->b;
  DONE(m->active == UINT32_MAX && warp_mma(&m->tables->warp_mmas[list[0]], s, list + 1));
}

#define ENTRY(name) {#name, run_##name, 0}
const Operation unit_operations[] = {
    ENTRY(read_clock), ENTRY(warp_mma), {0, 0, 0},
};
