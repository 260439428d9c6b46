// The operations of table_integers.h.
#define TABLE "table_integers.h"
#define OPERATIONS integer_operations
#include "operations.h"
