// A detector: strong stores of two lanes of one warp by two instructions, to the same place.
//
// They are no data race, but which of them comes last is open, unless the lanes synchronise in between, or the place was
// read strongly: coherence then orders the later store behind what was read. Atomics are meant to meet.
#include "races.h"

static int looks_at(const Access *access) {
  return access->write && access->strong && access->stores && access->stores[access->instruction];
}

// Whether a place was read strongly by the warp itself since it was written.
static int is_read_strongly(const Access *access, const Plane *plane, int64_t place) {
  const Epochs *epochs = access->epochs;
  for (int64_t n = 0; n < plane->layer_count; n++) {
    int64_t number = plane->layers[n][place] >> LANE_BITS, column = epochs->columns[number];
    int own = column == access->own + COLUMN_READ || column == access->own + COLUMN_LOADS;
    if (number && own && epochs->kinds[number] == STRONG) return 1;
  }
  return 0;
}

static int forbids(const Access *access, const Plane *plane, int64_t place) {
  const Epochs *epochs = access->epochs;
  int32_t earlier = plane->writes[place];
  int64_t number = earlier >> LANE_BITS, by = epochs->instructions[number];
  int of_own_warp = epochs->columns[number] == access->own && !of_other_cluster(access, earlier);
  int by_another_store = by >= 0 && by != access->instruction && access->stores[by];
  if (!of_own_warp || epochs->kinds[number] != STRONG || !by_another_store) return 0;
  return !is_read_strongly(access, plane, place);
}

const Rule strong_stores = {looks_at, forbids};
