// Asynchronous work: when TMA copies, tensor-core instructions and their completions take effect.
//
// Operations of one queue take effect in order, those of different queues in any order and arbitrarily late. Eager work
// takes effect as it is issued; else `work_step` performs one operation, of the queue that async_engine.py has drawn or of
// the oldest one that does not yield.
#include <stdlib.h>
#include <string.h>

#include "asynchronous.h"
#include "bytecode.h"
#include "events.h"

static int32_t perform(WorkQueues *all, Work *work) {
  switch (work->kind) {
    case WORK_LANE_COPY: return lane_copy_run(all, (LaneCopy *)(void *)work);
    case WORK_COPIES_ARRIVE: return copies_arrival_run(all, (CopiesArrival *)(void *)work);
    case WORK_TENSOR_COMMIT: return tensor_commit_run(all, (TensorCommit *)(void *)work);
    case WORK_TENSOR_MMA: return tensor_mma_run(all, (TensorMma *)(void *)work);
    case WORK_BULK_LOAD: return bulk_load_run(all, (BulkCopy *)(void *)work);
    case WORK_BULK_READ: return bulk_read_run(all, (BulkCopy *)(void *)work);
    case WORK_BULK_WRITE: return bulk_write_run(all, (BulkCopy *)(void *)work);
    case WORK_WGMMA: return wgmma_run(all, (WgmmaWork *)(void *)work);
    default: return all->run(work->number);
  }
}

static void note(const WorkQueues *all, int64_t kind, const Work *work, int64_t size) {
  Tables *t = all->tables;
  if (t && t->events) event_of_work(t, kind, t->place, work, size);
}

static int32_t take_effect(WorkQueues *all, Work *work) {
  all->executed++;
  note(all, EVENT_BEGINS, work, 0);
  int32_t wrong = perform(all, work);
  note(all, wrong ? EVENT_FAILS : EVENT_ENDS, work, 0);
  return wrong;
}

static WorkQueue *queue_of(WorkQueues *all, int64_t key) {
  for (int64_t i = 0; i < all->count && key != NO_QUEUE; i++)
    if (all->queues[i].key == key) return &all->queues[i];
  return NULL;
}

static void append(WorkQueues *all, const Work *work, int64_t size) {
  WorkQueue *queue = queue_of(all, work->queue);
  Work *kept = malloc((size_t)size);
  memcpy(kept, work, (size_t)size);
  kept->next = NULL;
  if (queue) {
    queue->last = queue->last->next = kept;
    return;
  }
  if (all->count == all->room) {
    all->room = 2 * all->room + 16;
    all->queues = realloc(all->queues, (size_t)all->room * sizeof *all->queues);
  }
  all->queues[all->count++] = (WorkQueue){.key = work->queue, .first = kept, .last = kept};
}

int32_t work_submit(WorkQueues *all, Work *work, int64_t size) {
  work->number = ++all->issued;
  note(all, EVENT_ISSUED, work, size);
  if (all->eager) return take_effect(all, work);
  append(all, work, size);
  return 0;
}

int32_t work_submit_python(WorkQueues *all, int64_t queue, int32_t yields) {
  Work work = {.kind = WORK_PYTHON, .queue = queue, .yields = yields, .place = -1};
  Tables *t = all->tables;
  int64_t place = t ? t->place : -1;
  if (t) t->place = -1;  // Python knows where it is
  int32_t wrong = work_submit(all, &work, sizeof work);
  if (t) t->place = place;
  return wrong;
}

int32_t work_step(WorkQueues *all, int64_t index) {
  int64_t i = index;
  if (i < 0)
    for (i = 0; i < all->count && all->queues[i].first->yields;) i++;
  if (i == all->count) i = 0;
  WorkQueue *queue = &all->queues[i];
  Work *work = queue->first;
  queue->first = work->next;
  if (!queue->first) memmove(queue, queue + 1, (size_t)(--all->count - i) * sizeof *queue);
  free(all->running);
  all->running = work;
  if (all->tables) all->tables->place = -1;  // no warp executes
  if (take_effect(all, work)) return 1;  // which Python says where it was issued
  free(work);
  all->running = NULL;
  return 0;
}

int64_t work_epoch(Tables *t, const Work *work, int64_t column, int64_t clock, int64_t text, int kind) {
  Epochs *epochs = t->context->epochs;
  if (!has_room(epochs, 1)) {
    Conflict more = {0};
    if (t->context->ask(RACE_EPOCHS, &more) && stops(t, RACE_RAISED)) return 0;
  }
  return new_epoch(epochs, column, clock, text, kind, work->place);
}

void work_hold(WorkQueues *all, const Work *work, int64_t size) {
  Work *kept = malloc((size_t)size), **end = &all->held;
  memcpy(kept, work, (size_t)size);
  kept->next = NULL;
  while (*end) end = &(*end)->next;
  *end = kept;
}

static void free_all(Work *work) {
  for (Work *next; work; work = next) {
    next = work->next;
    if (work->kind == WORK_BULK_WRITE) free(((BulkCopy *)(void *)work)->box);
    free(work);
  }
}

void work_free(WorkQueues *all) {
  for (int64_t i = 0; i < all->count; i++) free_all(all->queues[i].first);
  free_all(all->held);
  free(all->running);
  free(all->queues);
  all->count = all->room = 0;
  all->queues = NULL;
  all->held = all->running = NULL;
}
