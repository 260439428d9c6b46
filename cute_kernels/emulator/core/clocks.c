// Vector clocks of warps: what they pass on, and synchronisation inside a warp. See happens_before.py.
#include <string.h>

#include "races.h"

void clocks_join(int32_t *restrict target, const int32_t *restrict source, int64_t count) {
  for (int64_t i = 0; i < count; i++) target[i] = source[i] > target[i] ? source[i] : target[i];
}

void clocks_raise(int32_t *clocks, int64_t width, int64_t rows, int64_t column, int64_t clock) {
  for (int64_t row = 0; row < rows; row++) {
    int32_t *cell = clocks + row * width + column;
    if (*cell < clock) *cell = (int32_t)clock;
  }
}

// Whether lanes of a mask, with those that arrived before, are all that have loaded together since the last convergence.
// That is asked strictly only: kernels in the field elect a lane by elect.sync, which orders no memory.
static int covers_loads(const Agent *agent, uint32_t mask) {
  return !agent->strict || !((uint32_t)agent->loading & (uint32_t)agent->live & ~(mask | (uint32_t)agent->given));
}

void agent_load_together(Agent *agent, uint32_t mask) {
  if (agent->loaded == agent->clock && !(mask & ~(uint32_t)agent->loading)) return;
  if (agent_row(agent, ROW_VISIBLE)[agent->base + COLUMN_LOADS] >= agent->loaded) agent->loading = 0;
  agent->loading |= mask;
  agent->given &= ~(int64_t)mask;
  agent->loaded = agent->clock;
}

// The lanes of a mask are known to have come as far as the agent's clock; `reads`: so is the warp where all lanes do.
static void cover(const Agent *agent, int32_t *row, uint32_t mask, int reads) {
  int32_t clock = (int32_t)agent->clock, *own = row + agent->base;
  uint32_t live = (uint32_t)agent->live;
  int all = (mask & live) == live;
  for (int lane = 0; lane < LANES; lane++) own[lane] = all || mask >> lane & 1 ? clock : own[lane];
  if (reads || !all) own[COLUMN_READ] = clock;
  if (!reads || covers_loads(agent, mask)) own[COLUMN_LOADS] = clock;
}

// What single lanes of a mask know is added to clocks that are passed on.
static void share(const Agent *agent, int32_t *clocks, int64_t rows, uint32_t mask) {
  for (int64_t i = 0; i < agent->single->count; i++) {
    const PrivateClock *entry = &agent->single->entries[i];
    if (mask >> entry->lane & 1) clocks_raise(clocks, agent->width, rows, entry->column, entry->clock);
  }
}

void agent_advance(Agent *agent) {
  agent->clock++;
  agent->read_identity = agent->write_identity = agent->loads_identity = 0;
  agent->load_identity = agent->store_identity = 0;
}

void agent_snapshot(const Agent *agent, uint32_t mask) {
  memcpy(agent->scratch, agent->clocks, ROWS * (size_t)agent->width * sizeof *agent->clocks);
  for (int row = 0; row < ROW_PROXY; row++) cover(agent, agent->scratch + row * agent->width, mask, 1);
  share(agent, agent->scratch, ROW_TENSOR, mask);
}

void agent_tell(const Agent *agent, int32_t *clocks) {
  clocks_join(clocks, agent->clocks, ROWS * agent->width);
  share(agent, clocks, ROW_TENSOR, UINT32_MAX);
}

void agent_tell_row(const Agent *agent, int row, const int32_t *known, int32_t *target, uint32_t mask) {
  uint32_t live = (uint32_t)agent->live, covered = (mask & live) == live ? UINT32_MAX : mask;
  clocks_join(target, known, agent->width);
  for (int lane = 0; row < ROW_PROXY && lane <= COLUMN_READ; lane++) {
    int32_t *own = target + agent->base + lane, is_covered = lane == COLUMN_READ || covered >> lane & 1;
    if (is_covered && *own < agent->clock) *own = (int32_t)agent->clock;
  }
  if (row < ROW_PROXY && covers_loads(agent, mask)) clocks_raise(target, 0, 1, agent->base + COLUMN_LOADS, agent->clock);
  if (row < ROW_TENSOR) share(agent, target, 1, mask);
}

void cover_warp(int32_t *row, int64_t base, int64_t clock) {
  for (int lane = 0; lane <= COLUMN_LOADS; lane++)
    if (row[base + lane] < clock) row[base + lane] = (int32_t)clock;
}

void agent_order(const Agent *agent, uint32_t mask) {
  memcpy(agent->scratch, agent->clocks, (size_t)agent->width * sizeof *agent->clocks);
  cover(agent, agent->scratch, mask, 1);
  share(agent, agent->scratch, 1, mask);
}

void agent_fence(Agent *agent, uint32_t mask, int64_t order) {
  int64_t width = agent->width;
  if (agent->some_pending) {
    clocks_join(agent_row(agent, ROW_ACQUIRED), agent->pending, PENDING_ROWS * width);
    memset(agent->pending, 0, PENDING_ROWS * (size_t)width * sizeof *agent->pending);
    agent->some_pending = 0;
    agent->changes++;
  }
  agent_snapshot(agent, mask);
  memcpy(agent->fenced, agent->scratch, ROWS * (size_t)width * sizeof *agent->fenced);
  agent->fenced_order = order;
  agent_advance(agent);
}

void agent_converge(Agent *agent, uint32_t mask) {
  for (int row = 0; row < ROW_PROXY; row++) cover(agent, agent_row(agent, row), mask, 0);
  share(agent, agent->clocks, ROW_TENSOR, mask);
  Private *single = agent->single;
  int64_t kept = 0;
  for (int64_t i = 0; i < single->count; i++)
    if (!(mask >> single->entries[i].lane & 1)) single->entries[kept++] = single->entries[i];
  single->count = kept;
  agent->changes++;
  agent_advance(agent);
}

void agent_fence_proxy(Agent *agent, uint32_t mask, int32_t spaces) {
  for (int space = 0; space < 2; space++) {
    if (!(spaces >> space & 1)) continue;
    int32_t *row = agent_row(agent, ROW_PROXY + space);
    clocks_join(row, agent_row(agent, ROW_VISIBLE), agent->width);
    cover(agent, row, mask, 1);
  }
  agent->changes++;
  agent_advance(agent);
}

void agent_complete_tensor(Agent *agent, int64_t kind) {
  int64_t *clock = kind == COLUMN_TENSOR_LOAD ? &agent->load_clock : &agent->store_clock, column = agent->base + kind;
  clocks_raise(agent->clocks, agent->width, ROW_TENSOR, column, *clock);
  agent_row(agent, ROW_TENSOR)[column] = (int32_t)*clock;
  ++*clock;
  agent->changes++;
  agent->load_identity = agent->store_identity = 0;
}

void agent_fence_tensor(Agent *agent, int32_t before) {
  int32_t *row = agent_row(agent, ROW_TENSOR);
  if (before) memcpy(agent->before, row, (size_t)agent->width * sizeof *row);
  else clocks_join(row, agent->incoming, agent->width);
  agent->changes++;
}

void agent_complete_in_lane(Agent *agent, int64_t lane, int64_t column, int64_t clock) {
  agent->changes++;
  if (agent->live == (int64_t)1 << lane) {
    clocks_raise(agent->clocks, agent->width, ROW_TENSOR, column, clock);
    return;
  }
  Private *single = agent->single;
  int64_t i = 0;
  while (i < single->count && single->entries[i].column != column) i++;
  if (i == single->count) single->count++;
  single->entries[i] = (PrivateClock){.column = column, .lane = lane, .clock = clock};
}
