// What a unit kernel may use.
#include "prim/barrier.cuh"
#include "prim/copy.cuh"
#include "prim/exchange.cuh"
#include "prim/reduce.cuh"
#include "prim/wide_mma.cuh"
