// What barriers pass on: synchronisation points, and how warps arrive at them and wait for them. See sync_point.py.
#include <stddef.h>
#include <string.h>

#include "races.h"

static const int scoped_rows[SCOPED_ROWS] = {ROW_VISIBLE, ROW_TENSOR};

static inline size_t bytes_of(int64_t count) { return (size_t)count * sizeof(int32_t); }

static inline int32_t *inside_row(const Point *point, int32_t *inside, int64_t rank, int kind) {
  return inside + (rank * SCOPED_ROWS + kind) * point->width;
}

// What the point keeps of a warp, or null.
static inline Followed *followed(const Point *point, const Agent *agent) {
  return agent->number >= 0 && agent->number < point->warps ? &point->followed[agent->number] : NULL;
}

int64_t point_overtaken(const Point *point, int64_t phase, const int32_t *order) {
  for (int64_t i = 0; i < point->warps; i++) {
    const Followed *warp = &point->followed[i];
    if (warp->phase != phase - 1) continue;
    int64_t column = point->bases[i] + COLUMN_READ;
    int32_t known = point->gathered[column];
    if (order && order[column] > known) known = order[column];
    if (known < warp->clock) return i;
  }
  return -1;
}

void point_complete(Point *point, int64_t phase) {
  int64_t width = point->width;
  for (int64_t i = 0; i < point->warps; i++)
    if (point->followed[i].phase < phase) point->followed[i].phase = NO_PHASE;
  int copied = 0;
  for (int i = 0; i < 2; i++) copied |= point->copies[i].phase == point->completed + 1;
  point->copied = point->copied << 1 | copied;
  memcpy(point->earlier, point->available, bytes_of(width));
  point->completed++;
  if (point->column >= 0)
    for (int row = 0; row < ROW_TENSOR; row++)
      point->gathered[row * width + point->column] = (int32_t)point->completed;
  memcpy(point->available, point->gathered, bytes_of(ROWS * width));
  for (int64_t rank = 0; rank < point->ranks && point->ranks > 1; rank++) {
    if (!point->used[rank]) continue;
    int32_t *from = inside_row(point, point->inside, rank, 0);
    memcpy(inside_row(point, point->inside_available, rank, 0), from, bytes_of(SCOPED_ROWS * width));
  }
}

// Whether relaxed synchronisation, or one at the scope of a CTA, passes a kind of order on to all CTAs.
static int passes(int row, int64_t order) {
  return order & ORDER_WIDE || (row != ROW_VISIBLE && (row != ROW_TENSOR || order & ORDER_SYNC));
}

void point_gather(Point *point, const int32_t *clocks, int64_t width, int64_t rank, int64_t order) {
  for (int row = 0; row < ROWS; row++)
    if (point->ranks == 1 || passes(row, order))
      clocks_join(point->gathered + row * point->width, clocks + row * width, width);
  if (point->ranks == 1) return;
  point->used[rank] = 1;
  for (int kind = 0; kind < SCOPED_ROWS; kind++)
    clocks_join(inside_row(point, point->inside, rank, kind), clocks + scoped_rows[kind] * width, width);
}

int32_t point_knows(const Point *point, const Agent *agent, int64_t back) {
  if (agent_row(agent, ROW_ORDER)[point->column] >= point->completed - back) return 1;
  if (point->copied >> back & 1) return 0;
  // Who knows of all that arrived knows that the phase is complete.
  const int32_t *gathered = back ? point->earlier : point->available;
  agent_order(agent, (uint32_t)agent->live);
  for (int64_t i = 0; i < point->width; i++)
    if (i != point->column && gathered[i] > agent->scratch[i]) return 0;
  return 1;
}

int64_t point_lacks(const Point *point, const int32_t *order, int64_t width) {
  if (!point->completed) return -1;
  if (point->column >= 0 && point->column < width && order[point->column] >= point->completed) return -1;
  if (point->column >= 0 && point->copied & 1) return point->column;
  // What the lanes of a warp do by one instruction they do together: of its columns one says how far it has come.
  for (int64_t warp = 0, i = 0; i < point->width; i++) {
    if (warp < point->warps && i == point->bases[warp]) i = point->bases[warp++] + COLUMN_READ;
    if (i >= point->width) break;
    if (i != point->column && point->available[i] > (i < width ? order[i] : 0)) return i;
    if (warp && i == point->bases[warp - 1] + COLUMN_READ) i = point->bases[warp - 1] + WARP_COLUMNS - 1;
  }
  return -1;
}

void point_announce(Point *point, const Agent *agent, int64_t place) {
  Followed *warp = followed(point, agent);
  if (!warp) return;
  point->announcements += !warp->announced;
  warp->announced = agent->clock;
  warp->announced_place = place;
}

void point_hears(Point *point, const int32_t *order, int64_t width) {
  for (int64_t i = 0; point->announcements && i < point->warps; i++) {
    int64_t column = point->bases[i] + COLUMN_READ;
    if (!point->followed[i].announced || column >= width || order[column] < point->followed[i].announced) continue;
    point->followed[i].announced = 0;
    point->announcements--;
  }
}

void point_used(Point *point, const Agent *agent, int64_t clock) {
  Followed *warp = followed(point, agent);
  if (warp) warp->used = clock;
}

int64_t point_in_use(const Point *point, const Agent *agent) {
  agent_order(agent, (uint32_t)agent->live);
  const int32_t *order = agent->scratch;
  for (int64_t i = 0; i < point->warps; i++)
    if (order[point->bases[i] + COLUMN_READ] < point->followed[i].used) return point->bases[i] + COLUMN_READ;
  for (int pair = 0; pair < 2; pair++)  // of a phase that is not complete
    if (point->copies[pair].phase > point->completed) return point->column;
  for (int64_t i = 0; i < point->stream_count; i++)
    if (point->gathered[point->streams[i]] > order[point->streams[i]]) return point->streams[i];
  return point_lacks(point, order, agent->width);
}

int64_t point_parted(const Point *point, int64_t phase, int64_t first) {
  for (int64_t i = first; i < point->warps; i++) {
    const Followed *warp = &point->followed[i];
    if (warp->phase != phase - 1) continue;
    for (uint32_t lanes = (uint32_t)warp->lanes; lanes; lanes &= lanes - 1)
      if (point->gathered[point->bases[i] + __builtin_ctz(lanes)] < warp->clock) return i;
  }
  return -1;
}

void point_waited(Point *point, const Agent *agent, int64_t phase, int64_t place, int64_t lanes) {
  Followed *warp = followed(point, agent);
  if (!warp) return;
  warp->lanes = (warp->phase == phase && warp->clock == agent->clock ? warp->lanes : 0) | lanes;
  warp->phase = phase;
  warp->clock = agent->clock;
  warp->waited_place = place;
}

void point_arrived(Point *point, const Agent *agent, int64_t place, int64_t steps) {
  Followed *warp = followed(point, agent);
  if (!warp) return;
  warp->arrived = agent->clock;
  warp->arrived_phase = point->completed + 1;
  warp->arrived_place = place;
  warp->arrived_steps = steps;
}

void point_copied(Point *point, int64_t pair, int64_t identity) {
  LatestCopy *latest = &point->copies[pair];
  if (latest->phase <= point->completed) *latest = (LatestCopy){.phase = point->completed + 1, .identity = identity};
}

// Relaxed operations after a fence pass on what was known before it.
static void add_fenced(const Agent *agent) {
  int64_t rest = ROW_ACQUIRED * agent->width;
  if (agent->fenced_order >= 0) clocks_join(agent->scratch + rest, agent->fenced + rest, PENDING_ROWS * agent->width);
}

static void release_relaxed(const Agent *agent, Point *point, uint32_t mask, int64_t order) {
  int64_t width = agent->width;
  int32_t *scratch = agent->scratch;
  agent_order(agent, mask);
  memset(scratch + width, 0, bytes_of(PENDING_ROWS * width));
  memcpy(scratch + ROW_TENSOR * width, agent->before, bytes_of(width));
  if (agent->fenced_order & ORDER_WIDE || !(order & ORDER_WIDE)) {
    add_fenced(agent);
    point_gather(point, scratch, width, agent->rank, order);
  } else {  // the fence reaches the CTA only, what tcgen05.fence orders as far as the arrival does
    point_gather(point, scratch, width, agent->rank, order);
    memset(scratch, 0, bytes_of(ROWS * width));
    add_fenced(agent);
    point_gather(point, scratch, width, agent->rank, order & agent->fenced_order);
  }
  // fence.mbarrier_init.release.cluster makes initialised mbarriers visible through a relaxed arrival.
  clocks_raise(point->gathered + ROW_VISIBLE * width, width, 1, agent->base + COLUMN_INIT, agent->fenced_inits);
}

static void release(const Agent *agent, Point *point, uint32_t mask, int64_t order) {
  const int32_t *tensor = agent->strict ? agent->before : agent_row(agent, ROW_TENSOR);
  for (int row = 0; row < ROWS; row++)
    if (point->ranks == 1 || passes(row, order)) {
      const int32_t *known = row == ROW_TENSOR ? tensor : agent_row(agent, row);
      agent_tell_row(agent, row, known, point->gathered + row * point->width, mask);
    }
  if (point->ranks == 1) return;
  point->used[agent->rank] = 1;
  agent_tell_row(
      agent, ROW_VISIBLE, agent_row(agent, ROW_VISIBLE), inside_row(point, point->inside, agent->rank, 0), mask);
  agent_tell_row(agent, ROW_TENSOR, tensor, inside_row(point, point->inside, agent->rank, 1), mask);
}

void agent_release(Agent *agent, Point *point, uint32_t mask, int64_t order) {
  if (order & ORDER_SYNC) {
    release(agent, point, mask, order);
  } else {
    release_relaxed(agent, point, mask, order);
  }
  agent->given |= mask;
  agent_advance(agent);
}

// `target` learns a kind of row that a wait by a thread of the agent's CTA obtains at its scope.
static void join_scoped(const Agent *agent, const Point *point, int kind, int32_t *target, int64_t order) {
  const int32_t *wide = point->available + scoped_rows[kind] * point->width;
  if (point->ranks == 1 || order & ORDER_WIDE) {
    clocks_join(target, wide, point->width);
    if (point->ranks == 1) return;
  } else {  // asynchronous operations are visible at every scope
    if (point->column >= 0) clocks_join(target + point->column, wide + point->column, 1);
    for (int64_t i = 0; i < point->stream_count; i++)
      clocks_join(target + point->streams[i], wide + point->streams[i], 1);
  }
  clocks_join(target, inside_row(point, point->inside_available, agent->rank, kind), point->width);
}

void agent_acquire(Agent *agent, Point *point, int64_t order) {
  int64_t width = agent->width;
  const int32_t *available = point->available;
  Followed *warp = followed(point, agent);
  if (warp) {
    if (warp->seen[order] == point->completed) return;
    warp->seen[order] = point->completed;
  }
  agent->changes++;
  if (order & ORDER_SYNC && point->ranks == 1 && !agent->strict) {
    clocks_join(agent->clocks, available, ROWS * width);
    return;
  }
  clocks_join(agent_row(agent, ROW_ORDER), available, width);
  if (order & ORDER_SYNC) {
    clocks_join(agent_row(agent, ROW_ACQUIRED), available + ROW_ACQUIRED * width, width);
    join_scoped(agent, point, 0, agent_row(agent, ROW_VISIBLE), order);
    clocks_join(agent_row(agent, ROW_PROXY), available + ROW_PROXY * width, 2 * width);
    // Release and acquire pass tensor memory on at any scope: as for the widest.
    join_scoped(agent, point, 1, agent->strict ? agent->incoming : agent_row(agent, ROW_TENSOR), ORDER_WIDE);
    return;
  }
  join_scoped(agent, point, 1, agent->incoming, order);
  agent->some_pending = 1;
  clocks_join(agent->pending, available + ROW_ACQUIRED * width, width);
  join_scoped(agent, point, 0, agent->pending + width, order);
  clocks_join(agent->pending + 2 * width, available + ROW_PROXY * width, 2 * width);
}

int point_add_stream(Point *point, int64_t column) {
  for (int64_t i = 0; i < point->stream_count; i++)
    if (point->streams[i] == column) return 1;
  if (point->stream_count == point->stream_room) return 0;
  point->streams[point->stream_count++] = column;
  return 1;
}
