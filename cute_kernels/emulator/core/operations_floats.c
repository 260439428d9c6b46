// The operations of table_floats.h.
#define TABLE "table_floats.h"
#define OPERATIONS float_operations
#include "operations.h"
