// The operations of table_conversions.h.
#define TABLE "table_conversions.h"
#define OPERATIONS conversion_operations
#include "operations.h"
