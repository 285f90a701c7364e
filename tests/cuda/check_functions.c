/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Compiled, never run: our prototypes are those of cuda.h. Its structures stand in for ours, whose layout
 * check_types.c compares, and a pointer to each of its functions must be one to ours.
 */
#define KVS_TRANSPORT_CUDA_TYPES_H
#define kvs_cu_uuid            CUuuid_st
#define kvs_cu_ipc_handle      CUipcMemHandle_st
#define kvs_cu_access          CUmemAccessDesc_st
#define kvs_cu_allocation_prop CUmemAllocationProp_st
#define kvs_cu_memcpy2d        CUDA_MEMCPY2D_st

#include <cuda.h>

#include "../../transport/cuda_driver.h"

struct pointers {
#define X(name, parameters) kvs_cu_result(*name) parameters;
	KVS_CUDA_FUNCTIONS(X)
#undef X
};

void kvs_check_functions(struct pointers *p);
void kvs_check_functions(struct pointers *p)
{
#define X(name, parameters) p->name = cu##name;
	KVS_CUDA_FUNCTIONS(X)
#undef X
}
