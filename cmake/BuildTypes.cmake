# SPDX-License-Identifier: Apache-2.0
# Build types beside CMake's own: ASan, UBSan, TSan.
if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE RelWithDebInfo CACHE STRING "Debug Release RelWithDebInfo ASan UBSan TSan" FORCE)
endif()

set(CMAKE_C_FLAGS_ASAN "-g -O1 -fsanitize=address -fno-omit-frame-pointer")
set(CMAKE_C_FLAGS_UBSAN "-g -O1 -fsanitize=undefined -fno-sanitize-recover=all -fno-omit-frame-pointer")
set(CMAKE_C_FLAGS_TSAN "-g -O1 -fsanitize=thread -fno-omit-frame-pointer")

string(TOUPPER "${CMAKE_BUILD_TYPE}" kvs_build_type)
if(kvs_build_type MATCHES "^(ASAN|UBSAN|TSAN)$")
  set(KVS_SANITIZED ON)
endif()
