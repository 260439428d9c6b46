// cp.async: copies of single lanes from global to shared memory, their groups, and arrivals when they are complete.
//
// A copy happens at any time between its issue and the wait for it, as the completion policy says; the copies of the lanes
// of one instruction happen together. It writes through the generic proxy. cp_async.py words what is wrong.
#include <stdlib.h>

#include "accesses.h"
#include "asynchronous.h"
#include "bytecode.h"
#include "meter.h"

// --- the race detector: it sees a copy as a store of the warp until that waits, and what it reads as loads -----------

// What a copy accesses of a memory: an access of the race detector, recorded once all are in order.
static Access access_of(const Context *context, int write, const int64_t *offsets, int64_t count, int64_t nbytes) {
  const Agent *agent = context->agent;
  const int32_t *known = agent_row(agent, ROW_VISIBLE);
  return (Access){
      .write = write, .grain = GRANULE, .offsets = offsets, .rows = count, .count = nbytes, .known = known,
      .width = agent->width, .own = agent->base, .lane = -1, .exempt = agent->base + COLUMN_READ,
      .epochs = context->epochs, .read_column = agent->base + COLUMN_READ,
  };
}

// The region of global memory that all reads are in; `shadow` is null where nobody may write. 0: for Python.
static int region_access(const Context *context, const Lanes *sources, int64_t nbytes, Access *access) {
  uint64_t low, high, bits;
  bounds(sources, &low, &high, &bits);
  for (int64_t i = 0; i < context->launch->count; i++) {
    const LaunchRegion *region = &context->launch->regions[i];
    if (low < (uint64_t)region->start || high + (uint64_t)nbytes > (uint64_t)region->end) continue;
    access->shadow = region->writable ? region->tracked : NULL;
    access->origin = region->origin;
    access->cluster = context->cluster;
    return !region->writable || region->tracked;
  }
  return 0;
}

// Lanes that all write one place: for Python.
static int one_place(const Lanes *lanes) {
  int64_t differ = 0;
  for (int i = 0; i < lanes->count; i++) differ |= lanes->addresses[i] ^ lanes->addresses[0];
  return lanes->count > 1 && !differ;
}

// Whether a copy is in order, which then is recorded. 0: for Python.
static int watch(const Context *context, const LaneCopy *copy, const Lanes *targets, const Lanes *sources) {
  Agent *agent = context->agent;
  const LaneCopies *copies = copy->copies;
  for (int i = 0; i < targets->count; i++)
    if (targets->addresses[i] >> RANK_SHIFT != agent->rank) return 0;
  Access write = access_of(context, 1, targets->addresses, targets->count, copy->nbytes);
  Access read = access_of(context, 0, sources->addresses, sources->count, copy->nbytes);
  write.shadow = context->shadow;
  write.origin = agent->rank << RANK_SHIFT;
  write.lanes = targets->lanes;
  if (one_place(targets) || !has_room(context->epochs, 2)) return 0;
  if (sources->count && !region_access(context, sources, copy->nbytes, &read)) return 0;
  if (!access_check(&write) || (read.shadow && !access_check(&read))) return 0;
  write.identity =
      new_epoch(context->epochs, copies->column, copy->number, copies->text, GENERIC, copy->work.place);
  access_record(&write);
  if (!read.shadow) return 1;
  if (!agent->read_identity)
    agent->read_identity = new_epoch(
        context->epochs, agent->base + COLUMN_READ, agent->clock, agent->text, GENERIC, copy->work.place);
  read.identity = agent->read_identity;
  access_record(&read);
  return 1;
}

// --- copies ----------------------------------------------------------------------------------------------------------

static uint32_t reading(const LaneCopy *copy) {
  uint32_t found = 0;
  for (int lane = 0; lane < LANES; lane++)
    if (copy->lanes >> lane & 1 && copy->counts[lane]) found |= (uint32_t)1 << lane;
  return found;
}

// Where lanes copy from and to.
static void take(const LaneCopy *copy, Lanes *targets, Lanes *sources) {
  targets->count = take_lanes((uint32_t)copy->lanes, copy->targets, targets->addresses, targets->lanes);
  sources->count = take_lanes(reading(copy), copy->sources, sources->addresses, sources->lanes);
}

// Whether each lane reads what a region has.
static int has_sources(const Tables *t, const Lanes *sources, const int64_t *counts) {
  for (int i = 0; i < sources->count; i++) {
    uint64_t start = (uint64_t)sources->addresses[i];
    if (!region_of(t, start, start + (uint64_t)counts[sources->lanes[i]], 0)) return 0;
  }
  return 1;
}

// A copy of the warp is complete, on which arrivals may wait.
static int32_t release(WorkQueues *all, const LaneCopy *copy) {
  for (Work **at = &all->held; *at;) {
    CopiesArrival *arrival = (CopiesArrival *)(void *)*at;
    int waits = arrival->copies == copy->copies && copy->number <= arrival->behind && copy->lanes >> arrival->lane & 1;
    if (!waits || --arrival->left) {
      at = &arrival->work.next;
      continue;
    }
    *at = arrival->work.next;
    int32_t wrong = work_submit(all, &arrival->work, (int64_t)sizeof *arrival + CLOCK_BYTES(arrival->width));
    free(arrival);
    if (wrong) return 1;
  }
  return 0;
}

int32_t lane_copy_run(WorkQueues *all, LaneCopy *copy) {
  Tables *t = all->tables;
  Lanes targets, sources;
  take(copy, &targets, &sources);
  if (targets.count && (!has_sources(t, &sources, copy->counts) || !find_shared(t, &targets, 1, copy->nbytes)))
    return stops(t, COPY_REFUSED, .copy.record = WHERE(copy));
  for (int i = 0; i < targets.count; i++) {
    int64_t lane = targets.lanes[i], count = copy->counts[lane];
    memcpy(targets.data[i], (const void *)(uintptr_t)copy->sources[lane], (size_t)count);
    memset(targets.data[i] + count, 0, (size_t)(copy->nbytes - count));
  }
  if (t->flags & STATES) mark_data(&targets, copy->nbytes);
  return release(all, copy);
}

// Each is alone in its queue.
LaneCopy *copies_pending(const WorkQueues *all, const LaneCopies *copies, int64_t lanes, int64_t newest) {
  for (int64_t i = 0; i < all->count; i++) {
    LaneCopy *copy = (LaneCopy *)(void *)all->queues[i].first;
    if (copy->work.kind != WORK_LANE_COPY || copy->copies != copies) continue;
    for (uint32_t left = (uint32_t)(copy->lanes & lanes); left; left &= left - 1) {
      int lane = __builtin_ctz(left);
      if (newest == EVERY_COPY || copy->groups[lane] <= copies->committed[lane] - newest) return copy;
    }
  }
  return NULL;
}

// --- in bytecode -----------------------------------------------------------------------------------------------------

static LaneCopies *copies_of(uint8_t *s, const Machine *m) {
  WarpHeader *header = (WarpHeader *)s;
  if (!header->copies && stops(m->tables, MAKE_COPIES)) return NULL;
  return header->copies;
}

// To the shared addresses a from the global ones b; the operand d says how many bytes lanes read or, with FLAG, which of
// them read nothing. imm's order: bytes that each writes.
static const Instruction *run_copy_lanes(const Instruction *i, uint8_t *s, Machine *m) {
  Tables *t = m->tables;
  t->place = place_of(i);
  t->progress++;
  LaneCopies *copies = copies_of(s, m);
  if (!copies) return leave(m, ERROR);
  LaneCopy copy = {
      .work = {.kind = WORK_LANE_COPY, .place = t->place, .warp = ((WarpHeader *)s)->number},
      .copies = copies, .number = copies->issued + 1, .lanes = m->active, .nbytes = i->imm & 255,
  };
  const u32 *a = (const u32 *)(const void *)(s + i->a), *d = (const u32 *)(const void *)(s + i->d);
  const u64 *b = (const u64 *)(const void *)(s + i->b);
  int64_t bits = 0, most = 0;
  for (int lane = 0; lane < LANES; lane++) {
    copy.targets[lane] = a[i->c & ROWS_A ? lane : 0];
    copy.sources[lane] = (int64_t)b[i->c & ROWS_B ? lane : 0];
    if (i->c & FLAG) copy.counts[lane] = (i->c & ROWS_D ? *d >> lane & 1 : *d) ? 0 : copy.nbytes;
    else copy.counts[lane] = d[i->c & ROWS_D ? lane : 0];
    copy.groups[lane] = copies->committed[lane] + 1;
    if (!(m->active >> lane & 1)) continue;
    bits |= copy.targets[lane] | copy.sources[lane];
    most = copy.counts[lane] > most ? copy.counts[lane] : most;
  }
  if (most > copy.nbytes || bits & (copy.nbytes - 1)) {
    stops(t, COPY_REFUSED, .copy.record = WHERE(&copy));
    return leave(m, ERROR);
  }
  if (t->meter && copy.lanes) {
    uint32_t reads = reading(&copy);
    meter_access(t, copy.targets, m->active, t->place, 1, METER_STORE, copy.nbytes);
    if (reads) meter_access(t, copy.sources, reads, t->place, 0, METER_LOAD, copy.nbytes);
  }
  copies->issued++;
  if (t->context && copy.lanes) {
    Lanes targets, sources;
    if (!takes_logs(t)) return leave(m, ERROR);
    take(&copy, &targets, &sources);
    if (!watch(t->context, &copy, &targets, &sources) &&
        stops(t, COPY_UNORDERED, .copy.record = WHERE(&copy)))
      return leave(m, ERROR);
  }
  return work_submit(t->work, &copy.work, sizeof copy) ? leave(m, ERROR) : i + 1;
}

static const Instruction *run_copies_commit(const Instruction *i, uint8_t *s, Machine *m) {
  m->tables->place = place_of(i);
  LaneCopies *copies = copies_of(s, m);
  if (!copies) return leave(m, ERROR);
  for (int lane = 0; lane < LANES; lane++) copies->committed[lane] += m->active >> lane & 1;
  copies->ends[copies->groups++ % COPY_GROUPS] = copies->issued;
  return i + 1;
}

// imm's order: how many groups, the newest, may be incomplete; FLAG: it waits for every copy.
static const Instruction *run_copies_wait(const Instruction *i, uint8_t *s, Machine *m) {
  WarpHeader *header = (WarpHeader *)s;
  const LaneCopies *copies = header->copies;
  Tables *t = m->tables;
  int32_t newest = i->c & FLAG ? EVERY_COPY : (int32_t)(i->imm & 255);
  t->place = place_of(i);
  if (!copies) return i + 1;
  if (copies_pending(t->work, copies, m->active, newest)) {
    header->newest = m->active;
    return wait_here(i, s, m, WAITS_COPIES, newest);
  }
  if (!t->context) return i + 1;
  if (!takes_logs(t)) return leave(m, ERROR);
  Agent *agent = t->context->agent;
  int64_t done = newest == EVERY_COPY ? copies->issued : 0;
  if (newest != EVERY_COPY && copies->groups > newest) done = copies->ends[(copies->groups - 1 - newest) % COPY_GROUPS];
  clocks_raise(agent->clocks, agent->width, ROW_PROXY, copies->column, done);
  agent->changes++;
  return i + 1;
}

// --- arrivals --------------------------------------------------------------------------------------------------------

int32_t copies_arrival_run(WorkQueues *all, CopiesArrival *arrival) {
  Tables *t = all->tables;
  Barrier *barrier = barrier_at(t, arrival->barrier);
  if (barrier && barrier->point && arrival->width)
    point_gather(barrier->point, (const int32_t *)(void *)(arrival + 1), arrival->width, arrival->rank, ORDER_SYNC);
  const Work *work = &arrival->work;
  return mbarrier_by(t, ARRIVE, arrival->barrier, 1, arrival->label, work->place, work->warp) < 0;
}

static int64_t label_of(Tables *t, LaneCopies *copies, int lane) {
  if (!copies->labels[lane]) {
    stops(t, NAME_ARRIVAL, .copy.lane = lane);
    copies->labels[lane] = t->fault.copy.text;
  }
  return copies->labels[lane];
}

// One lane arrives when its copies so far are complete. 0: Python has been told what is wrong.
static int arrive(
    const Instruction *i, const uint8_t *s, Tables *t, LaneCopies *copies, int lane, int64_t address) {
  Context *context = t->context;
  int64_t width = context ? context->agent->width : 0, size = (int64_t)sizeof(CopiesArrival) + CLOCK_BYTES(width), left = 0;
  if (!(i->c & FLAG) && mbarrier_do(t, EXPECT_ARRIVALS, address, 1, 0) < 0) return 0;
  CopiesArrival *arrival = malloc((size_t)size);
  *arrival = (CopiesArrival){
      .work = {.kind = WORK_COPIES_ARRIVE, .place = place_of(i), .warp = ((const WarpHeader *)s)->number},
      .copies = copies, .barrier = address, .lane = lane, .label = label_of(t, copies, lane),
      .behind = copies->issued, .rank = ((const WarpHeader *)s)->rank, .width = width,
  };
  const Barrier *barrier = barrier_at(t, address);
  int wrong = context && barrier && barrier->point && !mbarrier_usable(t, EXPECT_ARRIVALS, address, barrier->point);
  if (context && !wrong) {
    Agent *agent = context->agent;
    agent_snapshot(agent, (uint32_t)1 << lane);
    for (int row = 0; row < ROW_PROXY; row++) agent->scratch[row * width + copies->column] = (int32_t)copies->issued;
    memcpy(arrival + 1, agent->scratch, (size_t)CLOCK_BYTES(width));
    agent_advance(agent);
  }
  for (int64_t k = 0; k < t->work->count; k++) {
    const LaneCopy *copy = (const LaneCopy *)(void *)t->work->queues[k].first;
    left += copy->work.kind == WORK_LANE_COPY && copy->copies == copies && copy->lanes >> lane & 1;
  }
  arrival->left = left;
  if (!wrong && left) work_hold(t->work, &arrival->work, size);
  else if (!wrong) wrong = work_submit(t->work, &arrival->work, size);
  free(arrival);
  return !wrong;
}

// On the mbarriers a; FLAG: their counts expect the arrivals (.noinc).
static const Instruction *run_copies_arrive(const Instruction *i, uint8_t *s, Machine *m) {
  Tables *t = m->tables;
  t->place = place_of(i);
  t->progress++;
  LaneCopies *copies = copies_of(s, m);
  const u32 *a = (const u32 *)(const void *)(s + i->a);
  if (!copies || !takes_logs(t)) return leave(m, ERROR);
  for (uint32_t left = m->active; left; left &= left - 1) {
    int lane = __builtin_ctz(left);
    if (!arrive(i, s, t, copies, lane, a[i->c & ROWS_A ? lane : 0])) return leave(m, ERROR);
  }
  return i + 1;
}

const Operation copy_operations[] = {
    {"copy_lanes", run_copy_lanes, 0}, {"copies_commit", run_copies_commit, 0}, {"copies_wait", run_copies_wait, 0},
    {"copies_arrive", run_copies_arrive, 0}, {0, 0, 0},
};
