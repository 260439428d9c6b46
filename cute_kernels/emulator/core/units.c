// Where mbarriers are, and tcgen05.commit by threads of which Python has told.
#include <stddef.h>
#include <string.h>

#include "core.h"
#include "trace.h"

#define GOLDEN 0x9E3779B97F4A7C15u  // 2^64 / golden ratio: the upper bits of a product depend on all bits of the key

static inline int64_t slot_of(const int64_t *key, int64_t words, int64_t slots) {
  uint64_t mixed = 0;
  for (int64_t i = 0; i < words; i++) mixed = mixed * 31 + (uint64_t)key[i];
  return (int64_t)(mixed * GOLDEN >> (64 - __builtin_ctzll((uint64_t)slots)));
}

int64_t key_slot(const int64_t *key, int64_t words, int64_t slots) { return slot_of(key, words, slots); }

Barrier *barrier_at(Tables *t, int64_t address) {
  int64_t rank = address >> RANK_SHIFT, offset = address & OFFSET_MASK;
  if (rank < 0 || rank >= t->ranks || address & 7) return NULL;
  const Cta *cta = &t->ctas[rank];
  if (offset >= cta->size || !cta->slots[offset >> 3]) return NULL;
  uint32_t number = (uint32_t)(cta->slots[offset >> 3] - 1);
  return &t->barriers[number / BARRIER_BLOCK][number % BARRIER_BLOCK];
}

void barrier_settle(Tables *t, Barrier *barrier) {
  if (barrier->pending || barrier->tx) return;
  barrier->phase++;
  barrier->pending = barrier->expected;
  t->completions++;
}

int32_t tensor_commit(Tables *t, int64_t who, int64_t address, int64_t multicast) {
  if (!(t->unit_flags & EAGER)) return 0;
  const CommitEntry *entry = &t->commit_entries[slot_of(&who, 1, COMMITS)];
  if (entry->who != who || !entry->label || !multicast || !trace_room(t, 1 + MOST_TARGETS)) return 0;
  int64_t offset = address & OFFSET_MASK;
  if (address < 0 || address >> RANK_SHIFT >= t->ranks) return 0;
  uint64_t mask = multicast < 0 ? (uint64_t)1 << (address >> RANK_SHIFT) : (uint64_t)multicast;
  Commit commit = {.stream = entry->stream, .lane = who >> 8 & 255};
  Barrier *barriers[MOST_TARGETS];
  int64_t addresses[MOST_TARGETS];
  for (; mask; mask &= mask - 1) {
    int64_t target = (int64_t)__builtin_ctzll(mask) << RANK_SHIFT | offset;
    Barrier *barrier = barrier_at(t, target);
    if (!barrier || commit.count == MOST_TARGETS || barrier->pending < 1) return 0;
    int last = barrier->pending == 1;
    if ((last && barrier->tx < 0) || (entry->stream && !barrier->point)) return 0;
    commit.targets[commit.count] =
        (CommitTarget){.point = barrier->point, .phase = barrier->phase, .completes = last && !barrier->tx};
    addresses[commit.count] = target;
    barriers[commit.count++] = barrier;
  }
  if (entry->stream && !watch_commit(t, &commit)) return 0;
  if (t->trace) trace_event(t, TRACE_COMMITTED, t->place)->number = entry->label;
  for (int64_t i = 0; i < commit.count; i++) {
    barriers[i]->pending--;
    barriers[i]->arriver = entry->label;
    trace_settle(t, barriers[i], addresses[i], t->place);
  }
  t->progress++;
  return 1;
}
