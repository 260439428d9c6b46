// Tensor memory, for those who access it.
#pragma once
#include "core.h"

typedef struct Rectangle { int64_t lane, lanes, column, columns; } Rectangle;

// Whether its cells are allocated and, if they are `read`, written.
int cells_allowed(const TensorCells *memory, const Rectangle *part, int read);
void cells_mark_written(const TensorCells *memory, const Rectangle *part);
