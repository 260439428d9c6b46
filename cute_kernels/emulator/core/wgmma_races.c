// What the race detector makes of wgmmas: what the warps know that issue an operation, and what it reads.
//
// Between two synchronisations a warp issues several operations, and knows the same each time but for its own clock. So
// operations in a row have one matrix as long as no warp has learnt anything, and each has the clocks of the warps.
#include <stdlib.h>
#include <string.h>

#include "fragments.h"
#include "wgmma.h"

static inline int32_t *clocks_of(const Warpgroup *group, int64_t known) {
  return group->clocks + known * ROWS * group->width;
}

// Matrices for so many operations and columns.
static void make_clocks(Warpgroup *group, int64_t room, int64_t width) {
  int32_t *clocks = calloc((size_t)(room * ROWS * width), sizeof *clocks);
  for (int64_t row = 0; row < group->room * ROWS && group->clocks; row++)
    memcpy(clocks + row * width, group->clocks + row * group->width, (size_t)group->width * sizeof *clocks);
  free(group->clocks);
  group->clocks = clocks;
  group->width = width;
}

void wgmma_keep_known(Warpgroup *group, int64_t room) {
  WgmmaKnown *known = calloc((size_t)room, sizeof *known);
  if (group->known) memcpy(known, group->known, (size_t)group->room * sizeof *known);
  free(group->known);
  group->known = known;
  if (group->width) make_clocks(group, room, group->width);
}

// Operation `number` and those behind it that have the same matrix get one of their own, which begins as a copy.
static void divide(Warpgroup *group, int64_t number, int64_t end) {
  int64_t old = operation_of(group, number)->known, new = 0;
  while (group->known[new].operations) new++;  // each in use has an operation that is not forgotten: `room` at most
  WgmmaKnown *from = &group->known[old], *to = &group->known[new];
  memcpy(clocks_of(group, new), clocks_of(group, old), ROWS * (size_t)group->width * sizeof *group->clocks);
  memcpy(to->changes, from->changes, sizeof to->changes);
  for (; number < end && operation_of(group, number)->known == old; number++) {
    operation_of(group, number)->known = new;
    from->operations--;
    to->operations++;
  }
}

// It has an identity from now on, and what is known of operations that nobody asks for any more is forgotten.
static int begin(Tables *t, Warpgroup *group, int64_t number, int64_t observed) {
  Wgmma *operation = operation_of(group, number);
  Epochs *epochs = t->context->epochs;
  if (!has_room(epochs, 1)) {
    Conflict more = {0};
    if (t->context->ask(RACE_EPOCHS, &more) && stops(t, RACE_RAISED)) return 0;
  }
  int64_t text = t->wgmma_forms[operation->form].text;
  operation->identity = new_epoch(epochs, group->column, number + 1, text, 0, t->place);
  for (; group->forgotten < observed && group->forgotten < number - 1; group->forgotten++)
    group->known[operation_of(group, group->forgotten)->known].operations--;
  operation->known = number ? operation_of(group, number - 1)->known : 0;
  group->known[operation->known].operations++;
  memset(operation->clocks, 0, sizeof operation->clocks);
  return 1;
}

int wgmma_learn(Tables *t, Warpgroup *group, int64_t member, int64_t number, int64_t issued, int64_t observed) {
  Agent *agent = t->context->agent;
  if (group->width != agent->width) make_clocks(group, group->room, agent->width);
  if (number == issued && !begin(t, group, number, observed)) return 0;
  Wgmma *operation = operation_of(group, number);
  if (group->known[operation->known].changes[member] != agent->changes) {
    int64_t end = number == issued ? number + 1 : issued;
    if (number > observed && operation_of(group, number - 1)->known == operation->known) divide(group, number, end);
    agent_tell(agent, clocks_of(group, operation->known));
    group->known[operation->known].changes[member] = agent->changes;
  }
  operation->clocks[member] = agent->clock;
  group->bases[member] = agent->base;
  agent_advance(agent);
  return 1;
}

// The warps have come as far as they had when they issued an operation.
static void cover(const Warpgroup *group, const Wgmma *operation, int32_t *row) {
  for (int i = 0; i < WGMMA_WARPS; i++)
    if (operation->clocks[i]) cover_warp(row, group->bases[i], operation->clocks[i]);
}

void wgmma_observe(Agent *agent, Warpgroup *group, int64_t end) {
  // The warps know at least as much when they issue an operation as when they issued those before.
  const Wgmma *operation = operation_of(group, end - 1);
  if (group->width != agent->width) make_clocks(group, group->room, agent->width);
  clocks_join(agent->clocks, clocks_of(group, operation->known), ROWS * group->width);
  for (int row = 0; row < ROW_PROXY; row++) cover(group, operation, agent_row(agent, row));
  agent->changes++;
  clocks_raise(agent->clocks, group->width, ROW_TENSOR, group->column, end);
}

// Whether reads of an operand are not all in order. `known`: room for a matrix, of which the visible row is filled in.
static int reads_race(
    Tables *t, const Warpgroup *group, const Wgmma *operation, int which, int64_t rank, int32_t *known) {
  const WgmmaForm *form = &t->wgmma_forms[operation->form];
  const int32_t *clocks = clocks_of(group, operation->known);
  int64_t width = group->width, starts[WGMMA_MOST_ROWS * CHUNKS];
  SharedOperand found = wgmma_operand(form, which, operation);
  Access access = {
      .shadow = t->context->all_shared[rank], .grain = GRANULE, .offsets = found.starts, .rows = found.count,
      .count = found.nbytes, .known = known + ROW_VISIBLE * width, .width = width, .own = -1, .lane = -1, .exempt = -1,
      .epochs = t->context->epochs, .identity = operation->identity, .fenced = clocks + ROW_PROXY * width,
      .read_column = group->column, .instruction = -1, .issuer = t->context->agent,
  };
  if (access_pipelined(&access)) return 0;
  memcpy(known, clocks, ROWS * (size_t)width * sizeof *known);
  for (int row = 0; row < ROW_PROXY; row++) cover(group, operation, known + row * width);
  MatrixRows rows = wgmma_rows(form, which);
  if (!rows.mn_major) {  // reports name the first that is late, row after row
    access.offsets = starts;
    access.rows = rows.rows * CHUNKS;
    access.count = CHUNK;
    for (int64_t i = 0; i < access.rows; i++) starts[i] = CHUNK * found.places[i];
  }
  return !access_whole(&access, t->context->ask, NULL) && stops(t, RACE_RAISED);
}

int wgmma_races(Tables *t, const Warpgroup *group, int64_t number, int64_t rank) {
  const Wgmma *operation = operation_of(group, number);
  int32_t *known = t->context->agent->scratch, *visible = known + ROW_VISIBLE * group->width;
  memcpy(visible, clocks_of(group, operation->known) + ROW_VISIBLE * group->width, (size_t)group->width * sizeof *known);
  cover(group, operation, visible);
  operands_make_room();
  if (reads_race(t, group, operation, WGMMA_B, rank, known)) return 1;
  return !t->wgmma_forms[operation->form].a_in_registers && reads_race(t, group, operation, WGMMA_A, rank, known);
}
