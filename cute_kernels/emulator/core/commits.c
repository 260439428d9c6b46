// tcgen05.commit: an arrival on mbarriers when all earlier tcgen05 operations of the CTA are complete, which are in one
// queue with it; and what it passes on, for the race detector. tensor_core.py words what is wrong.
#include <stdlib.h>
#include <string.h>

#include "asynchronous.h"
#include "bytecode.h"

// What a warp's latest commit was, for the check of CTAs that exit; Python takes an earlier one of another lane.
static int note(Tables *t, const TensorCommit *commit, const Point *point, int64_t target) {
  if (commit->work.warp >= point->warps) return 1;
  Followed *warp = &point->followed[commit->work.warp];
  if (warp->commit_column >= 0 && warp->commit_column != commit->column &&
      stops(t, COMMITS_MEET, .barrier.address = target))
    return 0;
  warp->commit_column = commit->column;
  warp->commit = commit->clock;
  warp->commit_phase = point->completed + 1;
  warp->commit_place = commit->work.place;
  return 1;
}

int32_t tensor_commit_run(WorkQueues *all, TensorCommit *commit) {
  Tables *t = all->tables;
  const int32_t *clocks = (const int32_t *)(const void *)(commit + 1);
  for (int64_t i = 0; i < commit->count; i++) {
    int64_t target = commit->targets[i];
    const Barrier *barrier = barrier_at(t, target);
    if (barrier && barrier->point && commit->width) {
      point_gather(barrier->point, clocks, commit->width, commit->rank, ORDER_SYNC | ORDER_WIDE);
      if (!note(t, commit, barrier->point, target)) return 1;
    }
    if (mbarrier_by(t, TENSOR_COMMIT, target, 1, commit->label, commit->work.place, commit->work.warp) < 0) return 1;
  }
  return 0;
}

int64_t stream_commit(Agent *agent, Stream *stream, int64_t lane, int32_t *clocks) {
  int64_t commits = ++stream->commits, width = agent->width;
  stream->identity = 0;
  agent_snapshot(agent, (uint32_t)1 << lane);
  for (int row = 0; row < ROWS; row++) agent->scratch[row * width + stream->column] = (int32_t)commits;
  memcpy(clocks, agent->scratch, (size_t)CLOCK_BYTES(width));
  agent_advance(agent);
  return commits;
}

// With detectors, what the commit will pass on. 0: Python has been told what is wrong.
static int watch(Tables *t, TensorCommit *commit, Stream *stream, int64_t lane) {
  for (int64_t i = 0; i < commit->count; i++) {
    const Barrier *barrier = barrier_at(t, commit->targets[i]);
    if (!barrier || !barrier->point) continue;
    if (!mbarrier_usable(t, TENSOR_COMMIT, commit->targets[i], barrier->point)) return 0;
  }
  commit->column = stream->column;
  commit->clock = stream_commit(t->context->agent, stream, lane, (int32_t *)(void *)(commit + 1));
  for (int64_t i = 0; i < commit->count; i++) {
    const Barrier *barrier = barrier_at(t, commit->targets[i]);
    if (!barrier || !barrier->point || point_add_stream(barrier->point, stream->column)) continue;
    if (stops(t, ADD_STREAM, .barrier = {.address = commit->targets[i], .column = stream->column})) return 0;
  }
  return 1;
}

int32_t tensor_commit(Tables *t, int64_t rank, int64_t warp, int64_t lane, int64_t address, int64_t multicast) {
  TensorThread *thread = &t->tensor_threads[warp * LANES + lane];
  if (!thread->label && stops(t, NAME_COMMIT, .tensor = {.record = WHERE(thread), .lane = lane})) return 1;
  if (multicast >= 0 && (!multicast || multicast >> t->ranks)) return stops(t, COMMIT_MASK, .tensor.ctas = multicast);
  int64_t width = t->context ? t->context->agent->width : 0, size = (int64_t)sizeof(TensorCommit) + CLOCK_BYTES(width);
  TensorCommit *commit = malloc((size_t)size);
  *commit = (TensorCommit){
      .work = {.kind = WORK_TENSOR_COMMIT, .queue = TENSOR_QUEUE - rank, .place = t->place, .warp = warp},
      .label = thread->label, .rank = rank, .width = width,
  };
  if (multicast < 0) commit->targets[commit->count++] = address;
  for (uint64_t mask = multicast < 0 ? 0 : (uint64_t)multicast; mask; mask &= mask - 1)
    commit->targets[commit->count++] = (int64_t)__builtin_ctzll(mask) << RANK_SHIFT | (address & OFFSET_MASK);
  int32_t wrong = t->context && !watch(t, commit, thread->stream, lane);
  if (!wrong) wrong = work_submit(t->work, &commit->work, size);
  free(commit);
  return wrong;
}

// --- in bytecode -----------------------------------------------------------------------------------------------------

// At the mbarriers a by each lane; FLAG: at the same place in the CTAs of the masks b.
static const Instruction *run_tensor_commit(const Instruction *i, uint8_t *s, Machine *m) {
  const WarpHeader *header = (const WarpHeader *)(const void *)s;
  const u32 *a = (const u32 *)(const void *)(s + i->a), *b = (const u32 *)(const void *)(s + i->b);
  Tables *t = m->tables;
  t->place = place_of(i);
  t->progress++;
  if (!takes_logs(t)) return leave(m, ERROR);
  for (uint32_t left = m->active; left; left &= left - 1) {
    int lane = __builtin_ctz(left);
    int64_t address = a[i->c & ROWS_A ? lane : 0], multicast = -1;
    if (i->c & FLAG) multicast = b[i->c & ROWS_B ? lane : 0] & 0xFFFF;
    if (tensor_commit(t, header->rank, header->number, lane, address, multicast)) return leave(m, ERROR);
  }
  return i + 1;
}

const Operation commit_operations[] = {{"tensor_commit", run_tensor_commit, 0}, {0, 0, 0}};
