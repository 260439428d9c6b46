// Bulk groups (PTX ISA, "cp.async.bulk.commit_group"), of each thread that issues bulk stores its own.
#include "bulk_copies.h"

void bulk_commit(BulkThread *thread) { thread->committed++; }

// What a store has to do is in a queue of its own: first the read, then the write.
int32_t bulk_wait(const WorkQueues *all, BulkThread *thread, int64_t newest, int32_t read) {
  int64_t last = thread->committed - newest;
  for (int64_t i = 0; i < all->count; i++) {
    const BulkCopy *copy = (const BulkCopy *)(const void *)all->queues[i].first;
    int waits = copy->work.kind == WORK_BULK_READ || (copy->work.kind == WORK_BULK_WRITE && !read);
    if (waits && copy->thread == thread && copy->group <= last) return 0;
  }
  if (thread->waited < last) thread->waited = last;
  return 1;
}

// --- in bytecode -----------------------------------------------------------------------------------------------------

// Lanes that issued nothing have no groups, or empty ones.
static const Instruction *run_bulk_commit(const Instruction *i, uint8_t *s, Machine *m) {
  const WarpHeader *header = (WarpHeader *)s;
  for (uint32_t lanes = m->active & header->storing; lanes; lanes &= lanes - 1)
    bulk_commit(bulk_thread(header, __builtin_ctz(lanes)));
  return i + 1;
}

// a: how many groups, the newest, may be incomplete; FLAG: it waits for their reads alone.
static const Instruction *run_bulk_wait(const Instruction *i, uint8_t *s, Machine *m) {
  WarpHeader *header = (WarpHeader *)s;
  Tables *t = m->tables;
  int64_t newest = AT(s64, i->a);
  int read = (i->c & FLAG) != 0;
  uint32_t storing = m->active & header->storing;
  t->place = place_of(i);
  for (uint32_t lanes = storing; lanes; lanes &= lanes - 1) {
    int lane = __builtin_ctz(lanes);
    if (bulk_wait(t->work, bulk_thread(header, lane), newest, read)) continue;
    header->newest = newest;
    return wait_here(i, s, m, WAITS_BULK, 2 * lane + read);
  }
  if (!t->context || !storing) return i + 1;
  if (!takes_logs(t)) return leave(m, ERROR);
  for (uint32_t lanes = storing; lanes; lanes &= lanes - 1) {
    int lane = __builtin_ctz(lanes);
    const BulkThread *thread = bulk_thread(header, lane);
    agent_complete_in_lane(t->context->agent, lane, thread->reads, thread->committed - newest);
    if (!read) agent_complete_in_lane(t->context->agent, lane, thread->writes, thread->committed - newest);
  }
  return i + 1;
}

const Operation group_operations[] = {{"bulk_commit", run_bulk_commit, 0}, {"bulk_wait", run_bulk_wait, 0}, {0, 0, 0}};
