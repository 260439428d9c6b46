// The operations of table_bits.h.
#define TABLE "table_bits.h"
#define OPERATIONS bit_operations
#include "operations.h"
