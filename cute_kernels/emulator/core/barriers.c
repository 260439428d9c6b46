// Named barriers: bar.sync, bar.arrive and bar.red. named_barriers.py makes room, and words what is refused.
#include <stddef.h>

#include "bytecode.h"
#include "events.h"

static int settle(NamedBarrier *barrier) {
  if (barrier->arrived < barrier->expected) return 0;
  barrier->results[barrier->generation % VOTES] = barrier->vote;
  if (barrier->point) point_complete(barrier->point, 0);
  if (barrier->again.warps && !barrier->first_double.warps) {
    barrier->again.warps = barrier->warps;
    barrier->first_double = barrier->again;
  }
  barrier->again.warps = barrier->warps = 0;
  barrier->generation++;
  barrier->arrived = barrier->arrivals = 0;
  barrier->vote = (Vote){0, 0};
  return 1;
}

int64_t named_recount(NamedBarriers *all, int64_t running) {
  int64_t completed = 0;
  all->running = running;
  for (int64_t number = 0; number < NAMED_BARRIERS; number++) {
    NamedBarrier *barrier = &all->barriers[number];
    if (!barrier->arrived || !barrier->all_threads) continue;
    barrier->expected = running;
    completed |= (int64_t)settle(barrier) << number;
  }
  return completed;
}

// --- in bytecode -----------------------------------------------------------------------------------------------------

// What is wrong with an arrival of lanes, or GO.
static int32_t refused(const NamedBarriers *all, int64_t number, int64_t threads, int whole_warp) {
  if (number >= NAMED_BARRIERS) return WRONG_NUMBER;
  if (!whole_warp) return WRONG_LANES;
  if (threads >= 0 && (!threads || threads % LANES)) return WRONG_THREADS;
  const NamedBarrier *barrier = &all->barriers[number];
  int64_t expected = threads < 0 ? all->running : threads;
  if (barrier->arrived && (expected != barrier->expected || (threads < 0) != barrier->all_threads)) return OTHER_THREADS;
  return GO;
}

// A warp is about to arrive: 0, if that may be counted in the phase before.
static int in_time(Tables *t, const Agent *agent, Point *point, int64_t number) {
  int64_t column = -1, own = point->column;
  if (!UNCERTIFIED && point->completed && (own < 0 || agent_row(agent, ROW_ORDER)[own] < point->completed)) {
    agent_order(agent, (uint32_t)agent->live);
    column = point_lacks(point, agent->scratch, agent->width);
  }
  const BarrierFault early = {.address = -1 - number, .phase = point->completed, .column = column, .warp = agent->number,
                              .place = t->place};
  if (column >= 0 && stops(t, ARRIVAL_EARLY, .barrier = early)) return 0;
  point_arrived(point, agent, t->place, *t->steps);
  return 1;
}

// A warp arrives, and its lanes vote.
static void arrive(
    NamedBarriers *all, NamedBarrier *barrier, const WarpHeader *header, int64_t threads, Vote vote, int64_t place) {
  barrier->all_threads = threads < 0;
  barrier->expected = threads < 0 ? all->running : threads;
  barrier->arrived += LANES;
  if (!barrier->arrivals) barrier->first = place;
  barrier->who[barrier->arrivals++] = header->index;
  int64_t warp = INT64_C(1) << header->index;
  if (barrier->warps & warp && !barrier->again.warps) barrier->again = (DoubleArrival){header->index, place, warp};
  barrier->warps |= warp;
  barrier->vote.votes += vote.votes;
  barrier->vote.voters += vote.voters;
  settle(barrier);
}

// a: number of the barrier and, above it, threads (FLAG: all of the CTA); b: of bar.red, the predicate.
static const Instruction *run_named(const Instruction *i, uint8_t *s, Machine *m) {
  WarpHeader *header = (WarpHeader *)s;
  Tables *t = m->tables;
  NamedBarriers *all = t->ctas[header->rank].named;
  int64_t operation = i->c & OPERATION, number = AT(u32, i->a);
  int64_t threads = i->c & FLAG ? -1 : (int64_t)AT(u32, i->a + sizeof(u32));
  int64_t *waiting = &all->waiting[header->index];
  t->place = place_of(i);
  if (!takes_logs(t)) return leave(m, ERROR);
  Agent *agent = t->context ? t->context->agent : NULL;
  if (*waiting == NO_GENERATION) {
    int32_t wrong = refused(all, number, threads, m->active == header->live);
    if (wrong != GO) return stops(t, wrong, .named = {number, threads}, .lanes.mask = m->active), leave(m, ERROR);
    NamedBarrier *barrier = &all->barriers[number];
    int full = barrier->arrivals == barrier->room || (agent && !barrier->point);
    if (full && stops(t, MAKE_ROOM, .named.number = number)) return leave(m, ERROR);
    uint32_t voted = i->c & ROWS_B ? AT(u32, i->b) & m->active : operation >= BAR_RED_POPC && AT(u64, i->b) ? m->active : 0;
    if (agent && !in_time(t, agent, barrier->point, number)) return leave(m, ERROR);
    if (agent) agent_release(agent, barrier->point, m->active, ORDER_SYNC);
    int64_t generation = barrier->generation;
    arrive(all, barrier, header, threads, (Vote){__builtin_popcount(voted), __builtin_popcount(m->active)}, t->place);
    t->progress++;
    if (barrier->generation != generation) event(t, EVENT_NAMED, header->rank, number, barrier->generation);
    if (operation == BAR_ARRIVE) return i + 1;
    *waiting = generation;
  }
  const NamedBarrier *barrier = &all->barriers[number];
  if (*waiting == barrier->generation) return wait_here(i, s, m, WAITS_NAMED, number);
  if (agent) agent_acquire(agent, barrier->point, ORDER_SYNC);
  Vote vote = barrier->results[*waiting % VOTES];
  *waiting = NO_GENERATION;
  if (operation == BAR_RED_POPC) AT(u64, i->d) = (u64)vote.votes;
  if (operation == BAR_RED_AND) AT(u64, i->d) = vote.votes == vote.voters;
  if (operation == BAR_RED_OR) AT(u64, i->d) = vote.votes > 0;
  return i + 1;
}

const Operation barrier_operations[] = {{"named_barrier", run_named, 0}, {0, 0, 0}};
