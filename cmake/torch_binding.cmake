# libffpa_torch.so: the ops in torch's registry, over torch's C shims. SPDX-License-Identifier: Apache-2.0
#
# One file serves torch 2.10 and later because it links no torch at build time: a stub libtorch_cpu.so of empty functions, which is
# never installed, gives it the DT_NEEDED entry, and Python has loaded the real library first.
file(GLOB binding_sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/python/binding/*.cc)
set(stub_source ${PROJECT_SOURCE_DIR}/python/binding/torch_stub.c)
if(NOT binding_sources OR NOT EXISTS ${stub_source})
  return()
endif()

add_library(ffpa_torch_stub SHARED ${stub_source})
set_target_properties(ffpa_torch_stub PROPERTIES
  OUTPUT_NAME torch_cpu C_VISIBILITY_PRESET default
  LIBRARY_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/torch_stub)  # away from lib/, where it would hide the real one
target_compile_options(ffpa_torch_stub PRIVATE -w -fno-sanitize=all)

add_library(ffpa_torch SHARED ${binding_sources})
target_include_directories(ffpa_torch PRIVATE ${PROJECT_SOURCE_DIR}/python/binding)
target_link_libraries(ffpa_torch PRIVATE ffpa_compile ffpa ffpa_torch_stub ${CMAKE_DL_LIBS})
target_link_options(ffpa_torch PRIVATE LINKER:--no-as-needed)
set_target_properties(ffpa_torch PROPERTIES BUILD_WITH_INSTALL_RPATH ON INSTALL_RPATH "$ORIGIN")
