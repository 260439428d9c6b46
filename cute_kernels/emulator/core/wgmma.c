// wgmma.mma_async, commit_group and wait_group where operations take effect as soon as the last of four warps has issued
// them; wgmma.py has the general case, and takes over what is in flight when this one does not do something.
//
// Warps issue the operations of their warpgroup in one order, so that operation n of each warp is the same one.
#include <stddef.h>
#include <string.h>

#include "events.h"
#include "fragments.h"
#include "meter.h"
#include "races.h"

enum { B = 0, A = 1 };

// --- the product -----------------------------------------------------------------------------------------------------

// Cells of D, transposed: column j of row i at j * WGMMA_ROWS + i.
static _Thread_local uint32_t all_cells[256 * WGMMA_ROWS] __attribute__((aligned(64)));

enum { ROWS_OF_WARP = 16 };

// Register j is of the rows from 8 (j % 2) on of the warp's 16 rows of A, chunk j / 2.
static void gather_fragments(const Wgmma *operation, uint8_t *fragments) {
  for (int warp = 0; warp < WGMMA_WARPS; warp++)
    for (int j = 0; j < A_WORDS / LANES; j++) {
      int row = ROWS_OF_WARP * warp + ROWS_OF_REGISTER * (j % 2);
      take_chunks(&operation->parts[warp].a[LANES * j], fragments + row * K_BYTES + CHUNK * (j / 2));
    }
}

static void move_parts(const Wgmma *operation, const WgmmaForm *form, uint32_t *cells, int store) {
  for (int warp = 0; warp < WGMMA_WARPS; warp++) {
    const WgmmaPart *part = &operation->parts[warp];
    uint32_t *first = cells + ROWS_OF_WARP * warp;
    int halves = form->mma.d == SUM_F16;
    move_accumulators(part->state, part->registers, form->registers, first, WGMMA_ROWS, halves, store);
  }
}

int32_t wgmma_execute(const WgmmaForm *form, Wgmma *operation, uint8_t *data, const uint8_t *states) {
  uint8_t fragments[WGMMA_ROWS * K_BYTES] __attribute__((aligned(64)));
  int64_t rows[WGMMA_ROWS * CHUNKS];  // places of fragments
  Mma mma = form->mma;
  MmaPart *part = &mma.parts[0];
  uint32_t *cells = all_cells;  // found once: of a library that is loaded later, a thread's variables take a call
  part->b = (MmaOperand){data, states, operation->operands[B].places};
  part->a = (MmaOperand){data, states, operation->operands[A].places};
  if (form->a_in_registers) {
    for (int i = 0; i < WGMMA_ROWS * CHUNKS; i++) rows[i] = i;
    gather_fragments(operation, fragments);
    part->a = (MmaOperand){fragments, NULL, rows};
  }
  part->cells = cells;
  mma.accumulate = operation->accumulate;
  if (operation->accumulate) move_parts(operation, form, cells, 0);
  if (!mma_execute(&mma)) return 0;
  move_parts(operation, form, cells, 1);
  return 1;
}

// --- operations of a warpgroup ---------------------------------------------------------------------------------------

static Warpgroup *warpgroup_of(const Tables *t, int64_t who) {
  if (!t->warpgroups || !(t->unit_flags & EAGER)) return NULL;
  return &t->warpgroups[(who & 0xFFFF) * t->warpgroups_of_cta + (who >> 16) / WGMMA_WARPS];
}

// The fewest operations that any warp has issued, and has waited for.
static void least(const Warpgroup *group, int64_t *issued, int64_t *observed) {
  *issued = *observed = INT64_MAX;
  for (int i = 0; i < WGMMA_WARPS; i++) {
    const WgmmaWarp *warp = &group->warps[i];
    *issued = warp->issued < *issued ? warp->issued : *issued;
    *observed = warp->observed < *observed ? warp->observed : *observed;
  }
}

static int find_operand(
    const Tables *t, int64_t descriptor, const WgmmaForm *form, int which, WgmmaOperand *found) {
  const int64_t key[OPERAND_KEY] = {descriptor, form->kinds[which]};
  const WgmmaOperand *entry = &t->wgmma_operands[which * WGMMA_OPERANDS + key_slot(key, OPERAND_KEY, WGMMA_OPERANDS)];
  if (memcmp(entry->key, key, sizeof key)) return 0;
  *found = *entry;
  return 1;
}

// A read of shared memory by an operation whose warps know the clocks: two rows.
static Access read_of(
    const Context *context, const Warpgroup *group, const WgmmaOperand *operand, const int32_t *known,
    const int32_t *fenced) {
  return (Access){
      .shadow = context->shadow, .grain = GRANULE, .offsets = operand->starts, .rows = operand->count,
      .count = operand->nbytes, .known = known, .width = group->width, .own = -1, .lane = -1, .exempt = -1,
      .epochs = context->epochs, .fenced = fenced, .read_column = group->column,
  };
}

// --- what the warps know that issue an operation ---
//
// Between two synchronisations a warp issues several operations, and knows the same each time but for its own clock. So
// operations in a row have one matrix as long as no warp has learnt anything, and each has the clocks of the warps.

static inline int32_t *clocks_of(const Warpgroup *group, int64_t known) {
  return group->clocks + known * ROWS * group->width;
}

static inline Wgmma *operation_of(Warpgroup *group, int64_t number) { return &group->operations[number % WGMMAS]; }

// Operation `number` and those behind it that have the same matrix get one of their own, which begins as a copy.
static void divide(Warpgroup *group, int64_t number, int64_t end) {
  int64_t old = operation_of(group, number)->known, new = 0;
  while (group->known[new].operations) new++;  // every one in use has an operation of the WGMMAS that may be in flight
  WgmmaKnown *from = &group->known[old], *to = &group->known[new];
  memcpy(clocks_of(group, new), clocks_of(group, old), ROWS * (size_t)group->width * sizeof *group->clocks);
  memcpy(to->changes, from->changes, sizeof to->changes);
  for (; number < end && operation_of(group, number)->known == old; number++) {
    operation_of(group, number)->known = new;
    from->operations--;
    to->operations++;
  }
}

// A warp issues an operation, of `issued` that any warp has issued: what it knows is added. To do it again changes
// nothing.
static void learn(Warpgroup *group, const Agent *agent, int64_t number, int64_t member, int64_t issued, int64_t observed) {
  Wgmma *operation = operation_of(group, number);
  if (number == issued) {
    for (; group->forgotten < observed && group->forgotten < number - 1; group->forgotten++)
      group->known[operation_of(group, group->forgotten)->known].operations--;
    operation->known = number ? operation_of(group, number - 1)->known : 0;
    group->known[operation->known].operations++;
    memset(operation->clocks, 0, sizeof operation->clocks);
  }
  if (group->known[operation->known].changes[member] != agent->changes) {
    int64_t end = number == issued ? number + 1 : issued;
    if (number > observed && operation_of(group, number - 1)->known == operation->known) divide(group, number, end);
    agent_tell(agent, clocks_of(group, operation->known));
    group->known[operation->known].changes[member] = agent->changes;
  }
  operation->clocks[member] = agent->clock;
  group->bases[member] = agent->base;
}

void wgmma_tell(const Warpgroup *group, int64_t number, int32_t *clocks) {
  const Wgmma *operation = &group->operations[number % WGMMAS];
  clocks_join(clocks, clocks_of(group, operation->known), ROWS * group->width);
  for (int i = 0; i < WGMMA_WARPS; i++)
    for (int row = 0; row < ROW_PROXY; row++)
      if (operation->clocks[i]) cover_warp(clocks + row * group->width, group->bases[i], operation->clocks[i]);
}

// Whether the race detector can be told of an operation that a warp issues.
static int may_learn(Tables *t, const Warpgroup *group, int first) {
  if (!log_flush(t) || !group->clocks || !t->context) return 0;
  return t->context->agent->width == group->width && (!first || has_room(t->context->epochs, 1));
}

// The last warp issues an operation. 0: nothing has changed.
static int start(Tables *t, const Warpgroup *group, Wgmma *operation, const WgmmaForm *form, int64_t instruction) {
  int watched = (t->unit_flags & WATCHED) != 0, operands = form->a_in_registers ? 1 : 2;
  const Context *context = t->context;
  int32_t *known = watched ? context->agent->scratch : NULL;
  const int32_t *clocks = watched ? clocks_of(group, operation->known) : NULL;
  Access reads[2];
  if (watched) {
    memcpy(known, clocks + ROW_VISIBLE * group->width, (size_t)group->width * sizeof *known);
    for (int i = 0; i < WGMMA_WARPS; i++) cover_warp(known, group->bases[i], operation->clocks[i]);
  }
  for (int i = 0; watched && i < operands; i++) {
    reads[i] = read_of(context, group, &operation->operands[i], known, clocks + ROW_PROXY * group->width);
    if (!access_check(&reads[i])) return 0;
  }
  if (!wgmma_execute(form, operation, group->data, group->states)) return 0;
  for (int i = 0; watched && i < operands; i++) {
    reads[i].identity = operation->identity;
    access_record(&reads[i]);
  }
  if (t->meter) meter_mma(t, instruction, form->operand_bytes, 0, 0);
  t->wgmmas++;
  return 1;
}

static void note(Tables *t, const Warpgroup *group, const Wgmma *operation, int64_t number, int64_t instruction) {
  int64_t index = group - t->warpgroups, rank = index / t->warpgroups_of_cta, mine = index % t->warpgroups_of_cta;
  const WgmmaWork work = {{.kind = WORK_WGMMA}, rank, mine, operation->form};
  event_of_work(t, EVENT_ISSUED, instruction, &work.work, sizeof work);
  event_of_work(t, EVENT_BEGINS, instruction, &work.work, sizeof work);
  int64_t *values = event_at(t, EVENT_WGMMAS, instruction);
  values[0] = rank;
  values[1] = mine;
  values[2] = number + 1;
  event_of_work(t, EVENT_ENDS, instruction, &work.work, sizeof work);
}

int32_t wgmma_issue(Tables *t, int64_t who, const Wgmma *issued, int64_t instruction) {
  Warpgroup *group = warpgroup_of(t, who);
  if (!group) return 0;
  const WgmmaForm *form = &t->wgmma_forms[issued->form];
  int64_t member = (who >> 16) % WGMMA_WARPS, number = group->warps[member].issued, complete, observed, most = 0;
  least(group, &complete, &observed);
  if (number - observed >= WGMMAS) return 0;
  for (int i = 0; i < WGMMA_WARPS; i++) most = group->warps[i].issued > most ? group->warps[i].issued : most;
  Wgmma *operation = &group->operations[number % WGMMAS];
  int first = number == most, watched = (t->unit_flags & WATCHED) != 0, others = 0;
  for (int i = 0; i < WGMMA_WARPS; i++) others += group->warps[i].issued > number;
  WgmmaOperand operands[2];
  if (first) {
    if (!find_operand(t, issued->b, form, B, &operands[B])) return 0;
    if (!form->a_in_registers && !find_operand(t, issued->a, form, A, &operands[A])) return 0;
  } else if (
      operation->form != issued->form || operation->b != issued->b || operation->accumulate != issued->accumulate ||
      (!form->a_in_registers && operation->a != issued->a)) {
    return 0;
  }
  if (watched && !may_learn(t, group, first)) return 0;
  if (first) {
    operation->form = issued->form;
    operation->a = issued->a;
    operation->b = issued->b;
    operation->accumulate = issued->accumulate;
    memcpy(operation->operands, operands, sizeof operands);
    if (watched)
      operation->identity = new_epoch(t->context->epochs, group->column, number + 1, form->text, 0, (int32_t)instruction);
  }
  if (watched) learn(group, t->context->agent, number, member, most, observed);
  operation->parts[member] = issued->parts[member];
  if (others == WGMMA_WARPS - 1 && !start(t, group, operation, form, instruction)) return 0;
  if (watched) agent_advance(t->context->agent);
  if (t->events && others == WGMMA_WARPS - 1) note(t, group, operation, number, instruction);
  if (!group->warps[member].issued++) group->warps[member].order = ++t->wgmma_warps;
  t->progress++;
  return 1;
}

int32_t wgmma_commit(Tables *t, int64_t who) {
  Warpgroup *group = warpgroup_of(t, who);
  if (!group) return 0;
  WgmmaWarp *warp = &group->warps[(who >> 16) % WGMMA_WARPS];
  if (warp->committed - warp->waited == WGMMA_GROUPS) return 0;
  warp->ends[warp->committed++ % WGMMA_GROUPS] = warp->issued;
  return 1;
}

// How many operations of its warpgroup have to be complete for a wait of a warp to end.
static int64_t end_of_wait(const Warpgroup *group, int64_t who, int64_t newest) {
  const WgmmaWarp *warp = &group->warps[(who >> 16) % WGMMA_WARPS];
  int64_t older = warp->committed - warp->waited - newest;
  return older > 0 ? warp->ends[(warp->waited + older - 1) % WGMMA_GROUPS] : 0;
}

int32_t wgmma_waits(Tables *t, int64_t who, int64_t newest) {
  int64_t complete, observed;
  const Warpgroup *group = warpgroup_of(t, who);
  if (!group) return 0;
  least(group, &complete, &observed);
  return end_of_wait(group, who, newest) > complete;
}

int32_t wgmma_wait(Tables *t, int64_t who, int64_t newest) {
  Warpgroup *group = warpgroup_of(t, who);
  if (!group) return 0;
  WgmmaWarp *warp = &group->warps[(who >> 16) % WGMMA_WARPS];
  int64_t older = warp->committed - warp->waited - newest, complete, observed;
  if (older <= 0) return 1;
  int64_t end = end_of_wait(group, who, newest);
  least(group, &complete, &observed);
  if (end > complete) return 0;
  if (t->unit_flags & WATCHED && end > warp->observed) {
    // The warps know at least as much when they issue an operation as when they issued those before.
    if (!log_flush(t) || t->context->agent->width != group->width) return 0;
    Agent *agent = t->context->agent;
    wgmma_tell(group, end - 1, agent->clocks);
    agent->changes++;
    clocks_raise(agent->clocks, group->width, ROW_TENSOR, group->column, end);
  }
  warp->waited += older;
  warp->observed = end;
  return 1;
}
