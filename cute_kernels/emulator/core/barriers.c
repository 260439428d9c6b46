// Named barriers: bar.sync, bar.arrive and bar.red. named_barriers.py words what is refused.
#include <stddef.h>

#include "bytecode.h"
#include "races.h"
#include "trace.h"

static void settle(NamedBarrier *barrier) {
  if (barrier->arrived < barrier->expected) return;
  barrier->results[barrier->generation % VOTES] = barrier->vote;
  if (barrier->point) point_complete(barrier->point, 0);
  barrier->generation++;
  barrier->arrived = barrier->arrivals = 0;
  barrier->vote = (Vote){0, 0};
}

int64_t named_arrive(NamedBarriers *all, const NamedArrival *arrival) {
  int64_t threads = arrival->threads, whole = threads < 0, expected = whole ? all->running : threads;
  if (arrival->number < 0 || arrival->number >= NAMED_BARRIERS) return WRONG_NUMBER;
  if (arrival->lanes != arrival->live) return WRONG_LANES;
  if (!whole && (!threads || threads % LANES)) return WRONG_THREADS;
  NamedBarrier *barrier = &all->barriers[arrival->number];
  if (barrier->arrived && (expected != barrier->expected || whole != barrier->all_threads)) return OTHER_THREADS;
  if (barrier->arrivals == barrier->room || (arrival->agent && !barrier->point)) return NO_ROOM;
  if (arrival->agent) agent_release(arrival->agent, barrier->point, (uint32_t)arrival->lanes, ORDER_SYNC);
  barrier->expected = expected;
  barrier->all_threads = whole;
  barrier->arrived += LANES;
  if (!barrier->arrivals) barrier->first = arrival->place;
  barrier->who[barrier->arrivals++] = arrival->warp;
  barrier->vote.votes += arrival->vote.votes;
  barrier->vote.voters += arrival->vote.voters;
  int64_t generation = barrier->generation;
  if (arrival->waits) all->waiting[arrival->warp] = generation;
  settle(barrier);
  return generation;
}

int64_t named_pass(NamedBarriers *all, int64_t number, int64_t warp, Agent *agent) {
  const NamedBarrier *barrier = &all->barriers[number];
  int64_t generation = all->waiting[warp];
  if (generation == barrier->generation) return NO_GENERATION;
  if (agent) agent_acquire(agent, barrier->point, ORDER_SYNC);
  all->waiting[warp] = NO_GENERATION;
  return generation;
}

void named_recount(NamedBarriers *all, int64_t running) {
  all->running = running;
  for (int64_t number = 0; number < NAMED_BARRIERS; number++) {
    NamedBarrier *barrier = &all->barriers[number];
    if (!barrier->arrived || !barrier->all_threads) continue;
    barrier->expected = running;
    settle(barrier);
  }
}

// --- in bytecode -----------------------------------------------------------------------------------------------------

// The list b: words with the address of the barriers, the index of the warp, the number of the barrier and the threads
// (0: all); whether it waits; instruction.
static int64_t arrive(const Instruction *i, uint8_t *s, Machine *m, Agent *agent) {
  const uint32_t *list = m->program->lists + i->b;
  const NamedArrival arrival = {
      .number = AT(s64, list[2]), .threads = list[3] ? AT(s64, list[3]) : -1, .warp = AT(s64, list[1]),
      .lanes = m->active, .live = ((WarpHeader *)s)->live, .waits = list[4], .place = list[5], .agent = agent,
  };
  NamedBarriers *all = (NamedBarriers *)(uintptr_t)AT(u64, list[0]);
  Tables *t = m->tables;
  int64_t generation = named_arrive(all, &arrival);
  if (generation < 0) return generation;
  t->progress++;
  int64_t complete = all->barriers[arrival.number].generation;
  if (t->trace && complete != generation) {
    TraceEvent *event = trace_event(t, TRACE_NAMED, arrival.place);
    event->number = arrival.number;
    event->phase = complete;
  }
  return generation;
}

// Whether the barrier is the core's business, and with detectors who comes to it.
static int takes_part(Tables *t, Agent **agent) {
  int watched = (t->unit_flags & WATCHED) != 0;
  if (!trace_room(t, 1) || (watched && !log_flush(t))) return 0;
  *agent = watched ? t->context->agent : NULL;
  return 1;
}

static const Instruction *run_named_arrive(const Instruction *i, uint8_t *s, Machine *m) {
  Agent *agent;
  return takes_part(m->tables, &agent) && arrive(i, s, m, agent) >= 0 ? i + 1 + i->d : i + 1;
}

// c: whether the warp never diverges here, so that none of its lanes could run while others wait.
static const Instruction *run_named_sync(const Instruction *i, uint8_t *s, Machine *m) {
  const uint32_t *list = m->program->lists + i->b;
  NamedBarriers *all = (NamedBarriers *)(uintptr_t)AT(u64, list[0]);
  int64_t warp = AT(s64, list[1]), number = AT(s64, list[2]);
  Agent *agent;
  if (!takes_part(m->tables, &agent)) return i + 1;
  if (all->waiting[warp] == NO_GENERATION && arrive(i, s, m, agent) < 0) return i + 1;
  if (named_pass(all, number, warp, agent) != NO_GENERATION) return i + 1 + i->d;
  return i->c ? wait_for(i, s, m, WAITS_NAMED, (int32_t)number) : i + 1;
}

const Operation barrier_operations[] = {
    {"named_arrive", run_named_arrive, 0}, {"named_sync", run_named_sync, 0}, {0, 0, 0},
};
