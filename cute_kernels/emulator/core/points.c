// What mbarriers pass on, as sync_point.py has it, and arrivals and waits of warps that are not strict.
#include <string.h>

#include "races.h"

static const int scoped_rows[SCOPED_ROWS] = {ROW_VISIBLE, ROW_TENSOR};

static inline size_t row_bytes(const Agent *agent) { return (size_t)agent->width * sizeof *agent->clocks; }

static inline int32_t *inside_row(const Agent *agent, int32_t *inside, int64_t rank, int kind) {
  return inside + (rank * SCOPED_ROWS + kind) * agent->width;
}

int point_initialised(const Agent *agent, const Point *point) {
  if (agent->strict || !point->init_clock) return 0;
  return agent_row(agent, ROW_VISIBLE)[point->init_column] >= point->init_clock;
}

int point_overtakes(const Point *point, int64_t phase, const int32_t *order) {
  for (int64_t i = 0; i < point->warps; i++) {
    const Followed *warp = &point->followed[i];
    if (warp->phase < 0 || warp->phase != phase - 1) continue;
    int64_t column = point->bases[i] + COLUMN_READ;
    int32_t gathered = point->gathered[column], more = order[column];
    if ((gathered > more ? gathered : more) < warp->clock) return 1;
  }
  return 0;
}

void point_complete(const Agent *agent, Point *point, int64_t phase) {
  int64_t width = agent->width;
  for (int64_t i = 0; i < point->warps; i++)
    if (point->followed[i].phase < phase) point->followed[i].phase = -1;
  point->completed++;
  if (point->column >= 0)
    for (int row = 0; row < ROW_TENSOR; row++)
      point->gathered[row * width + point->column] = (int32_t)point->completed;
  memcpy(point->available, point->gathered, ROWS * row_bytes(agent));
  for (int64_t rank = 0; rank < point->ranks; rank++) {
    if (!point->used[rank]) continue;
    int32_t *from = inside_row(agent, point->inside, rank, 0);
    memcpy(inside_row(agent, point->inside_available, rank, 0), from, SCOPED_ROWS * row_bytes(agent));
  }
}

void point_gather(const Agent *agent, Point *point, const int32_t *clocks, int64_t order) {
  int64_t width = agent->width;
  int32_t *gathered = point->gathered;
  if (point->ranks == 1 || order & ORDER_WIDE) {
    clocks_join(gathered, clocks, ROWS * width);
  } else {
    clocks_join(gathered, clocks, 2 * width);  // order and acquired
    clocks_join(gathered + ROW_PROXY * width, clocks + ROW_PROXY * width, 2 * width);  // and both proxies
    if (order & ORDER_SYNC) clocks_join(gathered + ROW_TENSOR * width, clocks + ROW_TENSOR * width, width);
  }
  if (point->ranks == 1) return;
  point->used[agent->rank] = 1;
  for (int kind = 0; kind < SCOPED_ROWS; kind++)
    clocks_join(inside_row(agent, point->inside, agent->rank, kind), clocks + scoped_rows[kind] * width, width);
}

// `target` learns what a wait obtains of a kind of row at its scope: `SyncPoint.scoped`.
static void join_scoped(const Agent *agent, const Point *point, int kind, int32_t *target, int64_t order) {
  const int32_t *wide = point->available + scoped_rows[kind] * agent->width;
  if (point->ranks == 1 || order & ORDER_WIDE) {
    clocks_join(target, wide, agent->width);
    if (point->ranks == 1) return;
  } else {  // asynchronous operations are visible at every scope
    if (point->column >= 0) clocks_join(target + point->column, wide + point->column, 1);
    for (int64_t i = 0; i < point->stream_count; i++)
      clocks_join(target + point->streams[i], wide + point->streams[i], 1);
  }
  clocks_join(target, inside_row(agent, point->inside_available, agent->rank, kind), agent->width);
}

static void acquire(Agent *agent, Point *point, int64_t order) {
  int64_t width = agent->width, *seen = &point->followed[agent->number].seen[order];
  const int32_t *available = point->available;
  if (*seen == point->completed) return;
  *seen = point->completed;
  if (order & ORDER_SYNC && point->ranks == 1) {
    clocks_join(agent->clocks, available, ROWS * width);
    return;
  }
  clocks_join(agent_row(agent, ROW_ORDER), available, width);
  if (order & ORDER_SYNC) {
    clocks_join(agent_row(agent, ROW_ACQUIRED), available + ROW_ACQUIRED * width, width);
    join_scoped(agent, point, 0, agent_row(agent, ROW_VISIBLE), order);
    clocks_join(agent_row(agent, ROW_PROXY), available + ROW_PROXY * width, 2 * width);
    // Release and acquire pass tensor memory on at any scope.
    join_scoped(agent, point, 1, agent_row(agent, ROW_TENSOR), ORDER_WIDE);
    return;
  }
  join_scoped(agent, point, 1, agent->incoming, order);
  agent->some_pending = 1;
  clocks_join(agent->pending, available + ROW_ACQUIRED * width, width);
  join_scoped(agent, point, 0, agent->pending + width, order);
  clocks_join(agent->pending + 2 * width, available + ROW_PROXY * width, 2 * width);
}

int32_t watch_wait(Tables *t, Point *point, int64_t order, int64_t phase) {
  if (!log_flush(t)) return 0;
  Agent *agent = t->context->agent;
  if (!point_initialised(agent, point)) return 0;
  acquire(agent, point, order);
  point->followed[agent->number].phase = phase;
  point->followed[agent->number].clock = agent->clock;
  return 1;
}

int32_t watch_arrive(
    Tables *t, Point *point, uint32_t mask, int64_t order, int64_t rank, int64_t phase, int32_t completes) {
  if (!log_flush(t)) return 0;
  Agent *agent = t->context->agent;
  if (!point_initialised(agent, point)) return 0;
  int sync = order & ORDER_SYNC;
  // A fence that reaches less far than a relaxed arrival after it is Python's.
  if (!sync && agent->fenced && order & ~agent->fenced_order & ORDER_WIDE) return 0;
  if (sync) agent_snapshot(agent, mask);
  else agent_relaxed(agent, mask);
  if (completes && point_overtakes(point, phase, agent->scratch)) return 0;
  if (rank != agent->rank) {
    Followed *warp = &point->followed[agent->number];
    warp->arrived = agent->clock;
    warp->arrived_phase = point->completed + 1;
  }
  point_gather(agent, point, agent->scratch, order);
  if (!sync) {  // fence.mbarrier_init makes initialised mbarriers visible through a relaxed arrival
    int64_t column = agent->base + COLUMN_INIT;
    clocks_raise(point->gathered + ROW_VISIBLE * agent->width, agent->width, 1, column, agent->fenced_inits);
  }
  agent_advance(agent);
  if (completes) point_complete(agent, point, phase);
  return 1;
}

static int has_stream(const Point *point, int64_t column) {
  for (int64_t i = 0; i < point->stream_count; i++)
    if (point->streams[i] == column) return 1;
  return 0;
}

// `TensorRaces.commit` and `committed`: it arrives when it is issued. The first of a stream to an mbarrier is Python's.
int32_t watch_commit(Tables *t, const Commit *commit) {
  if (!log_flush(t)) return 0;
  Agent *agent = t->context->agent;
  Stream *stream = commit->stream;
  int64_t commits = stream->commits + 1;
  agent_snapshot(agent, (uint32_t)1 << commit->lane);
  for (int row = 0; row < ROWS; row++) agent->scratch[row * agent->width + stream->column] = (int32_t)commits;
  for (int64_t i = 0; i < commit->count; i++) {
    const CommitTarget *target = &commit->targets[i];
    const Point *point = target->point;
    if (!point_initialised(agent, point) || !has_stream(point, stream->column)) return 0;
    int64_t column = point->followed[agent->number].commit_column;
    if (column >= 0 && column != stream->column) return 0;
    if (target->completes && point_overtakes(point, target->phase, agent->scratch)) return 0;
  }
  stream->commits = commits;
  stream->identity = 0;
  agent_advance(agent);
  for (int64_t i = 0; i < commit->count; i++) {
    const CommitTarget *target = &commit->targets[i];
    Point *point = target->point;
    point_gather(agent, point, agent->scratch, ORDER_SYNC | ORDER_WIDE);
    Followed *warp = &point->followed[agent->number];
    warp->commit_column = stream->column;
    warp->commit = commits;
    warp->commit_phase = point->completed + 1;
    if (target->completes) point_complete(agent, point, target->phase);
  }
  return 1;
}
