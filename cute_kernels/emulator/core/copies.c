// What the race detector makes of copies, bulk groups and MMAs that are complete when they are issued:
// races/tracker.py, races/tensor_memory.py and `BulkGroups` of async_engine.py have the general case.
//
// Each function first works off the log of the warp, so that the clocks are those of the program order. Then it checks
// all accesses of the operation, and only when every one is in order it records them and changes clocks.
#include <stddef.h>

#include "races.h"

// An access of a copy to shared or global memory.
static Access copy_access(const Context *context, int write, int global, int64_t lane) {
  const Agent *agent = context->agent;
  return (Access){
      .write = write, .grain = GRANULE, .known = agent_row(agent, write ? ROW_ACQUIRED : ROW_VISIBLE),
      .width = agent->width, .own = agent->base, .lane = lane, .exempt = write ? agent->base + COLUMN_READ : -1,
      .cluster = global ? context->cluster : 0, .epochs = context->epochs,
      .fenced = write && (global || !agent->strict) ? NULL : agent_row(agent, global ? ROW_PROXY_GLOBAL : ROW_PROXY),
  };
}

static Access shared_access(const Context *context, const WatchedCopy *copy, int write) {
  Access access = copy_access(context, write, 0, copy->lane);
  access.shadow = copy->shadow;
  access.base = copy->offset;
  access.rows = 1;
  access.count = copy->nbytes;
  return access;
}

// The access to global memory; its `shadow` is null where nobody may write. 0: for Python.
static int global_access(const Context *context, const WatchedCopy *copy, int write, Access *access) {
  int64_t end = copy->start + (copy->count - 1) * copy->pitch + copy->row;
  *access = copy_access(context, write, 1, copy->lane);
  for (int64_t i = 0; i < context->launch->count; i++) {
    const LaunchRegion *region = &context->launch->regions[i];
    if (copy->start < region->start || end > region->end) continue;
    access->shadow = region->writable ? region->tracked : NULL;
    access->base = copy->start - region->origin;
    access->rows = copy->count;
    access->stride = copy->pitch;
    access->count = copy->row;
    return !region->writable || region->tracked;
  }
  return 0;
}

static void record(Access *access, int64_t identity, int64_t column) {
  access->identity = identity;
  access->read_column = column;
  access_record(access);
}

// `RaceTracker.copy`, the accesses of each copy, and `complete_copy`. What is known when the first one is issued is
// what is checked: the others know more.
int32_t watch_load(Tables *t, const WatchedCopy *copies, int64_t count) {
  if (!log_flush(t)) return 0;
  const Context *context = t->context;
  Agent *agent = context->agent;
  Access source, targets[MOST_TARGETS];
  uint32_t lane = (uint32_t)1 << copies->lane;
  if (!global_access(context, copies, 0, &source) || !has_room(context->epochs, count)) return 0;
  agent_order(agent, lane);  // what is known to be over when the copy is
  for (int64_t i = 0; i < count; i++) {
    const WatchedCopy *copy = &copies[i];
    targets[i] = shared_access(context, copy, 1);
    if (!is_initialised(agent, copy->point)) return 0;
    if (copy->completes && point_overtaken(copy->point, copy->phase, agent->scratch) >= 0) return 0;
    if (!access_check(&targets[i])) return 0;
  }
  source.read_column = copies->point->column;
  if (source.shadow && !access_check(&source)) return 0;
  for (int64_t i = 0; i < count; i++) {
    const WatchedCopy *copy = &copies[i];
    Point *point = copy->point;
    int64_t phase = point->completed + 1;
    int64_t identity = new_epoch(context->epochs, point->column, phase, copy->text, 0, copy->instruction);
    record(&targets[i], identity, point->column);
    if (source.shadow && !i) record(&source, identity, point->column);
    if (i) agent_order(agent, lane);
    clocks_join(point->gathered, agent->scratch, agent->width);
    agent_advance(agent);
    point_copied(point, copy->pair, identity);
    if (copy->completes) point_complete(point, copy->phase);
  }
  return 1;
}

// What is kept of the bulk groups of a lane; null: it issued no stores.
static BulkThread *bulk_thread(const Agent *agent, int64_t lane) {
  return agent->storing >> lane & 1 ? (BulkThread *)(intptr_t)agent->bulk[lane] : NULL;
}

// `RaceTracker.bulk`, its accesses and `BulkGroups.issue`.
int32_t watch_store(Tables *t, const WatchedCopy *copy) {
  if (!log_flush(t)) return 0;
  const Context *context = t->context;
  Epochs *epochs = context->epochs;
  BulkThread *thread = bulk_thread(context->agent, copy->lane);
  Access source = shared_access(context, copy, 0), target;
  if (!thread || !global_access(context, copy, 1, &target) || !target.shadow || !has_room(epochs, 2)) return 0;
  source.read_column = thread->reads;
  if (!access_check(&source) || !access_check(&target)) return 0;
  int64_t group = thread->committed + 1;
  int64_t reads = new_epoch(epochs, thread->reads, group, copy->text, 0, copy->instruction);
  int64_t writes = new_epoch(epochs, thread->writes, group, copy->text, 0, copy->instruction);
  record(&source, reads, thread->reads);
  record(&target, writes, thread->writes);
  thread->stored = group;
  thread->identity = reads;
  return 1;
}

// `TensorRaces.issue`. Accesses that are recorded before one that is not in order are recorded again by Python, under
// the same identity.
int32_t watch_mma(
    Tables *t, MmaIssuer *issuer, const PipelinedAccess *accesses, int64_t count, int32_t instruction) {
  Stream *stream = issuer->stream;
  if (!log_flush(t) || !stream) return 0;
  const Context *context = t->context;
  if (!stream->identity) {
    if (!has_room(context->epochs, 1)) return 0;
    stream->identity = new_epoch(context->epochs, stream->column, stream->commits + 1, issuer->text, 0, instruction);
  }
  issuer->latest = stream->identity;
  int64_t lane = issuer->key[1] >> 8 & 255;
  return access_pipelined(accesses, count, context->agent, stream->identity, lane, stream->column) == count;
}
