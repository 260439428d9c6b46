// mbarriers: arrivals, transaction bytes, phases, waits (PTX ISA, "mbarrier"), and what the race detector makes of them.
// mbarrier.py initialises them, and words what goes wrong.
#include <stddef.h>
#include <stdlib.h>

#include "bytecode.h"
#include "events.h"

static Barrier *live(Tables *t, int64_t operation, int64_t address) {
  Barrier *barrier = barrier_at(t, address);
  if (barrier && !t->ctas[address >> RANK_SHIFT].exited) return barrier;
  stops(t, barrier ? EXITED : NOT_LIVE, .barrier = {operation, address});
  return NULL;
}

// A phase completes: some arrival of it knows of all bytes that it awaited. 0: Python has been told.
static int announced(Tables *t, int64_t operation, int64_t address, Point *point) {
  for (int64_t i = 0; point->announcements && i < point->warps; i++) {
    Followed *warp = &point->followed[i];
    if (!warp->announced) continue;
    warp->announced = 0;
    point->announcements--;
    const BarrierFault late = {operation, address, .warp = i, .place = warp->announced_place};
    if (stops(t, ANNOUNCED_LATE, .barrier = late)) return 0;
  }
  return 1;
}

// The phase completes if nothing is pending.
static int settle(Tables *t, Barrier *barrier, int64_t operation, int64_t address) {
  if (barrier->pending || barrier->tx) return 1;
  Point *point = barrier->point;
  int64_t late = point ? point_overtaken(point, barrier->phase, NULL) : -1;
  int64_t place = late < 0 ? -1 : point->followed[late].waited_place;
  if (late >= 0 && stops(t, PHASE_OVERRUN, .barrier = {operation, address, .warp = late, .place = place})) return 0;
  if (point && !announced(t, operation, address, point)) return 0;
  for (late = 0; point && (late = point_parted(point, barrier->phase, late)) >= 0; late++) {
    place = point->followed[late].waited_place;
    if (stops(t, LANES_OVERTAKEN, .barrier = {operation, address, .warp = late, .place = place})) return 0;
  }
  if (point) point_complete(point, barrier->phase);
  barrier->phase++;
  barrier->pending = barrier->expected;
  t->completions++;
  event(t, EVENT_PHASE, address, barrier->phase);
  return 1;
}

int64_t mbarrier_do(Tables *t, int64_t operation, int64_t address, int64_t amount, int64_t who) {
  Barrier *barrier = live(t, operation, address);
  if (!barrier) return -1;
  int64_t phase = barrier->phase, pending = barrier->pending;
  int32_t wrong = 0;
  switch (operation) {
    case EXPECT_TX:
    case COMPLETE_TX:  // bytes may come before they are announced
      barrier->tx += operation == EXPECT_TX ? amount : -amount;
      if (llabs(barrier->tx) > MAX_COUNT) wrong = TOO_MANY_BYTES;
      else if (operation == COMPLETE_TX && barrier->tx < 0 && !pending) wrong = EXTRA_BYTES;
      break;
    case EXPECT_ARRIVALS:
      barrier->pending += amount;
      if (barrier->pending > MAX_COUNT) wrong = TOO_MANY_ARRIVALS;
      break;
    default:
      if (amount < 1 || amount > pending) {
        wrong = EXTRA_ARRIVALS;
        break;
      }
      if (operation == ARRIVE_DROP) barrier->expected -= amount;
      barrier->pending -= amount;
      barrier->arriver = who;
      if (barrier->tx < 0 && !barrier->pending) wrong = EXTRA_BYTES;
  }
  if (wrong) return stops(t, wrong, .barrier = {operation, address, amount, who}), -1;
  if (operation == EXPECT_TX || operation == EXPECT_ARRIVALS) return phase;
  return settle(t, barrier, operation, address) ? phase : -1;
}

// Keeps an operation that has been performed, for reports.
static Moment *keep(Tables *t, int64_t operation, int64_t address, int64_t phase, int64_t place, int64_t warp) {
  Moment *moment = &t->moments[t->moment_count++ % MOMENTS];
  *moment = (Moment){.address = address, .operation = (int32_t)operation, .phase = (int32_t)phase,
                     .place = (int32_t)place, .warp = (int32_t)warp, .steps = t->steps ? *t->steps : 0};
  return moment;
}

// Whether the latest operation of a warp that is kept is a wait for this phase that timed out: of a kernel that hangs
// these would leave no room for what led to it.
static int timed_out_before(const Tables *t, int64_t address, int64_t phase, int64_t place, int64_t warp) {
  int64_t first = t->moment_count > MOMENTS ? t->moment_count - MOMENTS : 0;
  for (int64_t number = t->moment_count - 1; number >= first; number--) {
    const Moment *each = &t->moments[number % MOMENTS];
    if (each->warp == warp)
      return each->timed_out && each->address == address && each->phase == phase && each->place == place;
  }
  return 0;
}

int64_t mbarrier_by(
    Tables *t, int64_t operation, int64_t address, int64_t amount, int64_t who, int64_t place, int64_t warp) {
  int64_t phase = mbarrier_do(t, operation, address, amount, who);
  if (phase >= 0) keep(t, operation, address, phase, place, warp)->amount = (int32_t)amount;
  return phase;
}

int64_t mbarrier_apply(
    Tables *t, int64_t operation, int64_t address, int64_t amount, int64_t who, int64_t place, int64_t warp) {
  int64_t before = t->place;
  t->place = -1;  // Python knows where it is
  int64_t phase = mbarrier_by(t, operation, address, amount, who, place, warp);
  t->place = before;
  return phase;
}

int32_t mbarrier_test(Tables *t, int64_t operation, int64_t address, int64_t state, int32_t parity) {
  const Barrier *barrier = live(t, operation, address);
  if (!barrier) return -1;
  return parity ? (barrier->phase & 1) != (state & 1) : barrier->phase > state;
}

// --- in bytecode -----------------------------------------------------------------------------------------------------

enum { ADDRESSES = ROWS_A, AMOUNTS = ROWS_B, PARITY = FLAG };
static const int64_t phase_bits = ((int64_t)1 << MBARRIER_PENDING) - 1;  // of a state

typedef struct Lanes { int64_t address, amount; uint32_t lanes; } Lanes;

static int64_t operand(const uint8_t *s, uint32_t place, int varies, int wide, int lane) {
  if (!varies) return AT(const s64, place);
  return wide ? ((const s64 *)(const void *)(s + place))[lane] : (int64_t)((const u32 *)(const void *)(s + place))[lane];
}

// The first of the lanes `left`, with all that have the same address and (`alike`) amount.
static Lanes next_of(const Instruction *i, const uint8_t *s, uint32_t left, int alike) {
  Lanes found = {0, 0, 0};
  uint32_t one = left & -left;
  if (!(i->c & (ADDRESSES | AMOUNTS))) one = left;
  for (uint32_t rest = i->c & (ADDRESSES | AMOUNTS) ? left : one & -one; rest; rest &= rest - 1) {
    int lane = __builtin_ctz(rest);
    int64_t address = operand(s, i->a, i->c & ADDRESSES, 0, lane);
    int64_t amount = operand(s, i->b, i->c & AMOUNTS, i->c & WIDE, lane) & phase_bits;
    if (found.lanes && (address != found.address || (alike && amount != found.amount))) continue;
    if (!found.lanes) found = (Lanes){address, amount, one};
    found.lanes |= rest & -rest;
  }
  return found;
}

int mbarrier_usable(Tables *t, int64_t operation, int64_t address, const Point *point) {
  const Agent *agent = t->context->agent;
  return !point->init_clock || is_initialised(agent, point) ||
         !stops(t, INIT_ORDER, .barrier = {operation, address, .column = point->init_column, .clock = point->init_clock});
}

int mbarrier_in_time(
    Tables *t, int64_t operation, int64_t address, const int32_t *order, int64_t width, int64_t warp, int64_t place) {
  const Point *point = barrier_at(t, address)->point;
  int64_t column = UNCERTIFIED ? -1 : point_lacks(point, order, width);
  int bytes = operation == COMPLETE_TX || operation == EXPECT_TX;
  const BarrierFault early = {operation, address, .phase = point->completed, .column = column, .warp = warp, .place = place};
  return column < 0 || !stops(t, bytes ? BYTES_EARLY : ARRIVAL_EARLY, .barrier = early);
}

// Lanes are about to contribute to a phase: 0, if it may be the one before.
static int in_time(Tables *t, int64_t operation, int64_t address, int64_t clock) {
  const Barrier *barrier = barrier_at(t, address);
  Point *point = barrier ? barrier->point : NULL;
  if (!point || UNCERTIFIED) return 1;
  const Agent *agent = t->context->agent;
  point_used(point, agent, clock);
  int known = !point->completed || agent_row(agent, ROW_ORDER)[point->column] >= point->completed;
  if (known && !point->announcements && operation != EXPECT_TX) return 1;
  agent_order(agent, (uint32_t)agent->live);
  if (operation == EXPECT_TX) point_announce(point, agent, t->place);
  else if (operation != COMPLETE_TX) point_hears(point, agent->scratch, agent->width);
  return mbarrier_in_time(t, operation, address, agent->scratch, agent->width, agent->number, t->place);
}

// Lanes are about to arrive.
static int release(Tables *t, int64_t operation, const Lanes *group, int64_t order) {
  Barrier *barrier = barrier_at(t, group->address);
  if (!barrier || !barrier->point) return 1;
  if (!mbarrier_usable(t, operation, group->address, barrier->point)) return 0;
  Agent *agent = t->context->agent;
  if (group->address >> RANK_SHIFT != agent->rank) point_arrived(barrier->point, agent, t->place, *t->steps);
  agent_release(agent, barrier->point, group->lanes, order);
  return 1;
}

// An operation, which observers hear of; of arrive.expect_tx as the mbarrier is between its two halves.
static int64_t perform(Tables *t, int64_t operation, int64_t address, int64_t amount, int64_t who) {
  int both = operation == ARRIVE_EXPECT_TX;
  int64_t phase = mbarrier_by(t, both ? EXPECT_TX : operation, address, amount, who, t->place, who - 1);
  if (phase < 0) return phase;
  const Barrier *barrier = barrier_at(t, address), shown = *barrier;
  if (both && mbarrier_by(t, ARRIVE, address, 1, who, t->place, who - 1) < 0) return -1;
  event(t, EVENT_MBARRIER, operation, address, shown.phase, shown.expected, shown.pending, shown.tx, shown.arriver);
  return phase;
}

static const Instruction *run_mbarrier(const Instruction *i, uint8_t *s, Machine *m) {
  Tables *t = m->tables;
  int64_t operation = i->c & OPERATION, phase = 0, who = ((WarpHeader *)s)->number + 1;
  int together = operation == ARRIVE && !(i->c & AMOUNTS);
  t->place = place_of(i);
  t->progress++;
  if (!takes_logs(t)) return leave(m, ERROR);
  const int64_t clock = t->context ? t->context->agent->clock : 0;
  for (uint32_t left = m->active; t->context && operation != EXPECT_TX && left;) {
    Lanes group = next_of(i, s, left, 0);
    t->context->agent->clock = clock;  // of all lanes, wherever they arrive
    if (!release(t, operation, &group, i->imm & 255)) return leave(m, ERROR);
    left &= ~group.lanes;
  }
  for (uint32_t left = m->active; left && phase >= 0;) {
    Lanes group = next_of(i, s, left, 0);
    if (!together) group.lanes = left & -left;
    const Barrier *barrier = i->d ? barrier_at(t, group.address) : NULL;
    int64_t pending = barrier ? barrier->pending : 0;
    if (t->context && !in_time(t, operation, group.address, clock)) return leave(m, ERROR);
    phase = perform(t, operation, group.address, group.amount * __builtin_popcount(group.lanes), who);
    left &= ~group.lanes;
    for (; barrier && group.lanes; group.lanes &= group.lanes - 1, pending -= group.amount)
      ROW_OF(u64, i->d)[__builtin_ctz(group.lanes)] = (u64)phase | (u64)pending << MBARRIER_PENDING;
  }
  if (phase < 0) return leave(m, ERROR);
  return i + 1;
}

// Lanes look for a phase by its parity: it may be taken for the one before.
static int look(Tables *t, int64_t operation, const Lanes *group) {
  const Barrier *barrier = barrier_at(t, group->address);
  int64_t back = (barrier->phase ^ group->amount) & 1, phase = barrier->phase - back;
  return phase <= 0 || !barrier->point || point_knows(barrier->point, t->context->agent, back) ||
         !stops(t, PHASE_AMBIGUOUS, .barrier = {operation, group->address, .phase = phase});
}

// Lanes saw the phase before the current one complete.
static int acquire(Tables *t, int64_t operation, const Lanes *group, int64_t order) {
  const Barrier *barrier = barrier_at(t, group->address);
  if (!barrier->point) return 1;
  if (!mbarrier_usable(t, operation, group->address, barrier->point)) return 0;
  const Context *context = t->context;
  const uint8_t *parting = context->launch ? context->launch->parting : NULL;
  agent_acquire(context->agent, barrier->point, order);
  int64_t lanes = parting && parting[t->place] ? group->lanes : 0;
  point_waited(barrier->point, context->agent, barrier->phase - 1, t->place, lanes);
  return 1;
}

// try_wait suspends until the phase completes or a time limit passes, which it does when nothing else can run, or by
// chance. test_wait does not suspend, but a warp that polls gives way once before it is told that the phase is not.
static const Instruction *run_mbarrier_wait(const Instruction *i, uint8_t *s, Machine *m) {
  WarpHeader *header = (WarpHeader *)s;
  Tables *t = m->tables;
  int64_t operation = i->c & OPERATION;
  int parity = (i->c & PARITY) != 0;
  uint32_t done = 0, active = m->active, result;
  t->place = place_of(i);
  if (!takes_logs(t)) return leave(m, ERROR);
  for (uint32_t left = active; left;) {
    Lanes group = next_of(i, s, left, 1);
    int32_t passed = mbarrier_test(t, operation, group.address, group.amount, parity);
    if (passed < 0) return leave(m, ERROR);
    Point *point = t->context ? barrier_at(t, group.address)->point : NULL;
    if (point) point_used(point, t->context->agent, t->context->agent->clock);
    if (passed) event(t, EVENT_PASSED, group.address, group.amount, parity);
    done |= passed ? group.lanes : 0;
    left &= ~group.lanes;
  }
  for (uint32_t left = active; t->context && parity && left;) {
    Lanes group = next_of(i, s, left, 1);
    if (!look(t, operation, &group)) return leave(m, ERROR);
    left &= ~group.lanes;
  }
  if (done == active && !(t->flags & SPURIOUS && stops(t, BY_CHANCE))) {
    header->timed_out = 0;
    result = done;
  } else if (done == active || header->timed_out) {
    header->timed_out = 0;
    result = done == active ? 0 : done;
    if (done == active) done = 0;  // nobody is told that it has passed
  } else if (operation == TEST_WAIT && header->token == POLLED) {
    header->token = 0;
    result = done;
  } else {
    Lanes first = next_of(i, s, active & ~done, 1);
    int32_t waits = operation == TEST_WAIT ? WAITS_POLLING : parity ? WAITS_PHASE : WAITS_STATE;
    header->mbarrier = first.address;
    if (operation == TEST_WAIT) header->token = POLLED;
    return wait_here(i, s, m, waits, parity ? first.amount & 1 : first.amount);
  }
  for (uint32_t left = t->context ? done : 0; left;) {
    Lanes group = next_of(i, s, left, 0);
    if (!acquire(t, operation, &group, i->imm & 255)) return leave(m, ERROR);
    left &= ~group.lanes;
  }
  // Of a test_wait that polls there would be no room for anything else.
  for (uint32_t left = operation == TRY_WAIT ? active : done; left;) {
    Lanes group = next_of(i, s, left, 1);
    const Barrier *barrier = barrier_at(t, group.address);
    left &= ~group.lanes;
    int late = !(done & group.lanes);
    if (late && timed_out_before(t, group.address, barrier->phase, t->place, header->number)) continue;
    Moment *moment = keep(t, operation, group.address, barrier->phase, t->place, header->number);
    moment->amount = (int32_t)(parity ? group.amount & 1 : group.amount);
    moment->parity = parity;
    moment->timed_out = late;
  }
  AT(u64, i->d) = i->c & (ADDRESSES | AMOUNTS) ? result : result != 0;
  return i + 1;
}

const Operation mbarrier_operations[] = {
    {"mbarrier", run_mbarrier, 0}, {"mbarrier_wait", run_mbarrier_wait, 0}, {0, 0, 0},
};
