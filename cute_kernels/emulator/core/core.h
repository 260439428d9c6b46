// Every function of the core that Python calls, or bytecode in its place.
//
// layout.py reads these declarations too: `EXPORT type name(type parameter, ...);`, one of them a statement.
#pragma once
#include "state.h"

#define EXPORT __attribute__((visibility("default")))

// The entry of a key among `slots`, a power of two.
EXPORT int64_t key_slot(const int64_t *key, int64_t words, int64_t slots);

// The live mbarrier at a shared address, or null.
EXPORT Barrier *barrier_at(Tables *t, int64_t address);

// An operation on an mbarrier. Returns the phase that it found; -1: Python has been told what is wrong.
EXPORT int64_t mbarrier_apply(
    Tables *t, int64_t operation, int64_t address, int64_t amount, int64_t who, int64_t place, int64_t warp);
// Whether the phase of a parity, or with this number, is complete; -1 likewise.
EXPORT int32_t mbarrier_test(Tables *t, int64_t operation, int64_t address, int64_t state, int32_t parity);

// So many threads run now: a barrier over all of them may be complete. Returns a mask of those that are.
EXPORT int64_t named_recount(NamedBarriers *all, int64_t running);

// cp.async.bulk.commit_group of one thread.
EXPORT void bulk_commit(BulkThread *thread);
// Whether all but so many of its newest groups are complete, or their reads are: then it has waited for them.
EXPORT int32_t bulk_wait(const WorkQueues *all, BulkThread *thread, int64_t newest, int32_t read);
// Issues a bulk copy, of which all is given up to `lane`, and the thread. 1: Python has been told what is wrong.
EXPORT int32_t bulk_copy(Tables *t, const BulkCopy *copy);

// 1: the MMA was executed; 0: it reads bytes that are not initialised, and is not.
EXPORT int32_t mma_execute(const Mma *mma);
EXPORT void scaled_product(const ScaledProduct *product);
// mma.sync of a whole warp, with registers at offsets of `state`: those of A, B, C and D. 0: nothing is done, how it adds
// is not known.
EXPORT int32_t warp_mma(const WarpMma *form, uint8_t *state, const uint32_t *registers);
// What the warpgroups of a cluster have allocated.
EXPORT void wgmma_free(Warpgroup *groups, int64_t count);
// Issues a tcgen05.mma, of which all is given but the kind and the queue of its work, and `fields`. 1: Python was told.
EXPORT int32_t tensor_mma(Tables *t, const TensorMma *given);
// Decode descriptors. 0, or what is wrong with them.
EXPORT int32_t mma_fields(const MmaKind *kind, int64_t group, int64_t descriptor, MmaFields *fields);
EXPORT int32_t matrix_fields(int64_t descriptor, Matrix *matrix);
EXPORT int32_t wgmma_matrix(int64_t descriptor, Matrix *matrix);  // one of wgmma
// Where an operand lies in shared memory, int64 [rows, pieces of K_BYTES]: indices of chunks of 16 bytes or, MN-major, of
// elements.
EXPORT void matrix_places(const Matrix *matrix, const MatrixRows *rows, int64_t *places);
// tcgen05.ld or st. 0: nothing is done, cells are not allocated or (unless `unwritten`) have not been written.
EXPORT int32_t tensor_access(const TensorCells *memory, const TensorAccess *access, int32_t unwritten);
// tcgen05.commit of a thread; `multicast`: the mask of CTAs, or -1. 1: Python has been told what is wrong.
EXPORT int32_t tensor_commit(
    Tables *t, int64_t rank, int64_t warp, int64_t lane, int64_t address, int64_t multicast);
// With detectors: the stream of a lane ends, `clocks` is what its completion passes on. Returns how many commits it has.
EXPORT int64_t stream_commit(Agent *agent, Stream *stream, int64_t lane, int32_t *clocks);

// Counts an access of lanes, `nbytes` by each of a mask, by the running warp; `how`: METER_LOAD and so on.
EXPORT void meter_access(
    const Tables *t, const int64_t *addresses, uint32_t mask, int64_t instruction, int32_t shared, int32_t how,
    int64_t nbytes);
// Counts an MMA: bytes of operands in shared memory, and of tensor memory.
EXPORT void meter_mma(
    const Tables *t, int64_t instruction, int64_t operand_bytes, int64_t tensor_read, int64_t tensor_written);

// Issues an asynchronous operation, a record of `size` bytes: it takes effect, or is kept. Likewise performs one, of the
// queue with this index or (-1) of the first whose operation does not yield. 1: Python has been told what is wrong.
EXPORT int32_t work_submit(WorkQueues *all, Work *work, int64_t size);
EXPORT int32_t work_submit_python(WorkQueues *all, int64_t queue, int32_t yields);  // one that Python performs
EXPORT int32_t work_step(WorkQueues *all, int64_t index);
EXPORT void work_free(WorkQueues *all);

// The first of a warp's cp.async that is not complete, of those that any of the lanes has in all but its newest groups
// or (EVERY_COPY) has issued; or null.
EXPORT LaneCopy *copies_pending(const WorkQueues *all, const LaneCopies *copies, int64_t lanes, int64_t newest);

// Runs a warp until it waits, has used up its budget, fails or exits; which of these. `rows`: the exchange area.
EXPORT int32_t warp_run(const Program *program, uint8_t *state, uint8_t *rows, Tables *t, void *callback);
// Runs clusters of a `Slot` until `count` are done, or Python is to go on with one: then `done` is less.
EXPORT void slot_run(Slot *slot, void *callback);
// The operations that instructions consist of: how many, the name of one, and its function for values of lanes or for
// values that all lanes share; null where it has no such form.
EXPORT int32_t operation_count(void);
EXPORT const char *operation_name(int32_t number);
EXPORT void *operation_run(int32_t number, int32_t lanes);

// --- loads: memory.c ---

// Lanes look at what others may change: strong loads, and atomics that change nothing.
EXPORT void warp_looks(Tables *t, const int64_t *addresses, uint32_t mask, int64_t nbytes);

// --- clocks of the race detector: clocks.c ---

// Later accesses are told apart from those so far.
EXPORT void agent_advance(Agent *agent);
// Into the scratch matrix, what the lanes of a mask pass on: all of it, or its first row alone.
EXPORT void agent_snapshot(const Agent *agent, uint32_t mask);
EXPORT void agent_order(const Agent *agent, uint32_t mask);
// bar.warp.sync and stronger: the lanes know each other's accesses.
EXPORT void agent_converge(Agent *agent, uint32_t mask);
EXPORT void agent_load_together(Agent *agent, uint32_t mask);
// fence.acq_rel or stronger, with the scope of an order.
EXPORT void agent_fence(Agent *agent, uint32_t mask, int64_t order);
// fence.proxy.async of shared (1) and global (2) memory: covers what the lanes wrote, and what is visible to them.
EXPORT void agent_fence_proxy(Agent *agent, uint32_t mask, int32_t spaces);
// tcgen05.wait::ld (COLUMN_TENSOR_LOAD) and ::st: what the warp did so far is complete.
EXPORT void agent_complete_tensor(Agent *agent, int64_t kind);
// tcgen05.fence::before_thread_sync and ::after_thread_sync.
EXPORT void agent_fence_tensor(Agent *agent, int32_t before);
// One lane waited for operations of a stream of its own: the others know when they synchronise with it.
EXPORT void agent_complete_in_lane(Agent *agent, int64_t lane, int64_t column, int64_t clock);

// --- what barriers pass on: points.c ---

// Lanes arrive: passes on what the order allows.
EXPORT void agent_release(Agent *agent, Point *point, uint32_t mask, int64_t order);
// A wait on the completed phase: takes over what the order allows, once if the point follows the warp.
EXPORT void agent_acquire(Agent *agent, Point *point, int64_t order);
// An arrival from a CTA that passes on a matrix of clocks, which may have been made when there were fewer columns.
EXPORT void point_gather(Point *point, const int32_t *clocks, int64_t width, int64_t rank, int64_t order);
// The phase is complete: what was gathered is available.
EXPORT void point_complete(Point *point, int64_t phase);
// A phase completes, with what is gathered and a row of clocks or null: the number of a warp that may not have seen the
// phase before, for which it waits; -1: none.
EXPORT int64_t point_overtaken(const Point *point, int64_t phase, const int32_t *order);
// A wait of a warp for a phase succeeded; a warp of another CTA arrives; a copy to the barrier's CTA, or to the other
// one of its pair, is about to signal.
// Whether a warp knows that a phase is complete: the latest of those that are, or (BACK 1) the one before.
EXPORT int32_t point_knows(const Point *point, const Agent *agent, int64_t back);
EXPORT void point_waited(Point *point, const Agent *agent, int64_t phase, int64_t place, int64_t lanes);
EXPORT void point_arrived(Point *point, const Agent *agent, int64_t place, int64_t steps);
EXPORT void point_copied(Point *point, int64_t pair, int64_t identity);
// The first column of what made the latest complete phase that a row of order lacks; -1: it knows that the phase is over.
EXPORT int64_t point_lacks(const Point *point, const int32_t *order, int64_t width);
// The first column of a use of the mbarrier that a warp, which is about to invalidate it, does not know; -1: there is none.
EXPORT int64_t point_in_use(const Point *point, const Agent *agent);

// --- the race detector; 0, if nothing else is said (of log_entry null): nothing is done, Python decides ---

// A new entry of the log: where its addresses go.
EXPORT int64_t *log_entry(Tables *t, int32_t kind, uint32_t mask, int32_t argument, int32_t instruction);
// An entry of a load of tensor memory.
EXPORT int32_t log_tensor_load(
    Tables *t, uint32_t mask, int32_t columns, int32_t instruction, int64_t address, int64_t index);
// Works entries off; the number of the first that is for Python, or `end`; -1: `ask` has raised. Without `ask` all that
// is not in order at once, or needs room, is for Python.
EXPORT int64_t log_observe(const Context *context, const LogEntry *log, int64_t first, int64_t end, void *ask);

// An access is compared with earlier ones, and recorded; loads or stores likewise. 0: `ask`, which is told of late ones,
// has raised.
EXPORT int32_t access_record_whole(const Access *access, void *ask);
EXPORT int32_t generic_record_whole(const Context *context, const GenericAccess *generic, void *ask);
// How many loads and stores of warps this thread decided for all lanes at once.
EXPORT int64_t accesses_together(void);
