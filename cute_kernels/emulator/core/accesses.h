// What lanes access: whether it is there and may be accessed, in shared and in global memory.
#pragma once
#include <stddef.h>
#include <string.h>

#include "core.h"
#include "lanes.h"

#define INLINE static inline __attribute__((always_inline))

// The lanes that access memory, and where.
typedef struct {
  int count;
  int64_t lanes[LANES], addresses[LANES];  // of those that do
  uint8_t *data[LANES], *states[LANES];
} Lanes;

static const uint8_t data_state = 1, barrier_state = 2;

// The span of all addresses, and the bits that any of them has.
INLINE void bounds(const Lanes *lanes, uint64_t *low, uint64_t *high, uint64_t *bits) {
  uint64_t least = UINT64_MAX, most = 0, any = 0;
  for (int i = 0; i < lanes->count; i++) {
    uint64_t address = (uint64_t)lanes->addresses[i];
    least = address < least ? address : least;
    most = address > most ? address : most;
    any |= address;
  }
  *low = least;
  *high = most;
  *bits = any;
}

enum { MOST_BYTES = 16 };  // of a lane, a power of two; where this is compiled, the number is known
static const uint8_t all_data[MOST_BYTES] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};

INLINE int states_allow_of(const Lanes *lanes, int write, size_t nbytes) {
  const uint64_t barriers = 0x0202020202020202;
  uint64_t wrong = 0;
  for (int i = 0; i < lanes->count; i++) {
    uint64_t states[2] = {0}, data[2] = {0};
    memcpy(states, lanes->states[i], nbytes);
    memcpy(data, all_data, nbytes);
    for (int k = 0; k < 2; k++) wrong |= write ? states[k] & barriers : states[k] ^ data[k];
  }
  return !wrong;
}

INLINE void mark_data_of(const Lanes *lanes, size_t nbytes) {
  for (int i = 0; i < lanes->count; i++) memcpy(lanes->states[i], all_data, nbytes);
}

#define FOR_BYTES(nbytes, function, ...)                                                                            \
  switch (nbytes) {                                                                                                 \
    case 1: return function(__VA_ARGS__, 1);                                                                        \
    case 2: return function(__VA_ARGS__, 2);                                                                        \
    case 4: return function(__VA_ARGS__, 4);                                                                        \
    case 8: return function(__VA_ARGS__, 8);                                                                        \
    case MOST_BYTES: return function(__VA_ARGS__, MOST_BYTES);                                                      \
  }

// Whether every byte of the lanes' may be accessed: none of an mbarrier's is written, what is read holds data.
INLINE int states_allow(const Lanes *lanes, int write, int64_t nbytes) {
  FOR_BYTES(nbytes, states_allow_of, lanes, write)
  int wrong = 0;
  for (int i = 0; i < lanes->count; i++)
    for (int64_t byte = 0; byte < nbytes; byte++) {
      uint8_t state = lanes->states[i][byte];
      wrong |= write ? state == barrier_state : state != data_state;
    }
  return !wrong;
}

INLINE void mark_data(const Lanes *lanes, int64_t nbytes) {
  FOR_BYTES(nbytes, mark_data_of, lanes)
  for (int i = 0; i < lanes->count; i++) memset(lanes->states[i], data_state, (size_t)nbytes);
}

// What is wrong with accesses of `nbytes` at offsets in a CTA's memory (memory.c); `operation`: as of `Fault`. 0: nothing, or
// execution goes on.
int refused_by_cta(
    Tables *t, int64_t operation, int64_t nbytes, const int64_t *offsets, int64_t count, int64_t rank);

INLINE int find_shared(const Tables *t, Lanes *lanes, int write, int64_t nbytes) {
  uint64_t low, high, bits;
  bounds(lanes, &low, &high, &bits);
  if (bits & (uint64_t)(nbytes - 1) || high >> RANK_SHIFT >= (uint64_t)t->ranks) return 0;
  for (int i = 0; i < lanes->count; i++) {
    const Cta *cta = &t->ctas[lanes->addresses[i] >> RANK_SHIFT];
    int64_t offset = lanes->addresses[i] & OFFSET_MASK;
    if (offset + nbytes > cta->size) return 0;
    lanes->data[i] = cta->data + offset;
    lanes->states[i] = cta->states + offset;
  }
  return !(t->flags & STATES) || states_allow(lanes, write, nbytes);
}

// The region that holds it all; an end that is not behind the start has wrapped around the address space.
INLINE const Region *region_of(const Tables *t, uint64_t start, uint64_t end, int write) {
  if (end <= start) return NULL;
  for (int64_t i = 0; i < t->regions; i++) {
    const Region *region = &t->region_table[i];
    if (start >= (uint64_t)region->start && end <= (uint64_t)region->end && (!write || region->writable)) return region;
  }
  return NULL;
}

// `writable`: whether any of the memory is.
INLINE int find_global(const Tables *t, Lanes *lanes, int write, int64_t nbytes, int *writable) {
  uint64_t low, high, bits;
  bounds(lanes, &low, &high, &bits);
  if (bits & (uint64_t)(nbytes - 1)) return 0;
  const Region *all = region_of(t, low, high + (uint64_t)nbytes, write);
  *writable = all && all->writable;
  for (int i = 0; i < lanes->count; i++) {
    uint64_t address = (uint64_t)lanes->addresses[i];
    if (!all) {
      const Region *region = region_of(t, address, address + (uint64_t)nbytes, write);
      if (!region) return 0;
      *writable |= region->writable != 0;
    }
    lanes->data[i] = (uint8_t *)(uintptr_t)address;
  }
  return 1;
}
