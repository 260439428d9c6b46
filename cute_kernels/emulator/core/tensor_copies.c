// Tensor copies through tensor maps of the frequent kind (`Plan`) that are complete when they are issued. What they
// leave - other maps, boxes that are partly out of bounds, asynchronous completion, anything illegal - tma.py does.
#include <stddef.h>
#include <string.h>

#include "core.h"
#include "meter.h"
#include "trace.h"

enum {
  CHUNK = 16,              // bytes that a swizzle moves as one
  SHARED_ALIGNMENT = 128,  // of a box in shared memory
  WIDEST_ROW = 128,        // bytes: the span of the widest swizzle
  AHEAD = 8,               // rows
  DATA = 1, OF_BARRIER = 2  // states of a byte of shared memory
};

// A copy that is legal, as far as its CTAs, mbarriers and the race detector have nothing against it.
typedef struct Box {
  const Plan *plan;
  int64_t offset;  // in shared memory
  uint8_t *start;  // in global memory
} Box;

// A load as one CTA sees it.
typedef struct Target {
  Cta *cta;
  Barrier *barrier;
  int64_t shared, signal;  // addresses of the box and of the mbarrier
  int64_t tx;              // bytes that the mbarrier waits for afterwards
  int64_t text;            // what it is called, where anybody asks
} Target;

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
  *box = (Box){plan, copy->shared & OFFSET_MASK, (uint8_t *)(intptr_t)start};
  return 1;
}

// The CTA that has a box; null: there is none, or it is too small.
static Cta *cta_of(Tables *t, const Box *box, int64_t rank) {
  if (rank < 0 || rank >= t->ranks || box->offset + box->plan->box_bytes > t->ctas[rank].size) return NULL;
  return &t->ctas[rank];
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

// A tensor copy to or from so many CTAs: sectors of global memory row by row.
static void meter_copy(const Tables *t, const CopyArguments *copy, const Box *box, int64_t ctas) {
  const int64_t *n = box->plan->tile, *step = box->plan->strides, row = box->plan->row_bytes;
  int64_t sectors = 0, nbytes = box->plan->box_bytes * ctas;
  for (int64_t i4 = 0; i4 < n[4]; i4++)
    for (int64_t i3 = 0; i3 < n[3]; i3++)
      for (int64_t i2 = 0; i2 < n[2]; i2++)
        for (int64_t i1 = 0; i1 < n[1]; i1++) {
          int64_t at = (int64_t)(intptr_t)box->start + i4 * step[4] + i3 * step[3] + i2 * step[2] + i1 * step[1];
          sectors += (at % SECTOR + row + SECTOR - 1) / SECTOR;
        }
  Meter *meter = meter_of(t, copy->instruction, METER_UNIT);
  meter->requests++;
  meter->bytes += nbytes;
  meter->wavefronts += (nbytes + WAVEFRONT - 1) / WAVEFRONT;
  meter->sectors += sectors;
}

// The rows of a box lie one after the other in shared memory.
static inline void move(const Box *box, uint8_t *shared, int store) {
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
        for (int64_t i1 = 0; i1 < n[1]; i1++, g1 += step[1], at += row) {
          __builtin_prefetch(g1 + AHEAD * step[1]);  // rows are far apart: a processor does not expect them by itself
          move_row(shared + at, g1, at >> plan->shift & plan->mask, row, store);
        }
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

// The text of a copy; 0: there are too many. Names in the table never move.
static int64_t name_of(Tables *t, const int64_t key[NAME_KEY]) {
  int64_t slot = key_slot(key, NAME_KEY, NAMES);
  for (; t->names[slot].key[0]; slot = (slot + 1) % NAMES)
    if (!memcmp(t->names[slot].key, key, sizeof t->names[slot].key)) return t->first_name - slot;
  if (t->name_count == MOST_NAMES) return 0;
  t->name_count++;
  memcpy(t->names[slot].key, key, sizeof t->names[slot].key);
  return t->first_name - slot;
}

// Finds the text of a copy, where anybody asks for it. The race detector is told of rows that have one pitch. `signal`:
// of a load the address of its mbarrier, else -1. 0: Python has to do the copy.
static int named(Tables *t, const CopyArguments *copy, const Plan *plan, int64_t shared, int64_t signal, int64_t *text) {
  int64_t watched = t->unit_flags & WATCHED;
  *text = 0;
  if (!watched && !t->trace) return 1;
  if (watched && !plan->rows) return 0;
  const int64_t key[NAME_KEY] = {plan->box_bytes, shared, signal, copy->warp};
  return (*text = name_of(t, key)) != 0;
}

// The copy as the race detector is told of it.
static WatchedCopy described(const Tables *t, const CopyArguments *copy, const Box *box, int64_t shared, int64_t text) {
  const Plan *plan = box->plan;
  return (WatchedCopy){
      .lane = copy->lane, .instruction = copy->instruction, .text = text, .shadow = t->ctas[shared >> RANK_SHIFT].shadow,
      .offset = box->offset, .nbytes = plan->box_bytes, .start = (int64_t)(intptr_t)box->start,
      .pitch = plan->pitch, .count = plan->rows, .row = plan->row_bytes,
  };
}

static void trace_copy(Tables *t, int32_t kind, const CopyArguments *copy, const Plan *plan, int64_t text) {
  if (!t->trace) return;
  TraceEvent *event = trace_event(t, kind, copy->instruction);
  event->number = plan->box_bytes;
  event->text = text;
  event->lane = copy->lane;
}

// What a load does in the next CTA, `number` of them before it. 0: Python has to do the copy.
static int add_target(Tables *t, const Box *box, Target *targets, int64_t number, int64_t cta, int64_t signal) {
  Target *target = &targets[number];
  *target = (Target){.cta = cta_of(t, box, cta), .barrier = barrier_at(t, signal), .signal = signal};
  if (!target->cta || !target->barrier) return 0;
  target->shared = cta << RANK_SHIFT | box->offset;
  int64_t tx = target->barrier->tx;
  for (int64_t i = 0; i < number; i++) {
    if (targets[i].barrier != target->barrier) continue;
    tx = targets[i].tx;
    if (!tx && !target->barrier->pending) return 0;  // that one completes the phase, and this one counts for the next
  }
  target->tx = tx - box->plan->box_bytes;
  if (target->tx < -MAX_COUNT || (target->tx < 0 && !target->barrier->pending)) return 0;
  return !(t->flags & STATES) || no_barrier(target->cta->states + box->offset, box->plan->box_bytes);
}

// The CTAs that a load goes to, in order of their ranks; how many, 0: Python has to do the copy.
static int64_t targets_of(Tables *t, const CopyArguments *copy, const Box *box, int32_t pair, Target targets[MOST_TARGETS]) {
  int64_t cta = copy->shared >> RANK_SHIFT, barrier = copy->barrier >> RANK_SHIFT, count = 0;
  if (copy->multicast < 0) {
    if ((barrier ^ cta) > pair) return 0;
    return add_target(t, box, targets, 0, cta, copy->barrier);
  }
  uint64_t mask = copy->multicast & 0xFFFF;
  if (mask >> t->ranks || cta < 0 || cta >= t->ranks || barrier < 0 || barrier >= t->ranks) return 0;
  for (; mask; mask &= mask - 1) {
    int64_t to = __builtin_ctzll(mask), signal = pair ? (to & ~(int64_t)1) | (barrier & 1) : to;
    if (!add_target(t, box, targets, count, to, signal << RANK_SHIFT | (copy->barrier & OFFSET_MASK))) return 0;
    count++;
  }
  return count;
}

static int name_targets(Tables *t, const CopyArguments *copy, const Plan *plan, Target *targets, int64_t count) {
  for (int64_t i = 0; i < count; i++)
    if (!named(t, copy, plan, targets[i].shared, targets[i].signal, &targets[i].text)) return 0;
  return 1;
}

static int watch_targets(Tables *t, const CopyArguments *copy, const Box *box, const Target *targets, int64_t count) {
  WatchedCopy watched[MOST_TARGETS];
  for (int64_t i = 0; i < count; i++) {
    const Target *target = &targets[i];
    const Barrier *barrier = target->barrier;
    if (!barrier->point) return 0;
    watched[i] = described(t, copy, box, target->shared, target->text);
    watched[i].point = barrier->point;
    watched[i].pair = target->shared >> RANK_SHIFT ^ target->signal >> RANK_SHIFT;
    watched[i].phase = barrier->phase;
    watched[i].completes = !barrier->pending && !target->tx;
  }
  return watch_load(t, watched, count);
}

int32_t tensor_load(Tables *t, const CopyArguments *copy, int32_t rank, int32_t pair) {
  Box box;
  Target targets[MOST_TARGETS];
  if (!box_of(t, copy, rank, 0, &box)) return 0;
  int64_t count = targets_of(t, copy, &box, pair, targets), nbytes = box.plan->box_bytes;
  if (!count || !trace_room(t, 2 * count) || !name_targets(t, copy, box.plan, targets, count)) return 0;
  if (t->unit_flags & WATCHED && !watch_targets(t, copy, &box, targets, count)) return 0;
  if (t->meter) meter_copy(t, copy, &box, count);
  for (int64_t i = 0; i < count; i++) {
    const Target *target = &targets[i];
    if (t->flags & STATES) memset(target->cta->states + box.offset, DATA, (size_t)nbytes);
    move(&box, target->cta->data, 0);
    trace_copy(t, TRACE_LOADED, copy, box.plan, target->text);
    target->barrier->tx = target->tx;
    trace_settle(t, target->barrier, target->signal, copy->instruction);
  }
  t->progress++;
  t->loaded += nbytes * count;
  return 1;
}

int32_t tensor_store(Tables *t, const CopyArguments *copy, int32_t rank) {
  Box box;
  if (!box_of(t, copy, rank, 1, &box)) return 0;
  const Cta *cta = cta_of(t, &box, copy->shared >> RANK_SHIFT);
  if (!cta || (t->flags & STATES && !all_data(cta->states + box.offset, box.plan->box_bytes))) return 0;
  int64_t text;
  if (!trace_room(t, 1) || !named(t, copy, box.plan, copy->shared, -1, &text)) return 0;
  if (t->unit_flags & WATCHED) {
    if (cta->shadow != t->context->shadow) return 0;  // from another CTA's shared memory: rare, and for Python
    WatchedCopy watched = described(t, copy, &box, copy->shared, text);
    if (!watch_store(t, &watched)) return 0;
  }
  if (t->meter) meter_copy(t, copy, &box, 1);
  move(&box, cta->data, 1);
  trace_copy(t, TRACE_STORED, copy, box.plan, text);
  t->progress++;
  t->stored += box.plan->box_bytes;
  return 1;
}
