// wgmma.mma_async, fence, commit_group and wait_group: Hopper's tensor core, which the four warps of a warpgroup use together.
//
// An operation starts when the last of its warps has issued it, and completes at any later time that the completion policy
// chooses; until then its accumulators are not there, and its operands are read from shared memory as they are at
// completion. Only wgmma.wait_group tells a program that it is complete, so the bytes that it reads count as in use until
// one of its warps has waited, whatever the policy. Warps issue the operations of their warpgroup in one order, so that
// operation n of each warp is the same one. wgmma.py words what is wrong.
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "asynchronous.h"
#include "events.h"
#include "fragments.h"
#include "meter.h"
#include "wgmma.h"

// --- operands --------------------------------------------------------------------------------------------------------

MatrixRows wgmma_rows(const WgmmaForm *form, int which) {
  const MmaType *type = which == WGMMA_A ? &form->mma.a : &form->mma.b;
  int64_t element = type->element, nbytes = element == TF32 ? 4 : element == F16 || element == BF16 ? 2 : 1;
  return (MatrixRows){which == WGMMA_A ? form->mma.m : form->mma.n, nbytes, type->unit != CHUNK};
}

SharedOperand wgmma_operand(const WgmmaForm *form, int which, const Wgmma *operation) {
  MatrixRows rows = wgmma_rows(form, which);
  SharedOperand found;
  Matrix matrix;
  wgmma_matrix(which == WGMMA_A ? operation->a : operation->b, &matrix);
  shared_operand(&matrix, &rows, &found);
  return found;
}

static int refused_operand(Tables *t, const Wgmma *issued, int which, int64_t rank) {
  int64_t descriptor = which == WGMMA_A ? issued->a : issued->b;
  MatrixRows rows = wgmma_rows(&t->wgmma_forms[issued->form], which);
  SharedOperand found;
  Matrix matrix;
  int32_t wrong = wgmma_matrix(descriptor, &matrix);
  if (wrong) return stops(t, WGMMA_DESCRIPTOR, .wgmma = {.form = issued->form, .descriptor = descriptor, .why = wrong});
  if (shared_operand(&matrix, &rows, &found) && found.high <= t->ctas[rank].size) return 0;
  return stops(t, WGMMA_OUTSIDE, .wgmma = {.form = issued->form, .low = found.low, .high = found.high, .cta = rank});
}

// --- the product -----------------------------------------------------------------------------------------------------

enum { ROWS_OF_WARP = 16 };

// Cells of D, transposed: column j of row i at j * WGMMA_ROWS + i.
static _Thread_local uint32_t all_cells[WGMMA_MOST_ROWS * WGMMA_ROWS] __attribute__((aligned(64)));

// Register j is of the rows from 8 (j % 2) on of the warp's 16 rows of A, chunk j / 2.
static void gather_fragments(const Wgmma *operation, uint8_t *fragments) {
  for (int warp = 0; warp < WGMMA_WARPS; warp++)
    for (int j = 0; j < A_WORDS / LANES; j++) {
      int row = ROWS_OF_WARP * warp + ROWS_OF_REGISTER * (j % 2);
      take_chunks(&operation->parts[warp].a[LANES * j], fragments + row * K_BYTES + CHUNK * (j / 2));
    }
}

// Between cells and the registers at these offsets of each warp's state.
static void move_parts(
    const Wgmma *operation, const WgmmaForm *form, const uint32_t *const registers[], uint32_t *cells, int store) {
  for (int warp = 0; warp < WGMMA_WARPS; warp++)
    move_accumulators(
        operation->parts[warp].state, registers[warp], form->registers, cells + ROWS_OF_WARP * warp, WGMMA_ROWS,
        form->mma.d == SUM_F16, store);
}

// Operands are at `a` and `b`. 0: bytes of them are not initialised, and nothing is done.
static int multiply(
    const Wgmma *operation, const WgmmaForm *form, const uint32_t *const registers[], MmaOperand a, MmaOperand b) {
  uint32_t *cells = all_cells;  // found once: of a library that is loaded later, a thread's variables take a call
  Mma mma = form->mma;
  mma.parts[0].a = a;
  mma.parts[0].b = b;
  mma.parts[0].cells = cells;
  mma.accumulate = operation->accumulate;
  if (operation->accumulate) move_parts(operation, form, registers, cells, 0);
  if (!mma_execute(&mma)) return 0;
  move_parts(operation, form, registers, cells, 1);
  return 1;
}

static int uninitialised(Tables *t, int64_t form, const int64_t *places, int operand, int64_t rank) {
  return stops(t, WGMMA_UNINITIALISED, .wgmma = {form, .places = WHERE(places), .operand = operand, .cta = rank});
}

int32_t wgmma_run(WorkQueues *all, const WgmmaWork *work) {
  Tables *t = all->tables;
  Warpgroup *group = &t->warpgroups[work->warpgroup];
  int64_t rank = work->warpgroup / t->warpgroups_of_cta, rows[WGMMA_ROWS * CHUNKS];  // places of fragments
  const Wgmma *operation = operation_of(group, work->number);
  const WgmmaForm *form = &t->wgmma_forms[operation->form];
  uint8_t fragments[WGMMA_ROWS * K_BYTES] __attribute__((aligned(64)));
  uint32_t homes[WGMMA_WARPS][WGMMA_MOST_REGISTERS];
  const uint32_t *registers[WGMMA_WARPS];
  for (int i = 0; i < WGMMA_WARPS; i++) {
    registers[i] = t->register_cells ? homes[i] : operation->parts[i].registers;
    if (t->register_cells) registers_locate(t, group, i, work->number, homes[i]);
  }
  operands_make_room();
  const Cta *cta = &t->ctas[rank];
  const uint8_t *states = t->flags & STATES ? cta->states : NULL;
  MmaOperand b = {cta->data, states, wgmma_operand(form, WGMMA_B, operation).places}, a = {fragments, NULL, rows};
  if (form->a_in_registers) {
    for (int i = 0; i < WGMMA_ROWS * CHUNKS; i++) rows[i] = i;
    gather_fragments(operation, fragments);
  } else {
    a = (MmaOperand){cta->data, states, wgmma_operand(form, WGMMA_A, operation).places};
  }
  if (!multiply(operation, form, registers, a, b)) {
    if (uninitialised(t, operation->form, b.places, WGMMA_B, rank)) return 1;
    if (a.states && uninitialised(t, operation->form, a.places, WGMMA_A, rank)) return 1;
    a.states = b.states = NULL;  // execution goes on after the report: whatever the memory holds is multiplied
    multiply(operation, form, registers, a, b);
  }
  for (int i = 0; t->register_cells && i < WGMMA_WARPS; i++) registers_fill(t, group, i, work->number, homes[i]);
  group->complete = work->number + 1;
  t->wgmmas++;
  event(t, EVENT_WGMMAS, rank, work->warpgroup % t->warpgroups_of_cta, group->complete);
  return 0;
}

// --- operations of a warpgroup ---------------------------------------------------------------------------------------

enum { FIRST_ROOM = 16 };  // operations

static void make_room(const Tables *t, Warpgroup *group) {
  int64_t old = group->room, room = old ? 2 * old : FIRST_ROOM, cells = t->register_cells;
  Wgmma *operations = calloc((size_t)room, sizeof *operations);
  int64_t issued = 0;
  for (int i = 0; i < WGMMA_WARPS; i++) issued = group->warps[i].issued > issued ? group->warps[i].issued : issued;
  for (int64_t n = issued > old ? issued - old : 0; n < issued; n++) operations[n % room] = group->operations[n % old];
  for (int i = 0; cells && i < WGMMA_WARPS; i++) {
    int16_t *held = calloc((size_t)(room * cells), sizeof *held);
    for (int64_t n = group->complete; n < issued; n++)
      memcpy(held + n % room * cells, group->warps[i].held + n % old * cells, (size_t)cells * sizeof *held);
    free(group->warps[i].held);
    group->warps[i].held = held;
  }
  free(group->operations);
  group->operations = operations;
  wgmma_keep_known(group, room);
  group->room = room;
}

void wgmma_free(Warpgroup *groups, int64_t count) {
  for (int64_t i = 0; i < count; i++) {
    for (int k = 0; k < WGMMA_WARPS; k++) free(groups[i].warps[k].held);
    free(groups[i].operations);
    free(groups[i].known);
    free(groups[i].clocks);
  }
}

// The last warp has issued an operation.
static int start(Tables *t, const WarpHeader *header, const Warpgroup *group, int64_t number) {
  int64_t index = group - t->warpgroups;
  int64_t form = operation_of(group, number)->form;
  if (t->meter) meter_mma(t, t->place, t->wgmma_forms[form].operand_bytes, 0, 0);
  if (t->context && wgmma_races(t, group, number, header->rank)) return 1;
  WgmmaWork work = {
      .work = {
          .kind = WORK_WGMMA, .queue = WGMMA_QUEUE - index, .yields = 1, .place = t->place, .warp = header->number,
      },
      .warpgroup = index, .form = form, .number = number,
  };
  return work_submit(t->work, &work.work, sizeof work);
}

static int is_same(const WgmmaForm *form, const Wgmma *one, const Wgmma *other) {
  return one->form == other->form && one->b == other->b && one->accumulate == other->accumulate &&
         (form->a_in_registers || one->a == other->a);
}

// A warp issues the operation that `issued` describes, with its own part. 1: Python has been told what is wrong.
static int issue(Tables *t, const WarpHeader *header, Warpgroup *group, const Wgmma *issued) {
  int64_t member = header->index % WGMMA_WARPS, number = group->warps[member].issued, most = 0, observed = INT64_MAX;
  const WgmmaForm *form = &t->wgmma_forms[issued->form];
  int others = 0;
  for (int i = 0; i < WGMMA_WARPS; i++) {
    const WgmmaWarp *warp = &group->warps[i];
    most = warp->issued > most ? warp->issued : most;
    observed = warp->observed < observed ? warp->observed : observed;
    others += warp->issued > number;
  }
  if (number == most) {
    operands_make_room();
    if (refused_operand(t, issued, WGMMA_B, header->rank)) return 1;
    if (!form->a_in_registers && refused_operand(t, issued, WGMMA_A, header->rank)) return 1;
    if (number - observed >= group->room) make_room(t, group);
    Wgmma *operation = operation_of(group, number);
    operation->form = issued->form;
    operation->a = issued->a;
    operation->b = issued->b;
    operation->accumulate = issued->accumulate;
  } else if (!is_same(form, issued, operation_of(group, number))) {
    const Wgmma *theirs = operation_of(group, number);
    return stops(t, WGMMA_DIFFERS, .wgmma = {issued->form, WHERE(issued), WHERE(theirs), .cta = header->rank});
  }
  if (t->context && !wgmma_learn(t, group, member, number, most, observed)) return 1;
  operation_of(group, number)->parts[member] = issued->parts[member];
  if (t->register_cells) registers_hold(t, group, (int)member, number);
  if (!group->warps[member].issued++) group->warps[member].order = ++t->wgmma_warps;
  return others == WGMMA_WARPS - 1 && start(t, header, group, number);
}

// --- in bytecode -----------------------------------------------------------------------------------------------------

// All of them are for whole warps.
static int is_part(const Instruction *i, const uint8_t *s, const Machine *m) {
  m->tables->place = place_of(i);
  return m->active != ((const WarpHeader *)(const void *)s)->live && stops(m->tables, WRONG_LANES, .lanes.mask = m->active);
}

// One value of all lanes: in the word at an offset or, where it varies, in a row of lanes. 0: they differ.
static int together(const uint8_t *s, uint32_t offset, int varies, int64_t *value) {
  int64_t differ = 0;
  *value = AT(const s64, offset);
  if (!varies) return 1;
  const s64 *lanes = ROW_OF(const s64, offset);
  for (int lane = 0; lane < LANES; lane++) differ |= lanes[lane] ^ *value;
  return !differ;
}

static const Instruction *differs(Machine *m, int32_t what, int64_t form) {
  stops(m->tables, what, .wgmma.form = form);
  return leave(m, ERROR);
}

// The list b: number of the form, scale-d, descriptors of B and of A (0: in registers), registers of A, and those of D. Of
// scale-d and the descriptors, c says by bits whether they vary between lanes.
static const Instruction *run_wgmma(const Instruction *i, uint8_t *s, Machine *m) {
  enum { HEAD = 4, A_REGISTERS = A_WORDS / LANES };
  const WarpHeader *header = (const WarpHeader *)(const void *)s;
  const uint32_t *list = m->program->lists + i->b;
  Tables *t = m->tables;
  if (is_part(i, s, m) || !takes_logs(t)) return leave(m, ERROR);
  t->progress++;
  Wgmma issued;
  WgmmaPart *part = &issued.parts[header->index % WGMMA_WARPS];
  uint32_t scale = i->c & 1 ? AT(u32, list[1]) & m->active : AT(s64, list[1]) ? m->active : 0;
  issued.form = list[0];
  issued.accumulate = scale != 0;
  issued.a = 0;
  if (scale && scale != m->active) return differs(m, WGMMA_SCALE, issued.form);
  if (list[3] && !together(s, list[3], i->c & 4, &issued.a)) return differs(m, WGMMA_LANES, issued.form);
  if (!together(s, list[2], i->c & 2, &issued.b)) return differs(m, WGMMA_LANES, issued.form);
  for (int k = 0; k < A_REGISTERS && !list[3]; k++)
    memcpy(part->a + LANES * k, s + list[HEAD + k], LANES * sizeof *part->a);
  part->state = s;
  part->registers = list + HEAD + (list[3] ? 0 : A_REGISTERS);
  return issue(t, header, warpgroup_of(t, header), &issued) ? leave(m, ERROR) : i + 1;
}

// Orders accesses to registers, which take effect in program order here; missing ones are found ahead.
static const Instruction *run_wgmma_fence(const Instruction *i, uint8_t *s, Machine *m) {
  return is_part(i, s, m) ? leave(m, ERROR) : i + 1;
}

static const Instruction *run_wgmma_commit(const Instruction *i, uint8_t *s, Machine *m) {  // an empty group is legal
  const WarpHeader *header = (const WarpHeader *)(const void *)s;
  Warpgroup *group = warpgroup_of(m->tables, header);
  if (is_part(i, s, m)) return leave(m, ERROR);
  if (!group) return i + 1;
  WgmmaWarp *warp = &group->warps[header->index % WGMMA_WARPS];
  warp->ends[warp->committed++ % WGMMA_GROUPS] = warp->issued;
  return i + 1;
}

// imm's order: how many groups, the newest, may be incomplete.
static const Instruction *run_wgmma_wait(const Instruction *i, uint8_t *s, Machine *m) {
  WarpHeader *header = (WarpHeader *)(void *)s;
  Tables *t = m->tables;
  Warpgroup *group = warpgroup_of(t, header);
  int64_t newest = i->imm & 255;
  if (is_part(i, s, m)) return leave(m, ERROR);
  WgmmaWarp *warp = group ? &group->warps[header->index % WGMMA_WARPS] : NULL;
  if (!warp || warp->committed - newest <= warp->waited) return i + 1;
  int64_t end = warp->ends[(warp->committed - newest - 1) % WGMMA_GROUPS];
  if (end > group->complete) {
    header->newest = end;
    return wait_here(i, s, m, WAITS_GROUPS, newest);
  }
  if (t->context && end > warp->observed) {
    if (!takes_logs(t)) return leave(m, ERROR);
    wgmma_observe(t->context->agent, group, end);
  }
  warp->waited = warp->committed - newest;
  warp->observed = end;
  return i + 1;
}

const Operation wgmma_operations[] = {
    {"wgmma", run_wgmma, 0}, {"wgmma_fence", run_wgmma_fence, 0}, {"wgmma_commit", run_wgmma_commit, 0},
    {"wgmma_wait", run_wgmma_wait, 0}, {0, 0, 0},
};
