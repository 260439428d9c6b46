// The lanes of a mask.
#pragma once
#include "state.h"

// Takes the values of the lanes of a mask, in their order, and which lanes these are; returns how many.
static inline int take_lanes(
    uint32_t mask, const int64_t values[restrict LANES], int64_t taken[restrict LANES], int64_t lanes[restrict LANES]) {
  if (mask == UINT32_MAX) {  // nearly always
    for (int lane = 0; lane < LANES; lane++) {
      taken[lane] = values[lane];
      lanes[lane] = lane;
    }
    return LANES;
  }
  int count = 0;
  for (; mask; mask &= mask - 1) {
    lanes[count] = __builtin_ctz(mask);
    taken[count] = values[lanes[count]];
    count++;
  }
  return count;
}
