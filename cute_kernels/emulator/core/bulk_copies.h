// Bulk copies, for their own parts.
#pragma once
#include "asynchronous.h"
#include "boxes.h"
#include "bytecode.h"

static inline BulkThread *bulk_thread(const WarpHeader *header, int lane) {
  return (BulkThread *)(uintptr_t)((const int64_t *)(uintptr_t)header->bulk)[lane];
}

// Whether execution ends here, as of all below.
#define asks(t, what, copy, ...) stops(t, what, .bulk.record = WHERE(copy), __VA_ARGS__)

static inline int is_within(uint64_t start, uint64_t nbytes, int64_t low, int64_t high) {
  return start >= (uint64_t)low && start <= (uint64_t)high && nbytes <= (uint64_t)high - start;
}

// A range of a CTA's memory, as far as that is known when a copy is issued; rows of global memory.
int leaves_cta(Tables *t, int64_t address, int64_t nbytes);
int leaves_global(Tables *t, const BulkCopy *copy, const Rows *rows, int write);

// With detectors: the accesses of a load or send to one CTA, of several the `first`, which reads a box for all of them; and
// those of a store.
int races_to_cta(Tables *t, BulkCopy *copy, int first);
int races_of_store(Tables *t, BulkCopy *copy, const Pieces *source, const Rows *target);
// The copy is about to signal its mbarrier.
int pass_on(Tables *t, const BulkCopy *copy);
