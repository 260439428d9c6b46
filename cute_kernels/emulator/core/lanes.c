// Shadow memory for what most loads and stores are: all lanes of a warp, whose places have one history.
//
// Each lane accesses 1 to 16 bytes, and what is known of these places is the same for all lanes: the last write is one
// access, or one store of a warp of which lane n wrote what lane n accesses now; the last readers are the same
// everywhere. Then one look decides for all lanes, and what is left is to compare their histories. Any other access is
// left as it is: shadow.c looks at every lane by itself.
#include <stddef.h>

#include "races.h"

static _Thread_local int64_t decided;

int64_t accesses_together(void) { return decided; }

// Whether the places of lane n, `unit` of them, have `first + n * step`.
static inline int alike_of(const int32_t *array, const int64_t *places, int unit, int32_t first, int32_t step) {
  int32_t any = 0;
  for (int lane = 0; lane < LANES; lane++)
    for (int i = 0; i < unit; i++) any |= array[places[lane] + i] ^ (first + lane * step);
  return !any;
}

static int alike(const int32_t *array, const int64_t *places, int64_t unit, int32_t first, int32_t step) {
  switch (unit) {
    case 1: return alike_of(array, places, 1, first, step);
    case 2: return alike_of(array, places, 2, first, step);
    case 4: return alike_of(array, places, 4, first, step);
    case 8: return alike_of(array, places, 8, first, step);
    default: return alike_of(array, places, 16, first, step);
  }
}

// Gives them that.
static inline void put_of(int32_t *array, const int64_t *places, int unit, int32_t first, int32_t step) {
  for (int lane = 0; lane < LANES; lane++)
    for (int i = 0; i < unit; i++) array[places[lane] + i] = first + lane * step;
}

static void put(int32_t *array, const int64_t *places, int64_t unit, int32_t first, int32_t step) {
  switch (unit) {
    case 1: put_of(array, places, 1, first, step); return;
    case 2: put_of(array, places, 2, first, step); return;
    case 4: put_of(array, places, 4, first, step); return;
    case 8: put_of(array, places, 8, first, step); return;
    default: put_of(array, places, 16, first, step);
  }
}

// Whether lane n is ordered after lane n of a store, for every n: the warp's own, or one that it knows for all lanes.
static int store_ordered(const Access *access, int32_t id) {
  int64_t number = id >> LANE_BITS;
  if (id & (LANES - 1) || !number || of_other_cluster(access, id)) return 0;
  int64_t column = access->epochs->columns[number];
  if (column == access->own) return 1;
  if (column < 0 || column + LANES > access->width) return 0;
  int32_t clock = access->epochs->clocks[number], late = 0;
  for (int lane = 0; lane < LANES; lane++) late |= clock > access->known[column + lane];
  return !late;
}

// The plane that all places are in, by granules or by bytes; null for other accesses.
static Plane *plane_of(const Access *access, int64_t places[restrict LANES]) {
  Shadow *shadow = access->shadow;
  const int64_t *restrict offsets = access->offsets;
  int64_t count = access->count, origin = access->origin;
  if (count & (count - 1) || count > GRANULE) return NULL;
  uint64_t most = 0, bits = 0;
  for (int lane = 0; lane < LANES; lane++) {
    uint64_t offset = (uint64_t)(offsets[lane] - origin);
    most = offset > most ? offset : most;
    bits |= offset;
    places[lane] = (int64_t)(offset >> 4);
  }
  if (bits & (uint64_t)(count - 1) || most >= (uint64_t)shadow->coarse.places * GRANULE) return NULL;
  int some = 0, all = 0;
  if (shadow->split) {
    all = 1;
    for (int lane = 0; lane < LANES; lane++) {
      some |= shadow->split[places[lane]];
      all &= shadow->split[places[lane]];
    }
  }
  if (all) {
    for (int lane = 0; lane < LANES; lane++) places[lane] = offsets[lane] - origin;
    return &shadow->fine;
  }
  return !some && count == GRANULE ? &shadow->coarse : NULL;
}

static inline int64_t unit_of(const Access *access, const Plane *plane) {
  return plane == &access->shadow->coarse ? 1 : access->count;
}

Plane *lanes_check(const Access *access, int64_t places[LANES]) {
  Plane *plane = plane_of(access, places);
  if (!plane) return NULL;
  int64_t unit = unit_of(access, plane), first = places[0];
  int32_t write = plane->writes[first];
  int by_lanes = write != plane->writes[places[1]];
  if (access->unwritten && write >> LANE_BITS >= access->unwritten) return NULL;
  if (by_lanes ? !store_ordered(access, write)
               : !is_ordered(access, write, access->known, access->own, -1, access->exempt, 0))
    return NULL;
  if (!alike(plane->writes, places, unit, write, by_lanes)) return NULL;
  if (access->write) {
    if (plane->foreign) return NULL;
    for (int64_t n = 0; n < plane->layer_count; n++) {
      int32_t read = plane->layers[n][first];
      if (!is_ordered(access, read, access->known, access->own, -1, access->exempt, 0)) return NULL;
      if (!alike(plane->layers[n], places, unit, read, 0)) return NULL;
    }
  } else {
    // One reader, which this one replaces; a reader of another cluster would have to be kept.
    if (!plane->layer_count || layer_of(access, plane, first)) return NULL;
    int32_t read = plane->layers[0][first];
    if (of_other_cluster(access, read) || !alike(plane->layers[0], places, unit, read, 0)) return NULL;
  }
  decided++;
  return plane;
}

void lanes_record(const Access *access, Plane *plane, const int64_t places[LANES], int32_t id) {
  int64_t unit = unit_of(access, plane);
  access_note(access);
  if (!access->write) {
    put(plane->layers[0], places, unit, id, 0);
    return;
  }
  put(plane->writes, places, unit, id, 1);
  for (int64_t n = 0; n < plane->layer_count; n++)  // where the first place has no reader, no other one has
    if (plane->layers[n][places[0]]) put(plane->layers[n], places, unit, 0, 0);
}
