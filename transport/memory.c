/* SPDX-License-Identifier: Apache-2.0 */
#include "memory.h"

#include <dlfcn.h>
#include <stddef.h>

/* From the CUDA driver API reference: CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_MEMORYTYPE_DEVICE. */
#define POINTER_ATTRIBUTE_MEMORY_TYPE 2
#define MEMORY_TYPE_DEVICE            2

typedef int (*pointer_get_attribute_t)(void *data, int attribute, uint64_t pointer);

bool kvs_memory_is_device(uint64_t address)
{
	void *driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
	if (!driver)
		return false;
	pointer_get_attribute_t get = (pointer_get_attribute_t)dlsym(driver, "cuPointerGetAttribute");
	unsigned int type = 0;
	bool device = get && get(&type, POINTER_ATTRIBUTE_MEMORY_TYPE, address) == 0 && type == MEMORY_TYPE_DEVICE;
	dlclose(driver);
	return device;
}
