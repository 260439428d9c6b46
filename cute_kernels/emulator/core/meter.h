// What the units are asked for, counted; where somebody counts (`Tables.meter`).
#pragma once

#include "core.h"

enum { MATRIX_ROWS = 8, MATRIX_ROW = 16 };  // of ldmatrix and stmatrix: rows of a matrix, bytes of a row
enum { SECTOR = 32, LINE = 128, WAVEFRONT = 128 };  // bytes

static inline Meter *meter_of(const Tables *t, int64_t instruction, int which) {
  return t->meter + instruction * METERS + which;
}

static inline void meter_span(Meter *meter, int64_t address, int64_t nbytes) {
  int64_t first = address & OFFSET_MASK;
  if (!meter->high || first < meter->low) meter->low = first;
  if (first + nbytes > meter->high) meter->high = first + nbytes;
}

// ldmatrix or stmatrix of so many matrices.
void meter_matrices(const Tables *t, const int64_t *addresses, int32_t count, int64_t instruction);
