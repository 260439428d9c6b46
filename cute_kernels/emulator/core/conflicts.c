// Every access as the race detector sees it, place by place: the earlier accesses that are not ordered before it, and its
// record. happens_before.py has the clocks, shadow.py the places; checks.py words what is late.
//
// shadow.c is asked first: nearly every access is in order at once, and needs no more room than there is.
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "races.h"

// An access, and the places of it that are looked at together: of one plane.
typedef struct {
  const Access *access;
  Ask *ask;
  const LogEntry *entry;
  Plane *plane;
  int64_t unit, count;
  int64_t *places, *lanes;
  int32_t *before;
  uint8_t *late;
} Part;

// Who looks.
typedef struct {
  const int32_t *known;
  int64_t own, exempt;
  int strong;
} View;

static int ask(const Part *part, int32_t what, Conflict *more) {
  more->access = part->access;
  more->unit = part->unit;
  more->count = part->count;
  more->places = part->places;
  more->lanes = part->lanes;
  more->before = part->before;
  more->late = part->late;
  more->entry = part->entry;
  return part->ask(what, more);
}

// --- what is late ----------------------------------------------------------------------------------------------------

// 1 if an earlier access is not ordered before one by a lane; -1: Python has raised.
static int is_late(const Part *part, int32_t id, int64_t lane, const View *view) {
  const Access *access = part->access;
  const Epochs *epochs = access->epochs;
  int64_t number = id >> LANE_BITS;
  if (view->strong && epochs->kinds[number] == STRONG) return 0;
  if (is_ordered(access, id, view->known, view->own, lane, view->exempt, 0)) return 0;
  if (of_other_cluster(access, id)) {
    Conflict abroad = {.known = view->known, .identity = id};
    if (ask(part, RACE_ABROAD, &abroad)) return -1;
    if (abroad.answer) return 0;
  }
  const Private *single = of_other_cluster(access, id) ? NULL : access->single;
  for (int64_t i = 0; single && i < single->count; i++) {
    const PrivateClock *known = &single->entries[i];
    if (known->column == epochs->columns[number] && epochs->clocks[number] <= known->clock && known->lane == lane)
      return 0;
  }
  return 1;
}

// Python is asked about the same instructions so often, as what it reports depends on more than them.
enum { ENOUGH = 16 };

// What Python tells apart of an earlier access: whether it is of the same warp, of another cluster, or known though not
// well enough.
static uint64_t relation_of(const Access *access, int32_t id) {
  const Epochs *epochs = access->epochs;
  int64_t number = id >> LANE_BITS, first = epochs->columns[number], column = first + (id & (LANES - 1));
  if (of_other_cluster(access, id)) return 1;
  const int32_t *order = access->known + (ROW_ORDER - ROW_VISIBLE) * access->width;
  int known = column >= 0 && column < access->width && epochs->clocks[number] <= order[column];
  return (uint64_t)(first >= access->own && first < access->own + LANES) << 1 | (uint64_t)known << 2;
}

// Words for late accesses, as `ask`.
static int tell(const Part *part, int32_t what, Conflict *conflict) {
  const Access *access = part->access;
  Epochs *epochs = access->epochs;
  int64_t number = conflict->identity >> LANE_BITS;
  if (access->instruction <= 0) return ask(part, what, conflict);  // of an asynchronous operation
  uint64_t facts = (uint64_t)what << 6 | relation_of(access, (int32_t)conflict->identity) << 3 |
                   (uint64_t)epochs->kinds[number] << 1 | (conflict->wrote != 0);
  uint64_t earlier = (uint64_t)(epochs->instructions[number] + 1), later = (uint64_t)access->instruction;
  uint64_t key = (facts << 48 ^ later << 24 ^ earlier) + (uint64_t)access->cluster * 0xD1B54A32D192ED03;
  Repeat *repeat = &epochs->races[key * 0x9E3779B97F4A7C15 >> 58];
  if (repeat->key == key && repeat->count >= ENOUGH) return 0;
  if (ask(part, what, conflict)) return 1;
  *repeat = (Repeat){key, repeat->key == key ? repeat->count + 1 : 1};
  return 0;
}

// Tells Python if any of the earlier accesses `before` is late; nonzero: it has raised.
static int compare(Part *part, const View *view, int32_t what, int wrote) {
  int32_t id = 0;
  int64_t lane = -1, first = 0;
  int late = 0;
  for (int64_t i = 0; i < part->count; i++) {
    if (part->before[i] != id || part->lanes[i] != lane) {
      id = part->before[i];
      lane = part->lanes[i];
      late = id ? is_late(part, id, lane, view) : 0;
      if (late < 0) return 1;
    }
    part->late[i] = (uint8_t)late;
    if (late && !first) first = id;
  }
  Conflict conflict = {.wrote = wrote, .identity = first};
  return first && tell(part, what, &conflict);
}

static void take(Part *part, const int32_t *array) {
  for (int64_t i = 0; i < part->count; i++) part->before[i] = array[part->places[i]];
}

// All that a write has to be ordered after but earlier writes.
static int compare_readers(Part *part, const View *view) {
  for (int64_t n = 0; n < part->plane->layer_count; n++) {
    take(part, part->plane->layers[n]);
    if (compare(part, view, RACE_LATE, 0)) return 1;
  }
  if (!part->plane->foreign) return 0;
  take(part, part->plane->foreign);
  return compare(part, view, RACE_LATE, 0);
}

// Strictly, what was accessed through the generic proxy is fenced before an operation writes there.
static int compare_fenced(Part *part, const View *view) {
  for (int64_t n = -1; n < part->plane->layer_count; n++) {
    take(part, n < 0 ? part->plane->writes : part->plane->layers[n]);
    for (int64_t i = 0; i < part->count; i++)
      if (!part->access->epochs->kinds[part->before[i] >> LANE_BITS]) part->before[i] = 0;
    if (compare(part, view, RACE_UNFENCED, n < 0)) return 1;
  }
  return 0;
}

// ld.global.nc is for memory that nobody writes while the kernel runs.
static int compare_unwritten(Part *part) {
  int64_t first = 0;
  for (int64_t i = 0; i < part->count; i++) {
    part->late[i] = part->before[i] >> LANE_BITS >= part->access->unwritten;
    if (part->late[i] && !first) first = part->before[i];
  }
  Conflict conflict = {.wrote = 1, .identity = first};
  return first && tell(part, RACE_UNWRITTEN, &conflict);
}

// What order alone does not decide: each rule is a file, and looks at writes.
static const Rule *const RULES[] = {&strong_stores};
enum { RULE_COUNT = sizeof RULES / sizeof *RULES };

static int has_rule(const Access *access) {
  for (int n = 0; n < RULE_COUNT; n++)
    if (RULES[n]->looks_at(access)) return 1;
  return 0;
}

// The last writes that a rule forbids are late unless the access is ordered after them, strong or not.
static int compare_by_rules(Part *part) {
  const Access *access = part->access;
  const View view = {access->known, access->own, access->exempt, 0};
  for (int n = 0; n < RULE_COUNT; n++) {
    if (!RULES[n]->looks_at(access)) continue;
    take(part, part->plane->writes);
    for (int64_t i = 0; i < part->count; i++)
      if (!RULES[n]->forbids(access, part->plane, part->places[i])) part->before[i] = 0;
    if (compare(part, &view, RACE_LATE, 1)) return 1;
  }
  return 0;
}

static int compare_all(Part *part) {
  const Access *access = part->access;
  const View view = {access->known, access->own, access->exempt, access->strong != 0};
  const View fenced = {access->fenced, -1, -1, 0};
  if (access->check == ACCESS_UNCHECKED) return 0;
  if (access->check == ACCESS_READS_FIRST && compare_readers(part, &view)) return 1;
  take(part, part->plane->writes);
  if (compare(part, &view, RACE_LATE, 1)) return 1;
  if (!access->write) {
    if (access->unwritten && compare_unwritten(part)) return 1;
    return access->fenced && compare(part, &fenced, RACE_UNFENCED, 1);
  }
  if (access->fenced && compare_fenced(part, &fenced)) return 1;
  if (access->check == ACCESS_READS_FIRST) return 0;
  return compare_readers(part, &view) || compare_by_rules(part);
}

// --- the record ------------------------------------------------------------------------------------------------------

// More room, from Python. 0: it has raised.
static int make_room(const Part *part, int32_t what) {
  Conflict more = {0};
  return !ask(part, what, &more);
}

// Whether a read replaces another one: of the same column, or one that it is known to come after. A strong read replaces
// none that is not: a strong write races with that one alone.
static int replaces(const Access *access, int32_t id) {
  const Epochs *epochs = access->epochs;
  int64_t number = id >> LANE_BITS, column = epochs->columns[number];
  if (!id) return 1;
  if (epochs->kinds[access->identity >> LANE_BITS] == STRONG && epochs->kinds[number] != STRONG) return 0;
  if (column == access->read_column) return 1;
  return access->read_known && column >= 0 && column < access->width &&
         epochs->clocks[number] <= access->read_known[column];
}

static int record_read(const Part *part, int64_t place) {
  const Access *access = part->access;
  Plane *plane = part->plane;
  int64_t n = 0;
  while (n < plane->layer_count && !replaces(access, plane->layers[n][place])) n++;
  if (n == plane->room && !make_room(part, RACE_LAYER)) return 0;
  if (n == plane->layer_count) plane->layer_count++;
  int32_t old = plane->layers[n][place];
  if (of_other_cluster(access, old)) {
    if (!plane->foreign && !make_room(part, RACE_FOREIGN)) return 0;
    if (!plane->foreign[place]) plane->foreign[place] = old;
  }
  plane->layers[n][place] = (int32_t)access->identity;
  return 1;
}

static void record_write(const Part *part, int64_t place, int64_t lane) {
  const Access *access = part->access;
  Plane *plane = part->plane;
  plane->writes[place] = (int32_t)(access->identity + (access->add_lanes && lane > 0 ? lane : 0));
  for (int64_t n = 0; n < plane->layer_count; n++) plane->layers[n][place] = 0;
  if (plane->foreign) plane->foreign[place] = 0;
}

static int look_at(Part *part) {
  if (!part->count) return 1;
  if (compare_all(part)) return 0;
  for (int64_t i = 0; i < part->count; i++) {
    if (part->access->write) record_write(part, part->places[i], part->lanes[i]);
    else if (!record_read(part, part->places[i])) return 0;
  }
  return 1;
}

// --- places ----------------------------------------------------------------------------------------------------------

static int64_t start_of(const Access *access, int64_t row) {
  return access->offsets ? access->offsets[row] - access->origin : access->base + row * access->stride;
}

// There are planes by bytes, with room for what is known of granules. 0: Python has raised.
static int has_bytes(Part *part) {
  Shadow *shadow = part->access->shadow;
  part->plane = &shadow->fine;
  part->unit = 1;
  if (!shadow->fine.writes && !make_room(part, RACE_BYTES)) return 0;
  while (shadow->fine.room < shadow->coarse.layer_count)
    if (!make_room(part, RACE_LAYER)) return 0;
  return !shadow->coarse.foreign || shadow->fine.foreign || make_room(part, RACE_FOREIGN);
}

static void add(Part *part, int64_t place, int64_t lane) {
  if (place < 0 || place >= part->plane->places) return;  // the operation reports that when it takes effect
  part->places[part->count] = place;
  part->lanes[part->count++] = lane;
}

// All places of a plane: of tensor memory, by bytes, or by granules that are split (1) or are not (0).
enum { UNSPLIT, SPLIT, EVERYTHING };
static int look_at_plane(Part *part, int which) {
  const Access *access = part->access;
  const Shadow *shadow = access->shadow;
  part->count = 0;
  for (int64_t i = 0; i < access->rows; i++) {
    int64_t start = start_of(access, i), lane = access->lanes ? access->lanes[i] : access->lane;
    for (int64_t at = start; at < start + access->count; at += which == EVERYTHING ? 1 : GRANULE) {
      if (which == EVERYTHING) {
        add(part, at, lane);
        continue;
      }
      int64_t granule = at >> 4;
      int split = shadow->split && granule >= 0 && granule < shadow->coarse.places && shadow->split[granule];
      if (split != which) continue;
      if (which == UNSPLIT) add(part, granule, lane);
      for (int64_t byte = 0; which == SPLIT && byte < GRANULE; byte++) add(part, at + byte, lane);
    }
  }
  return look_at(part);
}

static int look_at_bytes(Part *part) {
  const Access *access = part->access;
  Shadow *shadow = access->shadow;
  if (!has_bytes(part)) return 0;
  for (int64_t i = 0; i < access->rows; i++)
    for (int64_t granule = start_of(access, i) >> 4; granule <= (start_of(access, i) + access->count - 1) >> 4; granule++)
      if (granule >= 0 && granule < shadow->coarse.places && !shadow->split[granule]) divide_granule(shadow, granule);
  return look_at_plane(part, EVERYTHING);
}

static int look_at_parts(Part *part) {
  const Access *access = part->access;
  int64_t bits = access->count;
  part->plane = &access->shadow->coarse;
  part->unit = access->grain == GRANULE ? GRANULE : 1;
  if (access->grain != GRANULE) return look_at_plane(part, EVERYTHING);
  for (int64_t i = 0; i < access->rows; i++) bits |= start_of(access, i);
  if (bits & (GRANULE - 1)) return look_at_bytes(part);
  if (access->shadow->split) {
    if (!has_bytes(part) || !look_at_plane(part, SPLIT)) return 0;
    part->plane = &access->shadow->coarse;
    part->unit = GRANULE;
  }
  return look_at_plane(part, UNSPLIT);
}

int access_whole(const Access *access, Ask *ask, const LogEntry *entry) {
  int special = access->strong && !access->write;  // its record is another one, see `replaces`
  if (access->check <= ACCESS_READS_FIRST && !special && !has_rule(access) && access_check(access)) {
    access_record(access);
    return 1;
  }
  size_t most = (size_t)(access->rows * access->count);
  Part part = {.access = access, .ask = ask, .entry = entry};
  part.places = malloc(most * (2 * sizeof(int64_t) + sizeof(int32_t) + 1) + 1);
  part.lanes = part.places + most;
  part.before = (int32_t *)(part.lanes + most);
  part.late = (uint8_t *)(part.before + most);
  access_note(access);
  int done = look_at_parts(&part);
  free(part.places);
  return done;
}

int32_t access_record_whole(const Access *access, void *callback) {
  Ask *ask;
  memcpy(&ask, &callback, sizeof ask);
  return access_whole(access, ask, NULL);
}

// --- loads and stores ------------------------------------------------------------------------------------------------

// Those of a `GenericAccess` to the memory of one CTA or region.
typedef struct {
  int64_t rank, count;  // -1: global memory
  const int64_t *addresses, *lanes;
  const LaunchRegion *region;
} Group;

static int64_t identity_of(
    const Context *context, const GenericAccess *generic, int whole, int by_lanes, int64_t column, const Part *part) {
  Agent *agent = context->agent;
  SpecialEpoch *special = NULL;
  int64_t *identity = generic->write ? &agent->write_identity : by_lanes ? &agent->loads_identity : &agent->read_identity;
  int64_t instruction = generic->write && generic->strong ? generic->instruction : -1;
  if (whole) special = &agent->special[generic->strong ? SPECIAL_WHOLE_STRONG : SPECIAL_WHOLE];
  else if (generic->strong)
    special = &agent->special[generic->write ? SPECIAL_STORE : by_lanes ? SPECIAL_LOADS : SPECIAL_READ];
  if (special) {
    identity = &special->identity;
    if (special->clock != agent->clock || special->instruction != instruction) *identity = 0;
    special->clock = agent->clock;
    special->instruction = instruction;
  }
  if (*identity) return *identity;
  if (!has_room(context->epochs, 1) && !make_room(part, RACE_EPOCHS)) return 0;
  int64_t text = agent->text + generic->write;
  *identity = new_epoch(
      context->epochs, column, agent->clock, text, generic->strong ? STRONG : GENERIC, generic->instruction);
  return *identity;
}

// Records the access if it is in order at once, as nearly all are, and needs no more room than there is.
static int is_at_once(
    const Context *context, const GenericAccess *generic, Access *access, int whole, int by_lanes, uint32_t mask) {
  int64_t places[LANES];
  if (generic->strong || whole || generic->identity || !has_room(context->epochs, 1)) return 0;
  Plane *plane = access->lanes && access->rows == LANES ? lanes_check(access, places) : NULL;
  if (!plane && !access_check(access)) return 0;
  if (by_lanes) agent_load_together(context->agent, mask);
  access->identity = identity_of(context, generic, 0, by_lanes, access->read_column, NULL);
  if (plane) lanes_record(access, plane, places, (int32_t)access->identity);
  else access_record(access);
  return 1;
}

static int group_whole(
    const Context *context, const GenericAccess *generic, const Group *group, Ask *ask_, const LogEntry *entry) {
  Agent *agent = context->agent;
  int global = group->rank < 0, write = generic->write != 0;
  int64_t differ = 0, own_reads = agent->base + COLUMN_READ, mask = generic->mask;
  for (int64_t i = 0; i < group->count; i++) differ |= group->addresses[i] ^ group->addresses[0];
  // Lanes that write one place together write the same value in every sound program: the warp's, not a lane's.
  int whole = write && generic->each && group->count > 1 && !differ;
  int by_lanes = !write && (generic->each ? group->count > 1 : generic->lane < 0);
  if (by_lanes && generic->each) {
    mask = 0;
    for (int64_t i = 0; i < group->count; i++) mask |= (int64_t)1 << group->lanes[i];
  }
  int64_t column = by_lanes ? agent->base + COLUMN_LOADS : write && !whole ? agent->base : own_reads;
  const uint8_t *non_coherent = context->launch->non_coherent;
  Access access = {
      .write = write, .strong = generic->strong, .grain = GRANULE, .offsets = group->addresses, .rows = group->count,
      .count = generic->nbytes, .known = agent_row(agent, ROW_VISIBLE), .width = agent->width, .own = agent->base,
      .lanes = generic->each && !whole ? group->lanes : NULL, .lane = whole ? -1 : generic->lane, .exempt = own_reads,
      .epochs = context->epochs, .identity = generic->identity, .add_lanes = write && !generic->identity,
      .read_column = column, .single = agent->single, .stores = context->launch->stores,
      .instruction = generic->instruction,
  };
  if (global) {
    access.shadow = group->region->tracked;
    access.origin = group->region->origin;
    access.cluster = context->cluster;
    if (!write && non_coherent && generic->instruction >= 0 && non_coherent[generic->instruction])
      access.unwritten = context->launch->first;
  } else {
    access.shadow = context->all_shared[group->rank];
    access.origin = group->rank << RANK_SHIFT;
    access.read_known = access.known;
  }
  if (generic->instruction < 0) access.stores = NULL;
  if (!is_at_once(context, generic, &access, whole, by_lanes, (uint32_t)mask)) {
    if (!ask_) return 0;
    const Part part = {.access = &access, .ask = ask_, .entry = entry};
    if (by_lanes) agent_load_together(agent, (uint32_t)mask);
    if (!access.identity) access.identity = identity_of(context, generic, whole, by_lanes, column, &part);
    if (!access.identity || !access_whole(&access, ask_, entry)) return 0;
  }
  if (global || group->rank == agent->rank) return 1;
  Conflict elsewhere = {
      .access = &access, .identity = group->rank, .count = group->count, .lanes = access.lanes, .wrote = write,
      .entry = entry,
  };
  return !ask_(RACE_ELSEWHERE, &elsewhere);
}

// The region that has a range, or null.
static const LaunchRegion *region_of_range(const LaunchRegions *launch, int64_t low, int64_t high) {
  for (int64_t i = 0; i < launch->count; i++)
    if (low >= launch->regions[i].start && high <= launch->regions[i].end) return &launch->regions[i];
  return NULL;
}

int generic_whole(const Context *context, const GenericAccess *generic, Ask *ask_, const LogEntry *entry) {
  const LaunchRegions *launch = context->launch;
  int64_t low = INT64_MAX, high = INT64_MIN, keys[LANES];
  for (int64_t i = 0; i < generic->count; i++) {
    low = generic->addresses[i] < low ? generic->addresses[i] : low;
    high = generic->addresses[i] > high ? generic->addresses[i] : high;
  }
  const LaunchRegion *all = generic->of_global ? region_of_range(launch, low, high + generic->nbytes) : NULL;
  int64_t rank = generic->of_global ? -1 : low >> RANK_SHIFT;
  if (all || (!generic->of_global && high >> RANK_SHIFT == rank)) {
    const Group group = {rank, generic->count, generic->addresses, generic->lanes, all};
    if (all && !all->writable) return 1;  // nobody may write there
    if (!ask_ && (generic->strong || (all ? !all->tracked : rank != context->agent->rank))) return 0;
    return group_whole(context, generic, &group, ask_, entry);
  }
  if (!ask_) return 0;
  for (int64_t i = 0; i < generic->count; i++) {
    int64_t address = generic->addresses[i];
    const LaunchRegion *region = region_of_range(launch, address, address + generic->nbytes);
    keys[i] = !generic->of_global ? address >> RANK_SHIFT : region ? region - launch->regions : -1;
  }
  for (int64_t last = -1;;) {  // group after group, in order of ranks or regions
    int64_t key = INT64_MAX, addresses[LANES], lanes[LANES];
    Group group = {.rank = -1, .addresses = addresses, .lanes = lanes};
    for (int64_t i = 0; i < generic->count; i++) key = keys[i] > last && keys[i] < key ? keys[i] : key;
    if (key == INT64_MAX) return 1;
    last = key;
    for (int64_t i = 0; i < generic->count; i++) {
      if (keys[i] != key) continue;
      addresses[group.count] = generic->addresses[i];
      lanes[group.count++] = generic->lanes[i];
    }
    if (generic->of_global) group.region = &launch->regions[key];
    else group.rank = key;
    if (generic->of_global && !group.region->writable) continue;  // nobody may write there
    if (!group_whole(context, generic, &group, ask_, entry)) return 0;
  }
}

int32_t generic_record_whole(const Context *context, const GenericAccess *generic, void *callback) {
  Ask *ask_;
  memcpy(&ask_, &callback, sizeof ask_);
  return generic_whole(context, generic, ask_, NULL);
}
