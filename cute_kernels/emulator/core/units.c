// Where mbarriers are, and entries of tables.
#include <stddef.h>

#include "core.h"

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
