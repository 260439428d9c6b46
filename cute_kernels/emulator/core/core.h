// Every function of the core that Python or the machine code of kernels calls.
//
// layout.py reads these declarations too: `EXPORT type name(type parameter, ...);`, one of them a statement.
#ifndef CUTE_KERNELS_CORE_H
#define CUTE_KERNELS_CORE_H
#include "state.h"

#define EXPORT __attribute__((visibility("default")))

// The entry of a key among `slots`, a power of two.
EXPORT int64_t key_slot(const int64_t *key, int64_t words, int64_t slots);

// The live mbarrier at a shared address, or null.
EXPORT Barrier *barrier_at(Tables *t, int64_t address);
// Completes its phase if nothing is pending.
EXPORT void barrier_settle(Tables *t, Barrier *barrier);

// Whether the phase of a parity has completed. 0: not, or Python decides.
EXPORT int32_t mbarrier_passed(Tables *t, int64_t address, int32_t parity, int64_t order);
// Expects bytes and arrives; `mask`: the lanes that do. Returns the phase; -1: nothing is done, Python decides.
EXPORT int64_t mbarrier_arrive(
    Tables *t, int64_t address, int64_t count, int64_t nbytes, int64_t arriver, int32_t mask, int64_t order);

// 1: the MMA was executed; 0: Python has to do it.
EXPORT int32_t tensor_mma(Tables *t, const int64_t *key, int32_t instruction);
// `multicast`: the mask of CTAs, or -1. 1: the commit has arrived; 0: Python has to do it.
EXPORT int32_t tensor_commit(Tables *t, int64_t who, int64_t address, int64_t multicast);

#endif
