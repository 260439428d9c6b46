// Asynchronous work, for the units that issue it.
#pragma once
#include "core.h"

#define CLOCK_BYTES(width) (ROWS * (width) * (int64_t)sizeof(int32_t))  // of a matrix of clocks

// An epoch of an operation that is issued; 0: Python has raised.
int64_t work_epoch(Tables *t, const Work *work, int64_t column, int64_t clock, int64_t text, int kind);

// Keeps a record of `size` bytes that cannot be issued yet, behind those that are kept.
void work_hold(WorkQueues *all, const Work *work, int64_t size);

// The operations of each kind. 1: Python has been told what is wrong.
int32_t lane_copy_run(WorkQueues *all, LaneCopy *copy);
int32_t tensor_commit_run(WorkQueues *all, TensorCommit *commit);
int32_t tensor_mma_run(WorkQueues *all, TensorMma *mma);
int32_t copies_arrival_run(WorkQueues *all, CopiesArrival *arrival);
int32_t bulk_load_run(WorkQueues *all, BulkCopy *copy);
int32_t bulk_read_run(WorkQueues *all, BulkCopy *copy);
int32_t bulk_write_run(WorkQueues *all, BulkCopy *copy);
int32_t wgmma_run(WorkQueues *all, const WgmmaWork *work);
