/* SPDX-License-Identifier: Apache-2.0 */
/* A program with Python inside, which it starts and ends three times. */
#include <Python.h>

int main(void)
{
	for (int i = 0; i < 3; i++) {
		Py_Initialize();
		PyRun_SimpleString("import kvs_fixture.conn as conn\n"
		                   "result = conn.Receiver().poll()\n"
		                   "print('plain' if result == 3 else result[0], flush=True)\n");
		if (Py_FinalizeEx() < 0)
			return 1;
	}
	return 6;
}
