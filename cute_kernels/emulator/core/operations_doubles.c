// The operations of table_doubles.h.
#define TABLE "table_doubles.h"
#define OPERATIONS double_operations
#include "operations.h"
