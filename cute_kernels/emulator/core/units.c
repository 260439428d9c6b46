// mbarriers, and tcgen05.commit by threads of which Python has told.
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
  return &t->barriers[cta->slots[offset >> 3] - 1];
}

void barrier_settle(Tables *t, Barrier *barrier) {
  if (barrier->pending || barrier->tx) return;
  barrier->phase++;
  barrier->pending = barrier->expected;
  t->completions++;
}

int32_t mbarrier_passed(Tables *t, int64_t address, int32_t parity, int64_t order) {
  if (!(t->unit_flags & WAITS) || parity & ~1) return 0;
  Barrier *barrier = barrier_at(t, address);
  if (!barrier || (barrier->phase & 1) == parity || !trace_room(t, 1)) return 0;
  if (t->unit_flags & WATCHED) {
    if (!barrier->point || !watch_wait(t, barrier->point, order, barrier->phase - 1)) return 0;
  }
  if (t->trace) {
    TraceEvent *event = trace_event(t, TRACE_PASSED, t->place);
    event->address = address;
    event->number = parity;
  }
  return 1;
}

int32_t mbarrier_waits(Tables *t, int64_t address, int32_t parity) {
  if (!(t->unit_flags & WAITS) || parity & ~1) return 0;
  const Barrier *barrier = barrier_at(t, address);
  if (!barrier || (barrier->phase & 1) != parity) return 0;
  return !(t->unit_flags & WATCHED) || (barrier->point && watch_look(t, barrier->point, barrier->phase));
}

// An arrival that is legal: bytes that the mbarrier waits for then, arrivals that it needs. 0: for Python.
typedef struct Next {
  Barrier *barrier;
  int64_t tx, left;
} Next;

static int arrival_at(
    Tables *t, int64_t address, int64_t count, int64_t nbytes, uint32_t lanes, Next *next, Arrival *arrival) {
  Barrier *barrier = barrier_at(t, address);
  if (!barrier || count < 1 || count > barrier->pending) return 0;
  *next = (Next){.barrier = barrier, .tx = barrier->tx + nbytes, .left = barrier->pending - count};
  if (next->tx > MAX_COUNT || (!next->left && next->tx < 0)) return 0;
  *arrival = (Arrival){
      .point = barrier->point, .lanes = lanes, .rank = address >> RANK_SHIFT, .phase = barrier->phase,
      .completes = !next->left && !next->tx,
  };
  return !(t->unit_flags & WATCHED) || arrival->point;
}

static void arrive(Tables *t, const Next *next, int64_t arriver) {
  next->barrier->pending = next->left;
  next->barrier->tx = next->tx;
  next->barrier->arriver = arriver;
  barrier_settle(t, next->barrier);
}

int64_t mbarrier_arrive(
    Tables *t, int64_t address, int64_t count, int64_t nbytes, int64_t arriver, uint32_t mask, int64_t order) {
  Next next;
  Arrival arrival;
  if (!arrival_at(t, address, count, nbytes < 0 ? 0 : nbytes, mask, &next, &arrival) || !trace_room(t, 2)) return -1;
  if (t->unit_flags & WATCHED && !watch_arrive(t, &arrival, 1, order)) return -1;
  Barrier *barrier = next.barrier;
  barrier->tx = next.tx;
  TraceEvent *event = t->trace ? trace_event(t, nbytes < 0 ? TRACE_ARRIVED : TRACE_EXPECTED, t->place) : NULL;
  if (event) trace_barrier(event, address, barrier);
  barrier->pending = next.left;
  barrier->arriver = arriver;
  trace_settle(t, barrier, address, t->place);
  if (event && nbytes < 0) trace_barrier(event, address, barrier);
  t->progress++;
  return arrival.phase;
}

int64_t mbarrier_arrive_each(
    Tables *t, const int64_t *addresses, uint32_t mask, int64_t count, int64_t arriver, int64_t order) {
  Next next[MOST_TARGETS];
  Arrival arrivals[MOST_TARGETS];
  int64_t groups = 0;
  if (t->trace) return -1;  // a timeline shows each of them as Python does
  for (uint32_t left = mask, lanes; left; left ^= lanes, groups++) {
    int64_t address = addresses[__builtin_ctz(left)];
    lanes = 0;
    for (int lane = 0; lane < LANES; lane++) lanes |= (uint32_t)(addresses[lane] == address) << lane;
    lanes &= left;
    if (groups == MOST_TARGETS) return -1;
    int64_t arriving = count * __builtin_popcount(lanes);
    if (!arrival_at(t, address, arriving, 0, lanes, &next[groups], &arrivals[groups])) return -1;
  }
  if (!groups || (t->unit_flags & WATCHED && !watch_arrive(t, arrivals, groups, order))) return -1;
  for (int64_t i = 0; i < groups; i++) arrive(t, &next[i], arriver);
  t->progress++;
  return arrivals[groups - 1].phase;
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
