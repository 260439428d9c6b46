// wgmma, for its own parts.
#pragma once
#include "bytecode.h"
#include "descriptors.h"

enum { WGMMA_B = 0, WGMMA_A = 1 };  // operands

// The warpgroup of a warp; null: the kernel has no wgmma.
static inline Warpgroup *warpgroup_of(const Tables *t, const WarpHeader *header) {
  return t->warpgroups ? &t->warpgroups[header->rank * t->warpgroups_of_cta + header->index / WGMMA_WARPS] : 0;
}

static inline Wgmma *operation_of(const Warpgroup *group, int64_t number) {
  return &group->operations[number % group->room];
}

// How rows of an operand in shared memory lie; where those of an operation do, whose descriptor is legal.
MatrixRows wgmma_rows(const WgmmaForm *form, int which);
SharedOperand wgmma_operand(const WgmmaForm *form, int which, const Wgmma *operation);

// --- the race detector: wgmma_races.c ---

// A warp is about to issue operation `number`, of `issued` that any warp has issued, and `observed` that all have waited
// for: with what it knows now. 0: Python has raised.
int wgmma_learn(Tables *t, Warpgroup *group, int64_t member, int64_t number, int64_t issued, int64_t observed);
// All warps have issued it: whether its reads race with earlier writes, as Python says.
int wgmma_races(Tables *t, const Warpgroup *group, int64_t number, int64_t rank);
// A warp has waited for all operations before `end`.
void wgmma_observe(Agent *agent, Warpgroup *group, int64_t end);
// More operations may have been issued and not waited for.
void wgmma_keep_known(Warpgroup *group, int64_t room);

// --- where other instructions touch accumulators in flight: registers_in_flight.c ---

// What a warp's cells hold of the results of an operation.
static inline int16_t *held_of(const Tables *t, const Warpgroup *group, const WgmmaWarp *warp, int64_t number) {
  return warp->held + number % group->room * t->register_cells;
}

// An operation is issued; where its results are now, as offsets in the state of the warp; it has taken effect there.
void registers_hold(const Tables *t, const Warpgroup *group, int member, int64_t number);
void registers_locate(const Tables *t, const Warpgroup *group, int member, int64_t number, uint32_t *offsets);
void registers_fill(const Tables *t, const Warpgroup *group, int member, int64_t number, const uint32_t *offsets);
