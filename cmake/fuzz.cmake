# Each fuzz/NAME.cc with an LLVMFuzzerTestOneInput becomes bin/fuzz_NAME; its seeds lie in fuzz/seeds/NAME.
# SPDX-License-Identifier: Apache-2.0
if(NOT CMAKE_CXX_COMPILER_ID MATCHES "Clang")
  message(FATAL_ERROR "FFPA_FUZZ needs clang: configure with `cmake --preset fuzz`")
endif()
file(GLOB fuzz_sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/fuzz/*.cc)
foreach(source IN LISTS fuzz_sources)
  get_filename_component(name ${source} NAME_WE)
  add_executable(fuzz_${name} ${source})
  target_link_libraries(fuzz_${name} PRIVATE ffpa_compile ffpa_static)
  target_link_options(fuzz_${name} PRIVATE -fsanitize=fuzzer)
endforeach()
