// Shadow memory: whether every place of an access is in order at once, and its record. conflicts.c has all cases.
//
// Any access that is not in order, or that needs a plane or more layers of readers than there is room for, leaves
// everything as it is but for granules that are split into bytes, which says the same.
#include <stddef.h>
#include <string.h>

#include "races.h"
#include "vectors.h"

// What a check found in order is not looked up again: a write, a read that a write meets, a reader of the first layer
// that a read replaces.
typedef struct {
  int32_t write, read, layer;
} Met;
typedef enum { CHECK, WRITE, READ } Action;

int64_t new_epoch(Epochs *epochs, int64_t column, int64_t clock, int64_t text, int kind, int64_t instruction) {
  int64_t number = epochs->count++;
  epochs->columns[number] = (int32_t)column;
  epochs->clocks[number] = (int32_t)clock;
  epochs->kinds[number] = (uint8_t)kind;
  epochs->texts[number] = (int32_t)text;
  epochs->instructions[number] = (int32_t)instruction;
  epochs->clusters[number] = (int32_t)epochs->cluster;
  return number << LANE_BITS;
}

int is_ordered(
    const Access *access, int32_t id, const int32_t *known, int64_t own, int64_t lane, int64_t exempt, int strong) {
  if (!id) return 1;
  int64_t number = id >> LANE_BITS;
  const Epochs *epochs = access->epochs;
  if (access->cluster && epochs->clusters[number] != access->cluster) return 0;
  int64_t column = epochs->columns[number] + (id & (LANES - 1));
  if (column < 0 || column >= access->width) return 0;
  if (epochs->clocks[number] <= known[column] || column == exempt) return 1;
  if (exempt >= 0 && own >= 0 && column - own == COLUMN_LOADS) return 1;
  if (own >= 0 && lane >= 0 && column - own == lane) return 1;
  return strong && epochs->kinds[number] == STRONG;
}

int64_t layer_of(const Access *access, const Plane *plane, int64_t place) {
  const Epochs *epochs = access->epochs;
  for (int64_t n = 0; n < plane->layer_count; n++) {
    int32_t id = plane->layers[n][place];
    if (!id) return n;
    int64_t number = id >> LANE_BITS, column = epochs->columns[number];
    if (column == access->read_column) return n;
    if (!access->read_known || column < 0 || column >= access->width) continue;
    if (epochs->clocks[number] <= access->read_known[column]) return n;
  }
  return plane->layer_count < plane->room ? plane->layer_count : -1;
}

int of_other_cluster(const Access *access, int32_t id) {
  return id && access->cluster && access->epochs->clusters[id >> LANE_BITS] != access->cluster;
}

// The first index from `start` on where the array is not `id`, or `end`.
static int64_t differs(const int32_t *array, int64_t start, int64_t end, int32_t id) {
  Ints ids = (Ints){0} + id;
  int64_t at = start;
  for (; at + 2 * WORDS <= end; at += 2 * WORDS)
    if (any((*(const Ints *)(array + at) ^ ids) | (*(const Ints *)(array + at + WORDS) ^ ids))) break;
  while (at < end && array[at] == id) at++;
  return at;
}

static void fill(int32_t *array, int64_t start, int64_t end, int32_t id) {
  for (int64_t at = start; at < end; at++) array[at] = id;
}

// A replaced read of another cluster is noted where none is yet.
static void keep(const Access *access, const Plane *plane, int64_t start, int64_t end, int32_t id) {
  if (!of_other_cluster(access, id)) return;
  for (int64_t at = start; at < end; at++) plane->foreign[at] = plane->foreign[at] ? plane->foreign[at] : id;
}

static int is_fenced(const Access *access, int32_t id) {
  if (!access->fenced || (access->write && !access->epochs->kinds[id >> LANE_BITS])) return 1;
  return is_ordered(access, id, access->fenced, -1, -1, -1, 0);
}

static int written_before(
    const Access *access, const Plane *plane, int64_t start, int64_t end, int64_t lane, Met *met) {
  for (int64_t at = start; (at = differs(plane->writes, at, end, met->write)) < end; at++) {
    int32_t id = plane->writes[at];
    if (access->unwritten && id >> LANE_BITS >= access->unwritten) return 0;
    if (!is_ordered(access, id, access->known, access->own, lane, access->exempt, access->strong != 0)) return 0;
    if (!is_fenced(access, id)) return 0;
    met->write = id;
  }
  return 1;
}

static int check_run(const Access *access, const Plane *plane, int64_t start, int64_t count, int64_t lane, Met *met) {
  int64_t end = start + count;
  if (start < 0 || end > plane->places) return 0;
  if (!written_before(access, plane, start, end, lane, met)) return 0;
  if (access->write) {
    for (int64_t n = 0; n < plane->layer_count; n++) {
      const int32_t *reads = plane->layers[n];
      for (int64_t at = start; (at = differs(reads, at, end, met->read)) < end; at++) {
        int32_t id = reads[at];
        if (!is_ordered(access, id, access->known, access->own, lane, access->exempt, access->strong != 0)) return 0;
        if (!is_fenced(access, id)) return 0;
        met->read = id;
      }
    }
    return !plane->foreign || differs(plane->foreign, start, end, 0) == end;
  }
  if (!plane->layer_count) return plane->room > 0;
  // What was met in another plane may need foreign reads, which this plane has to have.
  if (!plane->foreign && of_other_cluster(access, met->layer)) met->layer = 0;
  for (int64_t at = start; (at = differs(plane->layers[0], at, end, met->layer)) < end; at++) {
    int64_t n = layer_of(access, plane, at);
    if (n < 0) return 0;
    int32_t id = plane->layers[n][at];
    if (!plane->foreign && of_other_cluster(access, id)) return 0;
    if (!n) met->layer = id;
  }
  return 1;
}

static void write_run(const Plane *plane, int64_t start, int64_t count, int32_t id) {
  fill(plane->writes, start, start + count, id);
  for (int64_t n = 0; n < plane->layer_count; n++) fill(plane->layers[n], start, start + count, 0);
}

static void read_run(const Access *access, Plane *plane, int64_t start, int64_t count, int32_t id, Met *met) {
  if (!plane->layer_count) plane->layer_count = 1;
  int32_t *top = plane->layers[0];
  int64_t from = start, end = start + count;
  for (;;) {
    int64_t at = differs(top, from, end, met->layer);
    keep(access, plane, from, at, met->layer);
    fill(top, from, at, id);
    if (at == end) return;
    int64_t n = layer_of(access, plane, at);
    if (n == plane->layer_count) plane->layer_count++;
    int32_t *read = &plane->layers[n][at];
    keep(access, plane, at, at + 1, *read);
    if (!n) met->layer = *read;
    *read = id;
    from = at + 1;
  }
}

static inline int run(
    const Access *access, Action action, Plane *plane, int64_t start, int64_t count, int64_t lane, int32_t id,
    Met *met) {
  if (action == CHECK) return check_run(access, plane, start, count, lane, met);
  if (action == WRITE) write_run(plane, start, count, id);
  else read_run(access, plane, start, count, id, met);
  return 1;
}

static void divide_plane(int32_t *bytes, const int32_t *granules, int64_t granule) {
  fill(bytes, granule * GRANULE, (granule + 1) * GRANULE, granules[granule]);
}

int divide_granule(Shadow *shadow, int64_t granule) {
  const Plane *from = &shadow->coarse;
  Plane *to = &shadow->fine;
  if (to->room < from->layer_count || (from->foreign && !to->foreign)) return 0;
  if (to->layer_count < from->layer_count) to->layer_count = from->layer_count;
  shadow->split[granule] = 1;
  divide_plane(to->writes, from->writes, granule);
  for (int64_t n = 0; n < from->layer_count; n++) divide_plane(to->layers[n], from->layers[n], granule);
  if (from->foreign) divide_plane(to->foreign, from->foreign, granule);
  return 1;
}

// One row of an access: which places of which plane it has, and what is done there.
static int row(const Access *access, Action action, int64_t start, int64_t lane, int32_t id, Met *met) {
  Shadow *shadow = access->shadow;
  int64_t count = access->count;
  if (access->grain == 1) return run(access, action, &shadow->coarse, start, count, lane, id, met);
  int64_t first = start >> 4, last = (start + count - 1) >> 4;
  if (start < 0 || last >= shadow->coarse.places) return 0;
  if ((start | count) & (GRANULE - 1)) {
    if (!shadow->fine.writes) return 0;
    for (int64_t granule = first; granule <= last; granule++)
      if (!shadow->split[granule] && !divide_granule(shadow, granule)) return 0;
    return run(access, action, &shadow->fine, start, count, lane, id, met);
  }
  if (!shadow->split) return run(access, action, &shadow->coarse, first, count >> 4, lane, id, met);
  for (int64_t granule = first, next; granule <= last; granule = next) {
    next = granule + 1;
    int done;
    if (shadow->split[granule]) {
      done = run(access, action, &shadow->fine, granule * GRANULE, GRANULE, lane, id, met);
    } else {
      const uint8_t *split = memchr(shadow->split + next, 1, (size_t)(last + 1 - next));
      next = split ? split - shadow->split : last + 1;
      done = run(access, action, &shadow->coarse, granule, next - granule, lane, id, met);
    }
    if (!done) return 0;
  }
  return 1;
}

// Rows of one or two whole granules that all lie inside the first plane: most operands of MMAs.
static int is_short(const Access *access) {
  const Plane *plane = &access->shadow->coarse;
  if (access->write || access->grain != GRANULE || !plane->layer_count || access->lanes || access->cluster) return 0;
  if (!access->offsets || access->origin || (access->count != GRANULE && access->count != 2 * GRANULE)) return 0;
  int64_t any = 0, low = 0, high = 0;
  for (int64_t i = 0; i < access->rows; i++) {
    int64_t start = access->offsets[i];
    any |= start;
    low = start < low ? start : low;
    high = start > high ? start : high;
  }
  return !(any & (GRANULE - 1)) && low == 0 && high / GRANULE + 1 < plane->places;
}

// What such a read meets in the layers down to the one that it replaces: at most one reader that stays.
typedef struct {
  int64_t depth;
  int32_t held[2];
} Layers;

static Layers layers_at(const Access *access, int64_t place) {
  const Plane *plane = &access->shadow->coarse;
  Layers found = {.depth = layer_of(access, plane, place)};
  for (int64_t n = 0; n <= found.depth && n < 2; n++) found.held[n] = plane->layers[n][place];
  return found;
}

// Checks and records rows from `i` on whose granules have a history that was met before, up to the first that has not.
static inline int64_t read_alike(
    const Access *access, int64_t i, int32_t id, int32_t write, const Layers *met, int depth) {
  const Shadow *shadow = access->shadow;
  int64_t second = access->count / GRANULE - 1;
  int32_t *top = shadow->coarse.layers[0], *own = shadow->coarse.layers[depth], held = met->held[0], old = met->held[depth];
  const int32_t *writes = shadow->coarse.writes;
  for (; i < access->rows; i++) {
    int64_t first = access->offsets[i] / GRANULE, last = first + second;
    int32_t differ = (own[first] ^ old) | (own[last] ^ old) | (writes[first] ^ write) | (writes[last] ^ write);
    if (depth) differ |= (top[first] ^ held) | (top[last] ^ held);
    if (shadow->split) differ |= shadow->split[first] | shadow->split[last];
    if (differ) break;
    own[first] = own[last] = id;
  }
  return i;
}

static int rows(const Access *access, Action action) {
  Met met = {0, 0, 0};
  for (int64_t i = 0; i < access->rows; i++) {
    int64_t start = access->offsets ? access->offsets[i] - access->origin : access->base + i * access->stride;
    int64_t lane = access->lane;
    if (access->lanes) {
      lane = access->lanes[i];
      met.write = met.read = 0;  // what is in order for one lane need not be for the next one
    }
    int32_t id = (int32_t)(access->identity + (access->add_lanes && lane >= 0 ? lane : 0));
    if (!row(access, action, start, lane, id, &met)) return 0;
  }
  return 1;
}

int access_check(const Access *access) { return rows(access, CHECK); }

// Which bytes of global memory have been accessed. Tensor memory has no shadow but its plane.
void access_note(const Access *access) {
  Shadow *shadow = access->shadow;
  if (access->grain != GRANULE || shadow->high < 0) return;
  // In registers and without branches, so that the lanes of a warp are compared by vector instructions.
  int64_t first = INT64_MAX, last = INT64_MIN;
  for (int64_t i = 0; i < access->rows; i++) {
    int64_t start = access->offsets ? access->offsets[i] - access->origin : access->base + i * access->stride;
    first = start < first ? start : first;
    last = start > last ? start : last;
  }
  if (access->rows > 0 && first < shadow->low) shadow->low = first;
  if (access->rows > 0 && last + access->count > shadow->high) shadow->high = last + access->count;
}

void access_record(const Access *access) {
  access_note(access);
  rows(access, access->write ? WRITE : READ);
}

// Rows before one that is not in order are recorded already; they are so again, under the same identity.
int access_pipelined(const Access *access) {
  Met met = {0, 0, 0};
  int32_t id = (int32_t)access->identity;
  if (!is_short(access)) {
    if (!access_check(access)) return 0;
    access_record(access);
    return 1;
  }
  for (int64_t i = 0; i < access->rows;) {
    Layers layers = layers_at(access, access->offsets[i] / GRANULE);
    if (!row(access, CHECK, access->offsets[i], access->lane, id, &met)) return 0;
    row(access, READ, access->offsets[i++], access->lane, id, &met);
    if (layers.depth == 0) i = read_alike(access, i, id, met.write, &layers, 0);
    if (layers.depth == 1) i = read_alike(access, i, id, met.write, &layers, 1);
  }
  return 1;
}
