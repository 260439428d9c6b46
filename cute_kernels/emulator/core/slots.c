// Runs clusters of one CTA one after the other in the memory of one, as far as they need nothing of Python (slots.py).
#include <string.h>

#include "bytecode.h"

static void clear(const Plane *plane, int64_t first, int64_t count) {
  memset(plane->writes + first, 0, (size_t)count * sizeof *plane->writes);
  for (int64_t i = 0; i < plane->layer_count; i++)
    memset(plane->layers[i] + first, 0, (size_t)count * sizeof **plane->layers);
}

static void clear_shadow(const Shadow *shadow) {
  int64_t first = shadow->low / GRANULE, end = (shadow->high + GRANULE - 1) / GRANULE;
  if (end <= first) return;
  clear(&shadow->coarse, first, end - first);
  for (int64_t i = first; i < end; i++) {
    if (!shadow->split[i]) continue;
    clear(&shadow->fine, i * GRANULE, GRANULE);
    shadow->split[i] = 0;
  }
}

// All memory is what a new cluster finds.
static void restore(Slot *p) {
  for (int64_t i = 0; i < p->warps; i++) {
    const Context *context = p->each[i].context;
    const Agent *agent = context ? context->agent : NULL;
    // `changes` begins at 1.
    if (agent && (agent->changes != 1 || agent->some_pending || agent->fenced_order >= 0))
      memset(agent->clocks, 0, (size_t)p->clock_bytes);
  }
  if (p->shadow) clear_shadow(p->shadow);
  for (int64_t i = 0; i < p->span_count; i++) memcpy(p->spans[i].at, p->spans[i].found, (size_t)p->spans[i].nbytes);
}

// The next cluster takes the slot.
static void begin(Slot *p) {
  if (!p->fresh) restore(p);
  p->fresh = 0;
  if (p->epochs) p->epochs->cluster = p->number + p->done;
  for (int64_t i = 0; i < p->warps; i++) {
    SlotWarp *warp = &p->each[i];
    warp->ended = 0;
    for (int64_t k = 0; k < p->offset_count; k++)
      memcpy(warp->state + p->offsets[k], &p->values[p->done * p->offset_count + k], sizeof *p->values);
    if (!warp->context) continue;
    warp->context->cluster = p->number + p->done;
    warp->context->agent->text = p->text + 4 * (p->done * p->warps + i);
  }
}

static int64_t executed(const Slot *p) {
  int64_t steps = 0;
  for (int64_t i = 0; i < p->warps; i++) steps += ((const WarpHeader *)(const void *)p->each[i].state)->steps;
  return steps;
}

// A warp has its turn, unless it waits at a named barrier. 0: Python goes on.
static int turn(Slot *p, int64_t number, void *callback, int *ran, int64_t *running) {
  SlotWarp *warp = &p->each[number];
  WarpHeader *header = (WarpHeader *)(void *)warp->state;
  Tables *t = p->tables;
  NamedBarriers *named = t->ctas[0].named;
  if (warp->ended) return 1;
  if (header->waits && named->waiting[header->index] == named->barriers[header->awaited].generation) return 1;
  *ran = 1;
  p->warp = number;
  header->waits = 0;
  header->budget = (int32_t)p->slice;
  t->context = warp->context;
  t->local = warp->local;
  t->local_bytes = p->local_bytes;
  p->status = warp_run(p->program, warp->state, p->rows, t, callback);
  if (p->asked || (p->status != EXIT && (p->status != WAIT || header->waits != WAITS_NAMED))) return 0;
  if (t->log_used && !log_flush(t)) return 0;
  warp->place = t->place;
  if (p->status != EXIT) return 1;
  warp->ended = 1;
  --*running;
  named_recount(named, *running * LANES);
  return 1;
}

// 1: the cluster has ended, and left nothing behind; 0: Python goes on with it.
static int run_cluster(Slot *p, void *callback) {
  int64_t running = p->warps;
  while (running) {
    int ran = 0;
    for (int64_t i = 0; i < p->warps; i++)
      if (!turn(p, i, callback, &ran, &running)) return 0;
    if (running && (!ran || executed(p) > p->most)) {
      p->warp = p->warps;
      return 0;
    }
  }
  if (executed(p) <= p->most && !p->tables->work->issued && !p->tables->wgmma_warps) return 1;
  p->each[p->warp].ended = 0;
  return 0;
}

void slot_run(Slot *p, void *callback) {
  int64_t patience = p->patience;
  for (p->done = 0; p->done < p->count && patience > 0; p->done++) {
    begin(p);
    if (!run_cluster(p, callback)) return;
    patience -= executed(p);
    for (int64_t i = 0; i < p->warps; i++) {
      const int64_t *counts = (const int64_t *)(const void *)(p->each[i].state + sizeof(WarpHeader));
      for (int64_t k = 0; k < p->blocks; k++) p->totals[i * p->blocks + k] += counts[k];
    }
  }
  p->count = p->done;
}
