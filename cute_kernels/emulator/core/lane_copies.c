// cp.async: copies of single lanes from global to shared memory, complete when they are issued, and their groups.
//
// `CopyUnit` (units/copies/cp_async.py) has the general case, and words what is wrong; the race detector sees a copy as
// `RaceTracker.copies_by_lanes` and its reads as loads of the warp.
#include "accesses.h"
#include "meter.h"
#include "races.h"

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

static int watch(
    const Context *context, const LaneCopies *copies, const Lanes *targets, const Lanes *sources, int64_t nbytes,
    int32_t instruction) {
  Agent *agent = context->agent;
  Access write = access_of(context, 1, targets->addresses, targets->count, nbytes);
  Access read = access_of(context, 0, sources->addresses, sources->count, nbytes);
  write.shadow = context->shadow;
  write.origin = agent->rank << RANK_SHIFT;
  write.lanes = targets->lanes;
  if (one_place(targets) || !has_room(context->epochs, 2)) return 0;
  if (sources->count && !region_access(context, sources, nbytes, &read)) return 0;
  if (!access_check(&write) || (read.shadow && !access_check(&read))) return 0;
  write.identity =
      new_epoch(context->epochs, copies->column, copies->issued + 1, copies->text, GENERIC, instruction);
  access_record(&write);
  if (!read.shadow) return 1;
  if (!agent->read_identity)
    agent->read_identity = new_epoch(
        context->epochs, agent->base + COLUMN_READ, agent->clock, agent->text, GENERIC, instruction);
  read.identity = agent->read_identity;
  access_record(&read);
  return 1;
}

// Places in global memory: whether each lane reads what a region has. Lanes that read nothing need none.
static int find_sources(const Tables *t, const Lanes *sources, const int64_t *counts) {
  for (int i = 0; i < sources->count; i++) {
    uint64_t start = (uint64_t)sources->addresses[i];
    if (!region_of(t, start, start + (uint64_t)counts[sources->lanes[i]], 0)) return 0;
  }
  return 1;
}

int32_t copy_by_lanes(
    Tables *t, LaneCopies *copies, const int64_t *addresses, const int64_t *from, const int64_t *counts, uint32_t mask,
    int64_t nbytes, int32_t instruction) {
  Lanes targets, sources;
  uint32_t reading = 0;
  int64_t bits = 0, wrong = 0;
  if (!(t->unit_flags & EAGER) || t->trace || !mask) return 0;
  for (uint32_t lanes = mask; lanes; lanes &= lanes - 1) {
    int lane = __builtin_ctz(lanes);
    wrong |= counts[lane] < 0 || counts[lane] > nbytes || addresses[lane] >> RANK_SHIFT != addresses[__builtin_ctz(mask)] >> RANK_SHIFT;
    bits |= from[lane];
    if (counts[lane]) reading |= (uint32_t)1 << lane;
  }
  if (wrong || bits & (nbytes - 1)) return 0;
  targets.count = take_lanes(mask, addresses, targets.addresses, targets.lanes);
  sources.count = take_lanes(reading, from, sources.addresses, sources.lanes);
  if (!find_shared(t, &targets, 1, nbytes) || !find_sources(t, &sources, counts)) return 0;
  if (t->context) {
    if (targets.addresses[0] >> RANK_SHIFT != t->context->agent->rank || !log_flush(t)) return 0;
    if (!watch(t->context, copies, &targets, &sources, nbytes, instruction)) return 0;
  }
  if (t->meter) {
    meter_access(t, addresses, mask, instruction, 1, 1, nbytes);
    if (reading) meter_access(t, from, reading, instruction, 0, 0, nbytes);
  }
  copies->issued++;
  t->progress++;
  for (int i = 0; i < targets.count; i++) {
    int64_t lane = targets.lanes[i];
    memcpy(targets.data[i], (const void *)(uintptr_t)from[lane], (size_t)counts[lane]);
    memset(targets.data[i] + counts[lane], 0, (size_t)(nbytes - counts[lane]));
  }
  if (t->flags & STATES) mark_data(&targets, nbytes);
  return 1;
}

void copies_commit(LaneCopies *copies) {
  copies->ends[copies->groups++ % COPY_GROUPS] = copies->issued;
}

int64_t copies_before(const LaneCopies *copies, int64_t newest, int32_t every) {
  if (every) return copies->issued;
  return copies->groups > newest ? copies->ends[(copies->groups - 1 - newest) % COPY_GROUPS] : 0;
}

int32_t copies_wait(Tables *t, const LaneCopies *copies, int64_t newest, int32_t every) {
  if (!(t->unit_flags & EAGER)) return 0;
  if (!t->context) return 1;
  if (!log_flush(t)) return 0;
  Agent *agent = t->context->agent;
  clocks_raise(agent->clocks, agent->width, ROW_PROXY, copies->column, copies_before(copies, newest, every));
  agent->changes++;
  return 1;
}
