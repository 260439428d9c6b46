// Runs warps whose kernel is bytecode: basic blocks, branches and guards, calls of Python; clocks.
#include <string.h>

#include "bytecode.h"

#define FORM(name) static const Instruction *name(const Instruction *i, uint8_t *s, __attribute__((unused)) Machine *m)
#define HEADER ((WarpHeader *)s)

FORM(block) {  // a: offset of its count; b: its instructions; c: a turn may end here; imm: its number
  WarpHeader *header = HEADER;
  AT(s64, i->a)++;
  header->steps += i->b;
  if (i->c && --header->budget <= 0) {
    header->pc = (int32_t)i->imm;
    header->entered = 1;
    return leave(m, WAIT);
  }
  m->mask = m->active = header->mask;
  return i + 1;
}

FORM(follow) {  // takes the place of a block that a debugger follows
  HEADER->pc = (int32_t)i->imm;
  return block(i, s, m);
}

FORM(stop) {  // likewise, and stops there
  HEADER->pc = (int32_t)i->imm;
  return m->call(SITE_STOP, HEADER->mask) ? leave(m, ERROR) : block(i, s, m);
}

FORM(finish) {
  (void)s, (void)i;
  return leave(m, EXIT);
}

// `divergent`: lanes may be waiting somewhere for these.
static const Instruction *go(uint32_t target, uint32_t divergent, uint8_t *s, Machine *m) {
  return divergent && HEADER->meet == (int32_t)target ? meet_others(s, m) : start_of(m, target);
}

FORM(jump) { return go(i->b, i->d, s, m); }  // b: block; d: divergent
FORM(branch_uniform) { return go(AT(u64, i->a) ? i->b : i->c, i->d, s, m); }
FORM(branch) {  // b, c: blocks where the predicate a holds and where not; imm: where the lanes meet
  uint32_t lanes = AT(u32, i->a) & m->mask;
  if (lanes == m->mask) return go(i->b, i->d, s, m);
  if (!lanes) return go(i->c, i->d, s, m);
  return part(s, m, lanes, (int32_t)i->b, (int32_t)i->c, (int32_t)i->imm);
}

// Instructions up to the end of the guard are skipped where no lane executes them.
FORM(guard) {
  m->active = m->mask & AT(u32, i->a);
  return m->active ? i + 1 : i + 1 + i->imm;
}
FORM(guard_uniform) { return AT(u64, i->a) ? i + 1 : i + 1 + i->imm; }
FORM(guard_end) {
  (void)s;
  m->active = m->mask;
  return i + 1;
}

FORM(call) {  // a: site
  (void)s;
  int32_t status = m->call((int32_t)i->a, m->active);
  return status == GO ? i + 1 : leave(m, status);
}
FORM(call_blocking) {  // b: number of the block, which runs again
  HEADER->pc = (int32_t)i->b;
  int32_t status = m->call((int32_t)i->a, m->active);
  return status == GO ? i + 1 : status == WAIT ? wait_in(s, m, i->b) : leave(m, status);
}

// A clock, of 64 bits with FLAG, else of 32, to the word d.
FORM(read_clock) {
  uint64_t now = (uint64_t)(m->tables->clock += CLOCK_STEP);
  AT(u64, i->d) = i->c & FLAG ? now : (uint32_t)now;
  return i + 1;
}

const Operation flow_operations[] = {
    {"block", block, 0}, {"follow", follow, 0}, {"stop", stop, 0}, {"exit", finish, 0}, {"jump", jump, 0},
    {"branch", branch, branch_uniform}, {"guard", guard, guard_uniform}, {"guard_end", guard_end, 0}, {"call", call, 0},
    {"call_blocking", call_blocking, 0}, {"read_clock", read_clock, 0}, {0, 0, 0},
};

int32_t warp_run(const Program *program, uint8_t *state, uint8_t *rows, Tables *t, void *callback) {
  WarpHeader *header = (WarpHeader *)state;
  Machine machine = {.program = program, .rows = rows, .tables = t, .mask = header->mask, .active = header->mask};
  memcpy(&machine.call, &callback, sizeof callback);
  t->steps = &header->steps;
  t->budget = &header->budget;
  const Instruction *i = start_of(&machine, header->pc);
  if (header->entered) {
    header->entered = 0;
    if (((Run *)i->run) != finish) i++;
  }
  while (i) i = ((Run *)i->run)(i, state, &machine);
  return machine.status;
}

static const Operation *const tables[] = {
    integer_operations, bit_operations, float_operations, double_operations, conversion_operations,
    move_operations, flow_operations, barrier_operations, mbarrier_operations,
    together_operations, bulk_operations, group_operations, memory_operations, copy_operations, commit_operations,
    tensor_operations, mma_operations, wgmma_operations, register_operations, warp_mma_operations, NULL,
};

static const Operation *operation(int32_t number) {
  for (int k = 0; tables[k]; k++)
    for (const Operation *each = tables[k]; each->name; each++)
      if (!number--) return each;
  return NULL;
}

int32_t operation_count(void) {
  int32_t count = 0;
  while (operation(count)) count++;
  return count;
}

const char *operation_name(int32_t number) { return operation(number)->name; }

void *operation_run(int32_t number, int32_t lanes) {
  const Operation *found = operation(number);
  return (void *)(lanes ? found->lanes : found->uniform);
}
