/* SPDX-License-Identifier: Apache-2.0 */
/* Compiled, never run: our constants and structures are those of cuda.h. */
#include <cuda.h>

#include "../../transport/cuda_types.h"

#define X(name, value, theirs) _Static_assert((unsigned)(name) == (unsigned)(theirs), #theirs);
KVS_CU_CONSTANTS(X)
#undef X

#define SAME_SIZE(ours, theirs) _Static_assert(sizeof(ours) == sizeof(theirs), #theirs)
#define SAME_PLACE(ours, field, theirs, their_field) \
	_Static_assert(offsetof(ours, field) == offsetof(theirs, their_field) && \
	                       sizeof(((ours *)0)->field) == sizeof(((theirs *)0)->their_field), \
	               #theirs "." #their_field)

SAME_SIZE(struct kvs_cu_uuid, CUuuid);
SAME_SIZE(struct kvs_cu_ipc_handle, CUipcMemHandle);
#if CUDA_VERSION >= 12030
SAME_SIZE(struct kvs_cu_fabric_handle, CUmemFabricHandle);
#endif
SAME_SIZE(struct kvs_cu_location, CUmemLocation);
SAME_PLACE(struct kvs_cu_location, type, CUmemLocation, type);
SAME_PLACE(struct kvs_cu_location, id, CUmemLocation, id);
SAME_SIZE(struct kvs_cu_access, CUmemAccessDesc);
SAME_PLACE(struct kvs_cu_access, location, CUmemAccessDesc, location);
SAME_PLACE(struct kvs_cu_access, flags, CUmemAccessDesc, flags);
SAME_SIZE(struct kvs_cu_allocation_prop, CUmemAllocationProp);
SAME_PLACE(struct kvs_cu_allocation_prop, type, CUmemAllocationProp, type);
SAME_PLACE(struct kvs_cu_allocation_prop, handle_types, CUmemAllocationProp, requestedHandleTypes);
SAME_PLACE(struct kvs_cu_allocation_prop, location, CUmemAllocationProp, location);
SAME_PLACE(struct kvs_cu_allocation_prop, win32, CUmemAllocationProp, win32HandleMetaData);
SAME_PLACE(struct kvs_cu_allocation_prop, compression, CUmemAllocationProp, allocFlags.compressionType);
SAME_PLACE(struct kvs_cu_allocation_prop, rdma_capable, CUmemAllocationProp, allocFlags.gpuDirectRDMACapable);
SAME_PLACE(struct kvs_cu_allocation_prop, usage, CUmemAllocationProp, allocFlags.usage);
SAME_SIZE(struct kvs_cu_memcpy2d, CUDA_MEMCPY2D);
SAME_PLACE(struct kvs_cu_memcpy2d, src_type, CUDA_MEMCPY2D, srcMemoryType);
SAME_PLACE(struct kvs_cu_memcpy2d, src_device, CUDA_MEMCPY2D, srcDevice);
SAME_PLACE(struct kvs_cu_memcpy2d, src_pitch, CUDA_MEMCPY2D, srcPitch);
SAME_PLACE(struct kvs_cu_memcpy2d, dst_type, CUDA_MEMCPY2D, dstMemoryType);
SAME_PLACE(struct kvs_cu_memcpy2d, dst_device, CUDA_MEMCPY2D, dstDevice);
SAME_PLACE(struct kvs_cu_memcpy2d, dst_pitch, CUDA_MEMCPY2D, dstPitch);
SAME_PLACE(struct kvs_cu_memcpy2d, width, CUDA_MEMCPY2D, WidthInBytes);
SAME_PLACE(struct kvs_cu_memcpy2d, height, CUDA_MEMCPY2D, Height);
