// Instructions that do what Python functions do: MMAs; clocks.
//
// Each does the frequent case whole, leaves its result in the first exchange row, and skips the `d` instructions behind
// it, which call Python for all other cases.
#include <string.h>

#include "bytecode.h"
#include "meter.h"

#define FORM(name) \
  static const Instruction *run_##name(const Instruction *i, uint8_t *s, __attribute__((unused)) Machine *m)
#define DONE(done) return (done) ? i + 1 + i->d : i + 1

static int one_lane(const Machine *m) { return !(m->active & (m->active - 1)); }
static uint32_t first_lane(const Machine *m) { return m->active ? (uint32_t)__builtin_ctz(m->active) : 0; }

// A clock, of 64 bits with FLAG, else of 32, to the word d.
FORM(read_clock) {
  uint64_t now = (uint64_t)(m->tables->clock += CLOCK_STEP);
  AT(u64, i->d) = i->c & FLAG ? now : (uint32_t)now;
  return i + 1;
}

// --- units -----------------------------------------------------------------------------------------------------------

// Copies words to the exchange rows: the list c, ended by 0; 1 stands for the word 0.
static void gather(const Instruction *i, const uint8_t *s, const Machine *m) {
  int64_t *words = (int64_t *)(void *)m->rows;
  for (const uint32_t *offset = m->program->lists + i->c; *offset; offset++)
    *words++ = *offset == 1 ? 0 : AT(const s64, *offset);
}

// Who issues: CTA rank, the first executing lane, number of the warp; a: the first and the last of these.
static int64_t issuer(const Instruction *i, const uint8_t *s, const Machine *m) {
  return AT(const s64, i->a) | (int64_t)first_lane(m) << 8;
}
FORM(tensor_mma) {  // the list c: words of `MmaArguments` but who issues; imm: instruction
  if (!one_lane(m)) return i + 1;
  Tables *t = m->tables;
  MmaArguments *arguments = (MmaArguments *)(void *)m->rows;
  gather(i, s, m);
  arguments->issuer = issuer(i, s, m);
  DONE(t->tensor_mma(t, arguments, (int32_t)i->imm));
}

#define ENTRY(name) {#name, run_##name, 0}
const Operation unit_operations[] = {
    ENTRY(read_clock), ENTRY(tensor_mma), {0, 0, 0},
};
