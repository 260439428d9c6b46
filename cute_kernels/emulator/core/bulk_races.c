// What the race detector makes of bulk copies: what they access is compared with earlier accesses when they are issued, in
// the order of the program; what their completion passes on.
#include <stdlib.h>
#include <string.h>

#include "bulk_copies.h"

// What a copy does to shared or to global memory; its issuer is the warp that runs.
static Access access_of(const Tables *t, const BulkCopy *copy, int write, int global, int64_t identity) {
  const Context *context = t->context;
  const Agent *agent = context->agent;
  int fenced = write ? !global && agent->strict : 1;
  return (Access){
      .write = write, .strong = write && context->epochs->kinds[identity >> LANE_BITS] == STRONG, .grain = GRANULE,
      .known = agent_row(agent, write ? ROW_ACQUIRED : ROW_VISIBLE), .width = agent->width, .own = agent->base,
      .lane = copy->lane, .exempt = write ? agent->base + COLUMN_READ : -1,
      .cluster = global ? context->cluster : 0, .epochs = context->epochs, .identity = identity,
      .fenced = fenced ? agent_row(agent, global ? ROW_PROXY_GLOBAL : ROW_PROXY) : NULL,
      .read_column = write ? 0 : context->epochs->columns[identity >> LANE_BITS], .single = agent->single,
      // Who read a stage came after the copy that filled it, and says more than that one.
      .check = write ? ACCESS_READS_FIRST : ACCESS_WRITES_FIRST, .instruction = -1, .issuer = agent,
  };
}

static int races(Tables *t, const Access *access) {
  if (!access->rows || !access->count || access_whole(access, t->context->ask, NULL)) return 0;
  return stops(t, RACE_RAISED);
}

static int races_in_shared(
    Tables *t, const BulkCopy *copy, int64_t address, const Pieces *pieces, int write, int64_t identity) {
  Access access = access_of(t, copy, write, 0, identity);
  int64_t rank = address >> RANK_SHIFT;
  access.shadow = t->context->all_shared[rank];
  access.offsets = pieces->offsets;
  access.rows = pieces->count;
  access.count = pieces->nbytes;
  if (races(t, &access)) return 1;
  return !write && rank != t->context->agent->rank && asks(t, BULK_ELSEWHERE, copy, .bulk.cta = rank, .bulk.identity = identity);
}

// The first region that has a range; one behind the last: none.
static int64_t region_of_range(const LaunchRegions *all, uint64_t start, uint64_t nbytes) {
  int64_t i = 0;
  while (i < all->count && !is_within(start, nbytes, all->regions[i].start, all->regions[i].end)) i++;
  return i;
}

static int races_in_global(Tables *t, const BulkCopy *copy, const Rows *rows, int write, int64_t identity) {
  const LaunchRegions *all = t->context->launch;
  Access access = access_of(t, copy, write, 1, identity);
  access.count = rows->end - rows->first;
  if (!rows->count) return 0;
  int64_t only = region_of_range(all, rows->low, rows->span), *starts = rows->starts;
  if (only == all->count) starts = malloc((size_t)rows->count * sizeof *starts);
  int wrong = 0;
  for (int64_t r = 0; r < all->count && !wrong; r++) {
    const LaunchRegion *region = &all->regions[r];
    if ((only < all->count && r != only) || !region->writable) continue;
    access.rows = only < all->count ? rows->count : 0;
    for (int64_t i = 0; i < rows->count && only == all->count; i++)
      if (region_of_range(all, (uint64_t)rows->starts[i], (uint64_t)access.count) == r)
        starts[access.rows++] = rows->starts[i];
    access.offsets = starts;
    access.shadow = region->tracked;
    access.origin = region->origin;
    wrong = races(t, &access);
  }
  if (starts != rows->starts) free(starts);
  return wrong;
}

// The number of a copy's name; -1: there is none, Python has raised.
static int64_t name_of(Tables *t, const BulkCopy *copy) {
  const int64_t key[NAME_KEY] = {
      2 * copy->kind + (copy->rank != 0) + 1, copy->nbytes, copy->shared, copy->signal, copy->work.warp};
  int64_t slot = key_slot(key, NAME_KEY, NAMES);
  for (; t->names[slot].key[0]; slot = (slot + 1) % NAMES)
    if (!memcmp(t->names[slot].key, key, sizeof key)) return t->names[slot].text;
  if (asks(t, BULK_NAME, copy)) return -1;
  if (t->name_count == MOST_NAMES) return t->fault.bulk.text;
  t->name_count++;
  memcpy(t->names[slot].key, key, sizeof key);
  return t->names[slot].text = t->fault.bulk.text;
}

// An epoch of a copy; 0: Python has raised.
static int64_t epoch_of(Tables *t, const BulkCopy *copy, int64_t column, int64_t clock, int kind) {
  int64_t text = name_of(t, copy);
  return text < 0 ? 0 : work_epoch(t, &copy->work, column, clock, text, kind);
}

int races_to_cta(Tables *t, BulkCopy *copy, int first) {
  Agent *agent = t->context->agent;
  const Barrier *barrier = barrier_at(t, copy->signal);
  if (!barrier || !barrier->point) return stops(t, NOT_LIVE, .barrier = {COMPLETE_TX, copy->signal});
  const Point *point = barrier->point;
  if (point->init_clock && !is_initialised(agent, point) &&
      asks(t, BULK_INIT_ORDER, copy, .bulk.column = point->init_column, .bulk.clock = point->init_clock))
    return 1;
  if (leaves_cta(t, copy->shared, pieces_span(copy, copy->shared & OFFSET_MASK))) return 1;
  copy->identity = epoch_of(t, copy, point->column, NEVER, copy->reduction ? STRONG : 0);
  if (!copy->identity) return 1;
  copy->epochs = t->context->epochs;
  agent_order(agent, (uint32_t)1 << copy->lane);  // what is known to be over when the copy is
  memcpy(copy->order, agent->scratch, (size_t)copy->width * sizeof *copy->order);
  agent_advance(agent);
  Pieces pieces = pieces_of(copy, copy->shared & OFFSET_MASK, NULL);
  int wrong = races_in_shared(t, copy, copy->shared, &pieces, 1, copy->identity);
  free(pieces.offsets);
  if (wrong) return 1;
  if (copy->kind == BULK_SEND) {
    pieces = pieces_of(copy, copy->other & OFFSET_MASK, NULL);
    wrong = leaves_cta(t, copy->other, copy->nbytes) ||
            races_in_shared(t, copy, copy->other, &pieces, 0, copy->identity);
    free(pieces.offsets);
  } else if (first || !copy->rank) {
    Rows rows = rows_of(copy, 0);
    wrong = (copy->rank && leaves_global(t, copy, &rows, 0)) || races_in_global(t, copy, &rows, 0, copy->identity);
    rows_free(&rows);
  }
  return wrong;
}

int pass_on(Tables *t, const BulkCopy *copy) {
  const Barrier *barrier = barrier_at(t, copy->signal);
  if (!copy->identity || !barrier || !barrier->point) return 0;
  Point *point = barrier->point;
  copy->epochs->clocks[copy->identity >> LANE_BITS] = (int32_t)point->completed + 1;
  clocks_join(point->gathered, copy->order, copy->width);
  point_copied(point, copy->shared >> RANK_SHIFT ^ copy->signal >> RANK_SHIFT, copy->identity);
  if (copy->map_column < 0) return 0;
  clocks_raise(point->gathered, point->width, ROW_TENSOR, copy->map_column, copy->map_clock);
  return !point_add_stream(point, copy->map_column) &&
         stops(t, ADD_STREAM, .barrier = {.address = copy->signal, .column = copy->map_column});
}

int races_of_store(Tables *t, BulkCopy *copy, const Pieces *source, const Rows *target) {
  const BulkThread *thread = copy->thread;
  // Bytes that .cp_mask leaves out may be another thread's: like reductions, such stores do not race.
  int shares = copy->reduction || copy->mask >= 0;
  int64_t reads = epoch_of(t, copy, thread->reads, copy->group, 0);
  int64_t writes = reads ? epoch_of(t, copy, thread->writes, copy->group, shares ? STRONG : 0) : 0;
  copy->identity = reads;
  return !writes || races_in_shared(t, copy, copy->shared, source, 0, reads) ||
         (copy->rank && leaves_global(t, copy, target, 1)) || races_in_global(t, copy, target, 1, writes) ||
         (copy->rank && copy->map.changes && asks(t, BULK_MAP_READ, copy));
}
