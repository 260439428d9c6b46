// Tensor copies through tensor maps of the frequent kind (`Plan`) that are complete when they are issued. What they
// leave - other maps, boxes that are partly out of bounds, asynchronous completion, anything illegal - tma.py does.
#include <stddef.h>
#include <string.h>

#include "core.h"
#include "meter.h"

enum {
  CHUNK = 16,              // bytes that a swizzle moves as one
  SHARED_ALIGNMENT = 128,  // of a box in shared memory
  WIDEST_ROW = 128,        // bytes: the span of the widest swizzle
  DATA = 1, OF_BARRIER = 2  // states of a byte of shared memory
};

// A copy that is legal, as far as its mbarrier and the race detector have nothing against it.
typedef struct Box {
  const Plan *plan;
  Cta *cta;
  int64_t offset;  // in shared memory
  uint8_t *start;  // in global memory
} Box;

static const Plan *plan_of(const Tables *t, int64_t map) {
  for (int i = 0; i < PLANS; i++) {
    const Plan *plan = &t->plans[i];
    // A kernel may have rewritten the map (tensormap.replace).
    if (plan->key == map) return memcmp(plan->host, plan->content, sizeof plan->content) ? NULL : plan;
  }
  return NULL;
}

// Finds the box. 0: Python has to do the copy.
static int box_of(Tables *t, const CopyArguments *copy, int32_t rank, int store, Box *box) {
  if (!(t->unit_flags & EAGER)) return 0;
  const Plan *plan = plan_of(t, copy->map);
  if (!plan || plan->rank != rank || !(store ? plan->stores : plan->loads)) return 0;
  int64_t start = plan->base;
  for (int i = 0; i < RANKS; i++) {
    int64_t at = (int32_t)copy->coordinates[i];
    if (at < 0 || at > plan->extents[i] - plan->tile[i]) return 0;
    start += at * (i ? plan->strides[i] : plan->element);
  }
  if ((int32_t)copy->coordinates[0] * plan->element % CHUNK || copy->shared % SHARED_ALIGNMENT) return 0;
  int64_t cta = copy->shared >> RANK_SHIFT, offset = copy->shared & OFFSET_MASK;
  if (cta < 0 || cta >= t->ranks || offset + plan->box_bytes > t->ctas[cta].size) return 0;
  *box = (Box){plan, &t->ctas[cta], offset, (uint8_t *)(intptr_t)start};
  return 1;
}

static inline void move_chunk(uint8_t *shared, uint8_t *global, int store) {
  memcpy(store ? global : shared, store ? shared : global, CHUNK);
}

// A row whose chunks the swizzle exchanges among each other.
static inline void move_row(uint8_t *shared, uint8_t *global, int64_t turn, int64_t nbytes, int store) {
  if (nbytes == WIDEST_ROW)  // a count that the compiler knows: no loop
    for (int c = 0; c < WIDEST_ROW; c += CHUNK) move_chunk(shared + (c ^ turn), global + c, store);
  else
    for (int64_t c = 0; c < nbytes; c += CHUNK) move_chunk(shared + (c ^ turn), global + c, store);
}

// A tensor copy: sectors of global memory row by row.
static void meter_copy(const Tables *t, const CopyArguments *copy, const Box *box) {
  const int64_t *n = box->plan->tile, *step = box->plan->strides, row = box->plan->row_bytes;
  int64_t sectors = 0;
  for (int64_t i4 = 0; i4 < n[4]; i4++)
    for (int64_t i3 = 0; i3 < n[3]; i3++)
      for (int64_t i2 = 0; i2 < n[2]; i2++)
        for (int64_t i1 = 0; i1 < n[1]; i1++) {
          int64_t at = (int64_t)(intptr_t)box->start + i4 * step[4] + i3 * step[3] + i2 * step[2] + i1 * step[1];
          sectors += (at % SECTOR + row + SECTOR - 1) / SECTOR;
        }
  Meter *meter = meter_of(t, copy->instruction, METER_UNIT);
  meter->requests++;
  meter->bytes += box->plan->box_bytes;
  meter->wavefronts += (box->plan->box_bytes + WAVEFRONT - 1) / WAVEFRONT;
  meter->sectors += sectors;
}

// The rows of a box lie one after the other in shared memory.
static inline void move(const Box *box, int store) {
  const Plan *plan = box->plan;
  const int64_t *n = plan->tile, *step = plan->strides;
  int64_t at = box->offset, row = plan->row_bytes;
  uint8_t *g4 = box->start;
  for (int64_t i4 = 0; i4 < n[4]; i4++, g4 += step[4]) {
    uint8_t *g3 = g4;
    for (int64_t i3 = 0; i3 < n[3]; i3++, g3 += step[3]) {
      uint8_t *g2 = g3;
      for (int64_t i2 = 0; i2 < n[2]; i2++, g2 += step[2]) {
        uint8_t *g1 = g2;
        for (int64_t i1 = 0; i1 < n[1]; i1++, g1 += step[1], at += row)
          move_row(box->cta->data + at, g1, at >> plan->shift & plan->mask, row, store);
      }
    }
  }
}

static int all_data(const uint8_t *states, int64_t count) {
  int other = 0;
  for (int64_t i = 0; i < count; i++) other |= states[i] != DATA;
  return !other;
}

static int no_barrier(const uint8_t *states, int64_t count) {
  int found = 0;
  for (int64_t i = 0; i < count; i++) found |= states[i] == OF_BARRIER;
  return !found;
}

// The copy as the race detector is told of it: one whose rows have one pitch, and a name. `signal`: of a load the
// address of its mbarrier, else -1. 0: Python has to do the copy.
static int described(
    const Tables *t, const CopyArguments *copy, const Box *box, int64_t signal, WatchedCopy *watched) {
  const Plan *plan = box->plan;
  const int64_t key[TEXT_KEY] = {plan->box_bytes, copy->shared, signal, copy->warp};
  const TextEntry *entry = &t->texts[key_slot(key, TEXT_KEY, TEXTS)];
  if (!plan->rows || memcmp(entry->key, key, sizeof key)) return 0;
  *watched = (WatchedCopy){
      .lane = copy->lane, .instruction = copy->instruction, .text = entry->text, .shadow = box->cta->shadow,
      .offset = box->offset, .nbytes = plan->box_bytes, .start = (int64_t)(intptr_t)box->start,
      .pitch = plan->pitch, .count = plan->rows, .row = plan->row_bytes,
  };
  return 1;
}

int32_t tensor_load(Tables *t, const CopyArguments *copy, int32_t rank, int32_t pair) {
  Box box;
  Barrier *barrier;
  if (!box_of(t, copy, rank, 0, &box) || !(barrier = barrier_at(t, copy->barrier))) return 0;
  int64_t nbytes = box.plan->box_bytes, apart = copy->barrier >> RANK_SHIFT ^ copy->shared >> RANK_SHIFT;
  int64_t tx = barrier->tx - nbytes;
  if (apart > pair || tx < -MAX_COUNT || (tx < 0 && !barrier->pending)) return 0;
  uint8_t *states = box.cta->states + box.offset;
  if (t->flags & STATES && !no_barrier(states, nbytes)) return 0;
  if (t->unit_flags & WATCHED) {
    WatchedCopy watched;
    if (!barrier->point) return 0;
    if (!described(t, copy, &box, copy->barrier, &watched)) return 0;
    watched.point = barrier->point;
    watched.pair = apart;
    watched.phase = barrier->phase;
    watched.completes = !barrier->pending && !tx;
    if (!watch_load(t, &watched)) return 0;
  }
  if (t->flags & STATES) memset(states, DATA, (size_t)nbytes);
  if (t->meter) meter_copy(t, copy, &box);
  move(&box, 0);
  barrier->tx = tx;
  barrier_settle(t, barrier);
  t->progress++;
  t->loaded += nbytes;
  return 1;
}

int32_t tensor_store(Tables *t, const CopyArguments *copy, int32_t rank) {
  Box box;
  if (!box_of(t, copy, rank, 1, &box)) return 0;
  if (t->flags & STATES && !all_data(box.cta->states + box.offset, box.plan->box_bytes)) return 0;
  if (t->unit_flags & WATCHED) {
    WatchedCopy watched;
    if (box.cta->shadow != t->context->shadow) return 0;  // from another CTA's shared memory: rare, and for Python
    if (!described(t, copy, &box, -1, &watched) || !watch_store(t, &watched)) return 0;
  }
  if (t->meter) meter_copy(t, copy, &box);
  move(&box, 1);
  t->progress++;
  t->stored += box.plan->box_bytes;
  return 1;
}
