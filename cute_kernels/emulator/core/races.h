// The race detector's parts, for each other. Clocks are those of happens_before.py, places those of shadow.py.
#pragma once
#include "core.h"

// --- clocks.c, points.c: also in core.h ---

static inline int32_t *agent_row(const Agent *agent, int64_t row) { return agent->clocks + row * agent->width; }

// `target` learns what `source` knows.
void clocks_join(int32_t *restrict target, const int32_t *restrict source, int64_t count);
// One column of the first rows of a matrix is at least a clock.
void clocks_raise(int32_t *clocks, int64_t width, int64_t rows, int64_t column, int64_t clock);
// A matrix learns all that the lanes of a warp know, but for the warp's own clock.
void agent_tell(const Agent *agent, int32_t *clocks);
// A row of a kind learns the row `known` of a warp, and how far the lanes of a mask have come, as in `agent_snapshot`.
void agent_tell_row(const Agent *agent, int row, const int32_t *known, int32_t *target, uint32_t mask);
// A row learns that a warp, whose columns begin at `base`, has come as far as a clock.
void cover_warp(int32_t *row, int64_t base, int64_t clock);

// Whether the warp knows of the mbarrier.init; 0: Python decides.
static inline int is_initialised(const Agent *agent, const Point *point) {
  return point->init_clock && agent_row(agent, ROW_VISIBLE)[point->init_column] >= point->init_clock;
}

// An agent announces bytes, or an arrival, of the current phase; an arrival that knows a row of order hears of it.
void point_announce(Point *point, const Agent *agent, int64_t place);
void point_hears(Point *point, const int32_t *order, int64_t width);
// An operation on the mbarrier by a warp, at its clock then.
void point_used(Point *point, const Agent *agent, int64_t clock);
// As `point_overtaken`, from a warp on, of single lanes where they may part behind their wait.
int64_t point_parted(const Point *point, int64_t phase, int64_t first);

// An asynchronous operation of this stream arrives. 0: there is no room.
int point_add_stream(Point *point, int64_t column);

// --- shadow.c, lanes.c ---

static inline int has_room(const Epochs *epochs, int64_t count) { return epochs->count + count <= epochs->capacity; }
// The identity of a new epoch, for which there is room.
int64_t new_epoch(Epochs *epochs, int64_t column, int64_t clock, int64_t text, int kind, int64_t instruction);
// Whether the access that an identity names happened before, for one who knows `known`.
int is_ordered(
    const Access *access, int32_t id, const int32_t *known, int64_t own, int64_t lane, int64_t exempt, int strong);
// The first layer whose reader at a place a read replaces; -1: none.
int64_t layer_of(const Access *access, const Plane *plane, int64_t place);
int of_other_cluster(const Access *access, int32_t id);
// Whether every place of an access is in order. After that it may be recorded.
int access_check(const Access *access);
void access_record(const Access *access);
void access_note(const Access *access);
// Splits a granule into bytes, which take over what is known of it. 0: there are no planes for that.
int divide_granule(Shadow *shadow, int64_t granule);
// Checks and records what a tensor core reads of shared memory, row by row; 0: one is not in order.
int access_pipelined(const Access *access);
// Likewise for the lanes of a whole warp, whose places have one history: the plane where they are, or null.
Plane *lanes_check(const Access *access, int64_t places[LANES]);
void lanes_record(const Access *access, Plane *plane, const int64_t places[LANES], int32_t id);

// Python is asked about an access; nonzero: it has raised.
typedef int32_t Ask(int32_t what, Conflict *conflict);
#ifndef UNCERTIFIED  // 1: without what certificates alone ask of each arrival, to which bench/emulator.py compares
#define UNCERTIFIED 0
#endif

// --- conflicts.c ---

// An access is compared with all earlier ones, and recorded; 0: Python has raised. Of loads and stores without `ask` 0 also:
// nothing is done, they are not in order at once.
int access_whole(const Access *access, Ask *ask, const LogEntry *entry);
int generic_whole(const Context *context, const GenericAccess *generic, Ask *ask, const LogEntry *entry);

// A detector's rule beside order: which writes it looks at, and whether such a one must not meet the last write of a place
// that it is not ordered after.
typedef struct {
  int (*looks_at)(const Access *access);
  int (*forbids)(const Access *access, const Plane *plane, int64_t place);
} Rule;
extern const Rule strong_stores;  // strong_stores.c

// --- log.c ---

// The log is worked off; 0: Python has to.
int log_flush(Tables *t);
