// Sums of small E4M3 numbers as tensor cores compute them, in integers.
#pragma once
#include "matrix.h"

// Reads B, of all CTAs. 0: there is no hope for this MMA.
int load_integers(const Mma *mma);
// Executes the part of a CTA. 0: nothing is done, for its numbers are too large.
int add_integers_aligned(const Mma *mma, int64_t part);
